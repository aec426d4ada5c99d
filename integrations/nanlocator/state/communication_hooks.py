"""Communication hooks of DistributedDataParallel, and what they keep between steps: PowerSGD counts
iterations and keeps what its compression has left out (torch/distributed/algorithms/ddp_comm_hooks)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def communication_hooks_of(models: Iterable[nn.Module]) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Each hook, and the object that the program registered with it."""
    for model in models:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                yield from module._comm_hooks


class HookStates:
    """A state (nanlocator.step.StepState): the simple attributes of the hooks' objects. Tensors in them, of
    the size of the model, are not kept: ``restore`` raises RuntimeError if they have changed."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._simple: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[tuple[Any, dict[str, Any]]] = []

    def save(self) -> None:
        owners = [owner for _, owner in communication_hooks_of(self._models) if owner is not None]
        self._simple = [(owner, _simple_of(owner)) for owner in owners]
        self._tensors = [(owner, _tensors_of(owner)) for owner in owners]

    def restore(self) -> None:
        for owner, attributes in self._simple:
            for name, value in attributes.items():
                setattr(owner, name, value)
        changed = [
            f"{type(owner).__name__}.{name} of a communication hook"
            for owner, began in self._tensors
            for name, content in _tensors_of(owner).items()
            if content != began.get(name)
        ]
        if changed:
            raise RuntimeError(", ".join(changed))


def _attributes_of(owner: Any) -> dict[str, Any]:
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(owner, name) for name in slots if hasattr(owner, name)} | dict(
        getattr(owner, "__dict__", {})
    )


def _simple_of(owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in _attributes_of(owner).items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def _tensors_of(owner: Any) -> dict[str, Any]:
    """The identities and versions of the tensors that each attribute holds."""
    return {
        name: [(id(each), each._version) for each in held if isinstance(each, torch.Tensor)]
        for name, value in _attributes_of(owner).items()
        if (held := list(value.values()) if isinstance(value, dict) else [value])
        and any(isinstance(each, torch.Tensor) for each in held)
    }
