"""Replaces tensors in arguments. Runs no code of the program's classes."""

import dataclasses
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanlocator import _C

_DEEPEST = 16
_DEEPEST_BESIDE = 6
_MOST_ENTRIES = 64  # entries of an inspected object, and number of inspected objects
_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def mapped(value: Any, of: Callable[[Any], Any], depth: int = 0) -> Any:
    """Replaces each tensor and RecordedValue in ``value`` by its ``of``, in copies of the lists, tuples,
    dictionaries, dataclasses and tokenizers' batches (UserDict) around them. Other objects stay the same."""
    if isinstance(value, torch.Tensor | _C.RecordedValue):
        return of(value)
    kind = type(value)
    if kind in _WITHOUT_TENSORS or depth > _DEEPEST:
        return value
    if kind is dict:
        return {key: mapped(each, of, depth + 1) for key, each in value.items()}
    if kind in (list, tuple):
        if set(map(type, value)) <= _WITHOUT_TENSORS:
            return kind(value)
        return kind(mapped(each, of, depth + 1) for each in value)
    if _is_named_tuple(value):
        return tuple.__new__(kind, [mapped(each, of, depth + 1) for each in value])
    if _is_plain_dataclass(kind) or isinstance(value, UserDict):
        attributes = vars(value)
        new = {name: mapped(each, of, depth + 1) for name, each in attributes.items()}
        if all(new[name] is attributes[name] for name in new):
            return value
        copied = object.__new__(kind)
        vars(copied).update(new)
        return copied
    return value


def is_simple_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def replaced(value: Any, by_id: dict[int, Any]) -> Any:
    """``mapped``, with ``by_id`` in place of the tensors with these ids."""
    if _C.plain_tensors(value) is not None:
        return _C.plain_replaced(value, by_id)
    return mapped(value, lambda each: by_id.get(id(each), each))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that ``mapped`` replaces, in its order."""
    if (plain := _C.plain_tensors(value)) is not None:
        return plain
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    mapped(value, add)
    return tensors


def tensors_beside(value: Any) -> list[torch.Tensor]:
    """Some tensors in attributes and entries of objects that ``mapped`` leaves unchanged."""
    if _C.plain_tensors(value) is not None:
        return []
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def look(each: Any, depth: int, is_beside: bool) -> None:
        kind = type(each)
        if kind in _WITHOUT_TENSORS or isinstance(each, torch.nn.Module | _C.RecordedValue | type):
            return
        if isinstance(each, torch.Tensor):
            if is_beside and len(found) < _MOST_ENTRIES:
                found.append(each)
            return
        if depth > _DEEPEST_BESIDE or id(each) in seen or len(seen) > _MOST_ENTRIES:
            return
        seen.add(id(each))
        is_mapped = kind in (list, tuple, dict) or _is_named_tuple(each) or _is_plain_dataclass(kind)
        for part in _parts_of(each):
            look(part, depth + 1, is_beside or not (is_mapped or isinstance(each, UserDict)))

    look(value, 0, False)
    return found


def _parts_of(value: Any) -> Iterator[Any]:
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and len(attributes) <= _MOST_ENTRIES:
        yield from list(attributes.values())
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) <= _MOST_ENTRIES:
        yield from list(dict.values(value) if isinstance(value, dict) else value)
    for slot in _slots_of(type(value)):
        try:
            yield slot.__get__(value)
        except (AttributeError, TypeError):  # it is empty
            continue


_slots: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()


def _slots_of(kind: type) -> list[Any]:
    if (slots := _slots.get(kind)) is None:
        descriptors = (each for base in kind.__mro__ for each in vars(base).values())
        slots = [each for each in descriptors if type(each) is types.MemberDescriptorType]
        _slots[kind] = slots
    return slots


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _is_plain_dataclass(kind: type) -> bool:
    """Whether the class's objects hold nothing but their attributes; ModelOutput is also a dictionary."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and kind.__basicsize__ == _Attributes.__basicsize__
        and not issubclass(kind, torch.nn.Module)
    )


class _Attributes:
    pass
