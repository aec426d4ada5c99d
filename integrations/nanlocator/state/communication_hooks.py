"""Communication hooks of DistributedDataParallel, and what they keep between steps: PowerSGD counts
iterations and keeps what its compression has left out (torch/distributed/algorithms/ddp_comm_hooks)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nanlocator.state.containers import is_simple_value


def communication_hooks_of(models: Iterable[nn.Module]) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Each hook, and the object that the program registered with it."""
    for wrapper in _wrappers_of(models):
        yield from wrapper._comm_hooks


def _wrappers_of(models: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    for model in models:
        yield from (each for each in model.modules() if isinstance(each, DistributedDataParallel))


class HookStates:
    """A state (nanlocator.step.StepState): the simple attributes of the hooks' objects. Tensors in them, of
    the size of the model, are not kept: ``restore`` raises RuntimeError if they have changed."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._wrappers: list[DistributedDataParallel] | None = None
        self._simple: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[tuple[Any, dict[str, Any]]] = []
        self._left: list[tuple[Any, dict[str, Any]]] | None = None  # by the bad pass

    def save(self) -> None:
        if self._wrappers is None:
            self._wrappers = list(_wrappers_of(self._models))
        owners = [owner for each in self._wrappers for _, owner in each._comm_hooks if owner is not None]
        self._simple = [(owner, _simple_of(owner)) for owner in owners]
        self._tensors = [(owner, _tensors_of(owner)) for owner in owners]

    def restore(self) -> None:
        if self._left is None:
            self._left = [(owner, _simple_of(owner)) for owner, _ in self._simple]
        lost = [
            f"{type(owner).__name__}.{name} of a communication hook"
            for owner, began in self._tensors
            for name, content in _tensors_of(owner).items()
            if content != began.get(name)
        ] + _set_all(self._simple)
        if lost:
            raise RuntimeError(", ".join(lost))

    def leave(self) -> None:
        """After the last re-run: the program goes on with its own values."""
        if self._left is not None:
            _set_all(self._left)
        self._left = None


def _set_all(values: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    """Returns what could not be set."""
    refused = []
    for owner, attributes in values:
        now = _simple_of(owner)
        for name, value in attributes.items():
            if name in now and repr(now[name]) == repr(value):
                continue
            try:
                setattr(owner, name, value)
            except Exception:  # a property, a frozen dataclass
                refused.append(f"{type(owner).__name__}.{name} of a communication hook")
    return refused


def _attributes_of(owner: Any) -> dict[str, Any]:
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(owner, name) for name in slots if hasattr(owner, name)} | dict(
        getattr(owner, "__dict__", {})
    )


def _simple_of(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in _attributes_of(owner).items() if is_simple_value(value)}


def _tensors_of(owner: Any) -> dict[str, Any]:
    """The identities and versions of the tensors that each attribute holds."""
    return {
        name: [(id(each), each._version) for each in held if isinstance(each, torch.Tensor)]
        for name, value in _attributes_of(owner).items()
        if (held := list(value.values()) if isinstance(value, dict) else [value])
        and any(isinstance(each, torch.Tensor) for each in held)
    }
