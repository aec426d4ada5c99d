"""Wrapping of functions and methods of Megatron, and the way back."""

import functools
from collections.abc import Callable
from typing import Any

_NOTHING = object()


def replace(target: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Sets ``target.name``, of an instance, a module or a class. What it returns leaves ``target`` as it was:
    with the very object that it held, which for a class is not what ``getattr`` gives (in torch 2.15 a method
    of ProcessGroup would lose its self); without one where it had inherited it."""
    own = vars(target).get(name, _NOTHING)
    setattr(target, name, replacement)

    def undo() -> None:
        if vars(target).get(name) is not replacement:
            return  # someone wrapped ours since: it stays inside theirs, and passes calls on
        if own is _NOTHING:
            delattr(target, name)
        else:
            setattr(target, name, own)

    return undo


class Patches:
    """Each ``wrap`` replaces ``target.name``, of an instance or a module, by
    ``wrapper(original, *args, **kwargs)``; ``remove`` takes them off, last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, target: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(target, name)
        wrapped = functools.wraps(original)(functools.partial(wrapper, original))
        self._undo.append(replace(target, name, wrapped))

    def on_removal(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
