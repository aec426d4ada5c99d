"""Wrapping of functions and methods of others, and the way back."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

_NOTHING = object()


def replace(target: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Sets ``target.name``, of an instance, a module or a class. What it returns leaves ``target`` as it was:
    with the very object that it held, which for a class is not what ``getattr`` gives (in torch 2.15 a method
    of ProcessGroup would lose its self); without one where it had inherited it. Where someone has wrapped the
    replacement since, it stays inside theirs and has to pass calls on; of replacements made here it goes with
    the outer one."""
    own = vars(target).get(name, _NOTHING)
    setattr(target, name, replacement)

    def undo() -> None:
        if vars(target).get(name) is not replacement:
            _function_of(replacement)._nanlocator_undo = undo
            return
        if own is _NOTHING:
            delattr(target, name)
        else:
            setattr(target, name, own)
            getattr(_function_of(own), "_nanlocator_undo", _nothing)()

    return undo


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method while its owner lives, None afterwards, and does not keep it alive: for the
    engine, whose references Python's garbage collector does not see."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        return living(*args) if living is not None else None

    return call


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _nothing() -> None:
    pass


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
