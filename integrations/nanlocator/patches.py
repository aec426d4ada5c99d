"""Wrapping of functions and methods of Megatron, and the way back."""

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Each ``wrap`` replaces ``target.name``, of an instance or a module, by
    ``wrapper(original, *args, **kwargs)``; ``remove`` takes them off, last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, target: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(target, name)
        wrapped = functools.wraps(original)(functools.partial(wrapper, original))
        had_own = name in vars(target)
        setattr(target, name, wrapped)

        def undo() -> None:
            if vars(target).get(name) is not wrapped:
                return  # someone wrapped ours since: it stays inside theirs, and passes calls on
            if had_own:
                setattr(target, name, original)
            else:
                delattr(target, name)

        self._undo.append(undo)

    def on_removal(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
