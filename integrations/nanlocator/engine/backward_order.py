"""The order in which backward finishes a rank's gradients."""

import torch

from nanlocator import _C

_STEPS_TO_OBSERVE = 20


class BackwardOrder:
    """Notes the order in which backward finishes gradients. It differs from the order of registration
    (linear_proj is registered before linear_qkv). It is known after one step in which every gradient became
    ready. If some gradient never does (an expert without tokens), it counts as known after a few steps."""

    def __init__(self, ids: "dict[torch.nn.Parameter, int]", locator: _C.GradientLocator) -> None:
        self._ids, self._locator = ids, locator
        self._not_yet_ready = set(self._ids)
        self._steps = 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._observe) for p in self._ids]

    def _observe(self, parameter: torch.nn.Parameter) -> None:
        self._locator.gradient_is_ready(self._ids[parameter])
        self._not_yet_ready.discard(parameter)

    def end_step(self) -> None:
        if self._hooks and (not self._not_yet_ready or self._steps >= _STEPS_TO_OBSERVE):
            self.remove()
        self._not_yet_ready = set(self._ids) if self._hooks else set()
        self._steps += 1

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
