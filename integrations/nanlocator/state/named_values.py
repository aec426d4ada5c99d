"""Values outside of modules that the step's code names, and that the program may change between the step's
use of them and its re-run: a global counter, a configuration's temperature, a class attribute, a list, a
memory bank."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nanlocator.state.closures import Used, for_each_used
from nanlocator.state.containers import is_simple_value

_MOST = 64  # values, and elements of one
_LONGEST = 256  # characters of an element
_ABSENT = object()


class NamedValues:
    """Compares the values with those of the step's beginning. They are not restored: when in the step the
    program has set them is unknown.

    Args:
        functions: the step's functions.
        is_of_library: whether a package is a library's; its variables are not the program's.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]], is_of_library: Callable[[str], bool]) -> None:
        self._is_of_library = is_of_library
        self._places: dict[tuple[int, str], _Place] = {}
        for function in functions:
            for_each_used(function, self._take)
        self._began: list[Any] = []
        self._left: list[Any] = []

    def save(self) -> None:
        self._began = self._now()

    def begin_rerun(self) -> None:
        self._left = self._now()

    def changed(self) -> Iterator[str]:
        """After a re-run: names of those that were others when it began than at the step's beginning, and
        that it has not changed again. What each pass changes is the step's own."""
        values = zip(self._places.values(), self._began, self._left, self._now(), strict=False)
        for place, began, left, now in values:
            if began != left and left == now:
                yield place.name

    def _now(self) -> list[Any]:
        return [_content(place.now()) for place in self._places.values()]

    def _take(self, used: Used) -> None:
        if used.owner is None or len(self._places) >= _MOST or isinstance(used.owner, nn.Module):
            return
        if isinstance(used.owner, type) and not is_simple_value(used.value):
            return  # what a class collects: a framework's own state
        if _content(used.value) is None or self._is_of_library(_package_of(used.owner)):
            return
        self._places.setdefault((id(used.owner), used.key), _Place(used))


def _package_of(owner: Any) -> str:
    if isinstance(owner, dict):  # global variables
        name = owner.get("__name__", "")
    elif isinstance(owner, types.ModuleType):
        name = owner.__name__
    elif isinstance(owner, types.CellType | types.SimpleNamespace):
        name = ""
    else:
        name = (owner if isinstance(owner, type) else type(owner)).__module__
    return str(name).partition(".")[0]


class _Place:
    """Where the value is; it keeps neither the value nor, if that can be, the object that has it."""

    def __init__(self, used: Used) -> None:
        self.name, self._key = used.name, used.key
        try:
            self._owner: Callable[[], Any] = weakref.ref(used.owner)
        except TypeError:  # a dictionary of global variables, a cell
            owner = used.owner
            self._owner = lambda: owner

    def now(self) -> Any:
        owner = self._owner()
        if isinstance(owner, types.CellType):
            try:
                return owner.cell_contents
            except ValueError:
                return _ABSENT
        held = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        return held.get(self._key, _ABSENT)


def _content(value: Any) -> Any:
    """A value by which two contents are compared; None if they cannot be compared."""
    if isinstance(value, str):
        return len(value), hash(value)  # a string keeps its hash
    if is_simple_value(value):
        return type(value), repr(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info().currsize
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.Parameter) or value.requires_grad or value.is_inference():
            return None
        return id(value), value._version
    if isinstance(value, list | tuple | deque | dict) and len(value) <= _MOST:
        elements = list(value.items()) if isinstance(value, dict) else list(value)
        simple = [
            repr(each)[:_LONGEST]
            for each in elements
            if is_simple_value(each) or (isinstance(value, dict) and is_simple_value(each[1]))
        ]
        return len(value), simple
    return None if value is not _ABSENT else "absent"
