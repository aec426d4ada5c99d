"""Arguments with other tensors in place of theirs; containers and plain objects around them are copied."""

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanlocator import _C

_MOST_OF_AN_OBJECT = 64  # attributes, and entries of a container among them: more is no batch
_DEEPEST = 4  # objects and containers in an object
_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def mapped(value: Any, of: Callable[[Any], Any], depth: int = 0) -> Any:
    """``of`` of each tensor and RecordedValue in ``value``: in lists, tuples, dictionaries, dataclasses and
    small objects of classes that Python copies by itself. All else is the same object. ``depth``: how many
    objects, and containers in them, are around it."""
    if isinstance(value, torch.Tensor | _C.RecordedValue):
        return of(value)
    kind = type(value)
    if kind in _WITHOUT_TENSORS:
        return value
    parts = _parts_of(value, depth)
    if parts is None:
        return value
    depth += 1 if depth or not _is_container(kind) else 0
    new = {name: mapped(each, of, depth) for name, each in parts.items()}
    if kind is dict:
        return new
    if kind in (list, tuple):
        return kind(new.values())
    if _is_named_tuple(value):
        return kind(*new.values())
    return _copy_with(value, {name: each for name, each in new.items() if each is not parts[name]})


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Those that ``mapped`` replaces, in its order."""
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    mapped(value, add)
    return tensors


def kept_whole(value: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    """What ``mapped`` leaves as it is though tensors are in it: "0.batch (Data)"."""
    kind = type(value)
    if kind in _WITHOUT_TENSORS or isinstance(value, torch.Tensor | torch.nn.Module | _C.RecordedValue):
        return
    parts = _parts_of(value, depth)
    if parts is None:
        if _holds_tensors(value):
            yield f"{name} ({kind.__name__})"
        return
    depth += 1 if depth or not _is_container(kind) else 0
    for key, each in parts.items():
        yield from kept_whole(each, f"{name}.{key}" if name else str(key), depth)


def _parts_of(value: Any, depth: int) -> dict[Any, Any] | None:
    """By key, index or attribute; None of what is not looked into."""
    kind = type(value)
    if _is_container(kind) or _is_named_tuple(value) or isinstance(value, dict):
        if depth and (len(value) > _MOST_OF_AN_OBJECT or depth > _DEEPEST):
            return None
        return dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if depth > _DEEPEST or not _copies_plainly(kind):
        return None
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    attributes = vars(value)
    return dict(attributes) if len(attributes) <= _MOST_OF_AN_OBJECT else None


def _is_container(kind: type) -> bool:
    return kind in (list, tuple, dict)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


@functools.cache
def _copies_plainly(kind: type) -> bool:
    """A copy is a new object with the same attributes, and no code of the class runs."""
    if issubclass(kind, torch.nn.Module | type) or kind.__module__ in ("builtins", "types", "functools"):
        return False
    if dataclasses.is_dataclass(kind) or issubclass(kind, UserDict):
        return True
    by_python = (
        "__copy__",
        "__getattribute__",
        "__getstate__",
        "__reduce__",
        "__reduce_ex__",
        "__setattr__",
        "__setstate__",
    )
    return hasattr(kind, "__dict__") and all(
        getattr(kind, name, None) is getattr(object, name, None) for name in by_python
    )


def _copy_with(value: Any, new: dict[Any, Any]) -> Any:
    if not new:
        return value
    try:
        copied = copy.copy(value)
        for name, each in new.items():
            if isinstance(value, dict):
                dict.__setitem__(copied, name, each)
            if isinstance(name, str) and (not isinstance(value, dict) or dataclasses.is_dataclass(value)):
                object.__setattr__(copied, name, each)  # a dataclass may be frozen; ModelOutput is both
    except Exception:  # whatever a class of the program raises
        return value
    return copied


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    contents = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if isinstance(value, list | tuple | set | frozenset):
        contents += value
    if isinstance(value, dict):
        contents += value.values()
    return any(isinstance(each, torch.Tensor) for each in contents) or (
        depth > 0 and any(_holds_tensors(each, depth - 1) for each in contents)
    )
