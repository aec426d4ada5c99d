"""Each rank's own gradients, before DistributedDataParallel reduces them.

A hook of a parameter runs in AccumulateGrad::apply, before the hook of DistributedDataParallel that marks
the parameter as ready (torch/csrc/autograd/functions/accumulate_grad.cpp, reducer.cpp). What is in ``.grad``
then is this rank's, whatever communication hook, views into buckets or static graph follow.
DistributedDataParallel itself is left alone: a communication hook of ours would change its arithmetic.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nanlocator.modules import local_part

# Groups of scans; others number theirs from 0.
_AT_THE_END = 1 << 20
_ONE_BY_ONE = _AT_THE_END + 1


class LocalGradients:
    """Scans the gradient of each parameter in the first backward of a pass that reduces it: in a later one it
    holds what other ranks have sent.

    Args:
        driver: its ``scan``, in a pass; not kept alive. Without a pass a clip may come before anybody looks
            at the reduced gradients, and what it makes of them would be the reduction's fault.
        on_uncovered: called once with what is not seen, where that turns out.
    """

    def __init__(
        self, parameters: list[torch.Tensor], driver: Any, on_uncovered: Callable[[str], None]
    ) -> None:
        self._driver = weakref.ref(driver)
        self._on_uncovered = on_uncovered
        self._module: DistributedDataParallel | None = None
        self._begun: set[int] = set()  # numbers of parameters that are seen to in this step
        self._ready: list[tuple[int, torch.Tensor]] = []  # of them, to be scanned when backward ends
        this = weakref.ref(self)  # autograd keeps the hooks
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_calling(this, number))
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad and parameter.is_leaf
        ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> None:
        """The gradients are zero, or gone."""
        self._begun.clear()
        self._ready.clear()

    def is_ready(self, number: int, parameter: torch.Tensor) -> None:
        if self._module is None:
            self._module = _module_of(parameter)
        if self._module is None:
            self._give_up("gradients before the program reduces them over its ranks")
            return
        driver = self._driver()
        if driver is None or not driver.is_in_pass:
            self._give_up("gradients before DistributedDataParallel reduces them: step() gets no closure")
            return
        if number in self._begun or not self._module.require_backward_grad_sync:
            return
        self._begun.add(number)
        # A view into a bucket is on its way when the bucket's last one is ready; of a static graph all are
        # reduced at the end of the first backward, before anything that is queued now.
        if self._module.gradient_as_bucket_view or self._module.static_graph:
            self._scan(_ONE_BY_ONE + number, [(number, parameter)])
            return
        if not self._ready:  # before DistributedDataParallel queues what copies the sums back
            torch.autograd.Variable._execution_engine.queue_callback(self._scan_ready)
        self._ready.append((number, parameter))

    def _give_up(self, uncovered: str) -> None:
        if self._handles:
            self.remove()
            self._on_uncovered(uncovered)

    def _scan_ready(self) -> None:
        ready, self._ready = self._ready, []
        self._scan(_AT_THE_END, ready)

    def _scan(self, group: int, ready: list[tuple[int, torch.Tensor]]) -> None:
        driver = self._driver()
        found = [(number, local_part(p.grad)) for number, p in ready if p.grad is not None]
        if driver is not None and found:
            driver.scan("grad_local", group, "grad", [n for n, _ in found], [g for _, g in found])


def _calling(this: "weakref.ref[LocalGradients]", number: int) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        found = this()
        if found is not None:
            found.is_ready(number, parameter)

    return hook


def _module_of(parameter: torch.Tensor) -> DistributedDataParallel | None:
    """The live DistributedDataParallel that reduces this parameter."""
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and any(
            parameter is one for one in each._module_parameters
        ):
            return each
    return None
