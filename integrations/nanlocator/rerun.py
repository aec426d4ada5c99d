"""What the re-run of a bad step needs of Python: the generators of Python and numpy, a loss scaler.
The re-run itself is C++ (nanlocator/step/step_rerun.hpp)."""

import copy
import random
import sys
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """Anything with PyTorch's pair of methods: a data sampler, a scheduler, a metric."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class GeneratorStates:
    """Python's ``random`` and, where it is imported, numpy's global generator."""

    def save(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class ObjectState:
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, owner: Stateful) -> None:
        self._owner = owner

    def save(self) -> None:
        self._state = copy.deepcopy(self._owner.state_dict())

    def restore(self) -> None:
        self._owner.load_state_dict(copy.deepcopy(self._state))


class ScalerState:
    """A ``torch.amp.GradScaler``: its scale, and what ``unscale_`` has noted of each optimizer."""

    def __init__(self, scaler: "torch.amp.GradScaler") -> None:
        self._scaler = scaler

    def save(self) -> None:
        self._state = copy.deepcopy(self._scaler.state_dict())
        self._per_optimizer = dict(self._scaler._per_optimizer_states)

    def restore(self) -> None:
        if self._state:  # empty where the scaler is disabled
            self._scaler.load_state_dict(copy.deepcopy(self._state))
        self._scaler._per_optimizer_states.clear()
        for optimizer, state in self._per_optimizer.items():
            self._scaler._per_optimizer_states[optimizer] = dict(state)


def losses_of(result: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in what a closure returned: a loss, or a tuple or dict of them."""
    if isinstance(result, torch.Tensor):
        return [("loss", result)]
    if isinstance(result, dict):
        return [(f"loss[{key}]", value) for key, value in result.items() if isinstance(value, torch.Tensor)]
    if isinstance(result, tuple | list):
        return [(f"loss[{i}]", value) for i, value in enumerate(result) if isinstance(value, torch.Tensor)]
    return []
