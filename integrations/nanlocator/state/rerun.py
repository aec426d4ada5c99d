"""The Python state that the re-run of a bad step restores, beside generators: a loss scaler,
TransformerEngine's scales. The re-run itself is C++ (nanlocator/step/step_rerun.hpp)."""

import copy
import operator
import sys
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler


class Stateful(Protocol):
    """Any object with PyTorch's two methods: a data sampler, a scheduler, a metric."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class ObjectState:
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, owner: Stateful) -> None:
        self._owner = owner

    def save(self) -> None:
        self._state = copy.deepcopy(self._owner.state_dict())

    def restore(self) -> None:
        self._owner.load_state_dict(copy.deepcopy(self._state))


class ScalerState:
    """A ``torch.amp.GradScaler``: its scale, and the record that ``unscale_`` keeps of each optimizer."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def save(self) -> None:
        self._state = copy.deepcopy(self._scaler.state_dict())
        self._per_optimizer = dict(self._scaler._per_optimizer_states)

    def restore(self) -> None:
        if self._state:  # empty if the scaler is disabled
            self._scaler.load_state_dict(copy.deepcopy(self._state))
        self._scaler._per_optimizer_states.clear()
        for optimizer, state in self._per_optimizer.items():
            self._scaler._per_optimizer_states[optimizer] = dict(state)


class Fp8Scales:
    """TransformerEngine's delayed scaling. Each forward and backward changes the scales and the histories of
    maxima. They are plain attributes of its modules, and one place lists them all (2.x, HEAD of 2026-08:
    pytorch/quantization.py, before 2.9 pytorch/fp8.py). The other recipes keep no state.

    Costs two look-ups if fp8 is not in use, else two launches for all of them at the start of a step.
    """

    _MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def save(self) -> None:
        listed = self._listed()
        if len(listed) != len(self._tensors) or not all(map(operator.is_, listed, self._tensors)):
            self._tensors = listed
            self._copies = [torch.empty_like(tensor) for tensor in listed]
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)

    def restore(self) -> None:
        known = {id(tensor) for tensor in self._tensors}
        now = self._listed()
        if not known <= {id(tensor) for tensor in now}:
            raise RuntimeError("TransformerEngine replaced scales or histories during the step")
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)
        for tensor in now:  # a tensor made in this step gets DelayedScalingRecipeState's initial values
            if id(tensor) not in known:
                tensor.fill_(1.0 if tensor.dim() == 1 else 0.0)

    def _listed(self) -> list[torch.Tensor]:
        manager = next(
            (
                found
                for name in self._MODULES
                if (found := getattr(sys.modules.get(name), "FP8GlobalStateManager", None)) is not None
            ),
            None,
        )
        if manager is None:
            return []
        state = getattr(manager, "quantization_state", manager)
        buffers = (state.global_scale_buffer, state.global_amax_history_buffer)
        return [tensor for buffer in buffers for listed in buffer.values() for tensor in listed]


def losses_of(result: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in what a closure returned: a loss, or a tuple or dict of them."""
    if isinstance(result, torch.Tensor):
        return [("loss", result)]
    if isinstance(result, dict):
        return [(f"loss[{key}]", value) for key, value in result.items() if isinstance(value, torch.Tensor)]
    if isinstance(result, tuple | list):
        return [(f"loss[{i}]", value) for i, value in enumerate(result) if isinstance(value, torch.Tensor)]
    return []
