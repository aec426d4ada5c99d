"""A batch that is kept by reference, so that its step can be executed again."""

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nanlocator import _C


class KeptBatch:
    """``item``, with its containers copied and its tensors by reference."""

    def __init__(self, item: Any) -> None:
        self.item = _containers_copied(item)
        self._versions = [version_of(tensor) for tensor in _tensors(self.item)]

    def copy(self) -> Any:
        """A copy for a step, which may remove entries from its batch."""
        return _containers_copied(self.item)

    def changed(self, microbatch: int | None) -> list[str]:
        """A sentence about each tensor that the step has written to."""
        place = "" if microbatch is None else f"microbatch {microbatch}: "
        return [
            f"{place}'{name}' was written in place by the step"
            for (name, tensor), version in zip(named_tensors(self.item), self._versions, strict=True)
            if version_of(tensor) != version
        ]


def named_tensors(item: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        yield name or "data", item
        return
    entries: Any = item.items() if isinstance(item, Mapping) else ()
    if isinstance(item, list | tuple):
        entries = enumerate(item)
    for key, value in entries:
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def _tensors(item: Any) -> list[torch.Tensor]:
    plain = _C.plain_tensors(item)
    return plain if plain is not None else [tensor for _, tensor in named_tensors(item)]


def _containers_copied(item: Any) -> Any:
    if _C.plain_tensors(item) is not None:
        return _C.plain_replaced(item, {})
    if type(item) is dict:
        return {key: _containers_copied(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_containers_copied(value) for value in item)
    return copy.copy(item) if isinstance(item, dict | UserDict) else item


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no version counter
