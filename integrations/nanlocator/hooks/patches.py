"""Patches other code and restores it: one wrapper at each point, with any number of subscribers.

    patches = Patches(__name__)
    patches.wrap(points.UNSCALE, self._unscale)                    # _unscale(original, *args, **kwargs)
    patches.wrap(points.OPTIMIZER_STEP, self._step, of=optimizer)  # this optimizer's step only
    patches.remove()

The first subscriber installs the wrapper, and removing the last one restores the very object that was there.
In between, subscribers can come and go; a running call keeps the subscribers that it began with. A call
passes through them in the order of the point's row in ``points``, whenever they subscribed; among several
from one module, the latest comes first. If other code has wrapped our wrapper since, ours stays inside it and
forwards calls; a later subscriber then gets a wrapper around theirs.

Any thread may call, subscribe and remove. KeyboardInterrupt can leave nothing behind here, because this
module pushes nothing; a subscriber that does must pop it in a ``finally``.
"""

import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nanlocator.hooks.points import Point

_NOTHING = object()
# Reentrant, because a finalizer may remove subscribers at any point. Modules that subscribe while they hold a
# lock use this one: with two locks, two threads could deadlock.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

Wrapper = Callable[..., Any]
# At a point that ``is_hot``, a Maker receives the callable that it wraps and returns a Layer, which is called
# with the object, a tuple and a dictionary of arguments. So each call of a module or collective packs its
# arguments once.
Layer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Maker = Callable[[Callable[..., Any]], Layer]


class Patches:
    """The points to which one module of nanlocator subscribes, until ``remove``.

    Args:
        module: the module's ``__name__``; the rows of its points name it.

    Attributes:
        lost: notes for a verdict's coverage, one for each point that its owner's installed version lacks.
    """

    def __init__(self, module: str) -> None:
        self.lost: list[str] = []
        self._module = module.removeprefix("nanlocator.")
        self._undo: list[Callable[[], None]] = []

    def wrap(self, point: Point, wrapper: Wrapper | Maker, *, of: Any = None, name: str = "") -> None:
        """Subscribes ``wrapper``, which is called with the original and the call's arguments.

        Args:
            of: the object that has the attribute; by default the point's owner, which is imported.
            name: the attribute's name, if it differs from the point's.
        """
        target, name = self._place(point, of, name)
        if target is None:
            return
        subscriber = _Subscriber(wrapper, point.needed_by.index(self._module))
        with lock:
            wrapped = _wrapped_now(target, name) or _Wrapped(point, target, name)
            # Weakly, because an optimizer's own patches must not keep it alive. The attribute holds them.
            self._undo.append(functools.partial(_remove, weakref.ref(wrapped), weakref.ref(subscriber)))
            wrapped.add(subscriber)

    def put(self, point: Point, value: Any, *, of: Any = None, name: str = "") -> None:
        """Sets the attribute to any ``value``. For points with a single subscriber."""
        target, name = self._place(point, of, name)
        if target is not None:
            self._undo.append(replace(target, name, value))

    @property
    def are_on(self) -> bool:
        return bool(self._undo)

    def on_removal(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def remove(self) -> None:
        """Undoes all patches, the last one first. May be called twice."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Patches":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _place(self, point: Point, of: Any, name: str) -> tuple[Any, str]:
        """The object and the attribute's name; the object is None if there is nothing to patch."""
        name = name or point.attribute
        target = point.find_owner() if of is None else of
        if target is not None and hasattr(target, name):
            return target, name
        if point.is_due() and (note := point.note()) not in self.lost:
            self.lost.append(note)
        return None, name


def replace(target: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets ``target.name`` and returns a function that undoes it.

    That function restores the very object that ``vars(target)`` held (for a class, ``getattr`` gives another
    one: in torch 2.15 a method of ProcessGroup would lose its self), or deletes the attribute if it was
    inherited. It changes nothing if other code has set the attribute since."""
    own = vars(target).get(name, _NOTHING)
    setattr(target, name, value)

    def undo() -> None:
        if vars(target).get(name) is not value:
            return
        if own is _NOTHING:
            delattr(target, name)
        else:
            setattr(target, name, own)

    return undo


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method while its owner lives, and returns None afterwards. Does not keep the owner alive:
    for the engine, whose references Python's garbage collector does not see."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        return living(*args) if living is not None else None

    return call


class Operator:
    """Replaces an operator of torch in its namespace. Compilers see the original operator."""

    def __init__(self, wrapped: "_Wrapped") -> None:
        self._wrapped = wrapped
        self._operator = wrapped.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._operator(*args, **kwargs)
        outer, inner = self._wrapped.calls
        return outer(inner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


class _Subscriber:
    __slots__ = ("__weakref__", "is_on", "place", "wrapper")

    def __init__(self, wrapper: Wrapper | Maker, place: int) -> None:
        self.wrapper = wrapper
        self.place = place  # index of its module in the point's row; 0 is outermost
        self.is_on = True


class _Wrapped:
    """A wrapped attribute of one object.

    Attributes:
        original: the innermost callable.
        calls: the outermost subscriber and the callable that it wraps; a call reads both at once.
    """

    def __init__(self, point: Point, target: Any, name: str) -> None:
        self.original: Callable[..., Any] = getattr(target, name)
        self.calls: tuple[Callable[..., Any], Callable[..., Any]] = (_call, self.original)
        self._set_layer: Callable[[Layer], None] | None = None
        self._point, self._target, self._name = point, target, name
        self._subscribers: list[_Subscriber] = []
        if point.is_hot:
            self._entry, self._set_layer = _hot_entry(self.original, point.is_traced)
            self._entry.wrapped = self  # keeps it alive as long as the entry
        else:
            self._entry = _entry_of(self, point, target)
        self._undo: Callable[[], None] | None = None
        _all[id(self._entry)] = self

    @property
    def is_installed(self) -> bool:
        return vars(self._target).get(self._name) is self._entry

    def add(self, subscriber: _Subscriber) -> None:
        outer = [each for each in self._subscribers if each.place < subscriber.place]
        self._subscribers.insert(len(outer), subscriber)
        self._settle()
        if not self.is_installed:
            self._undo = replace(self._target, self._name, self._entry)

    def remove(self, subscriber: _Subscriber) -> None:
        subscriber.is_on = False
        with lock:
            self._settle()
            if not self._subscribers and self._undo is not None:
                self._undo()

    def _settle(self) -> None:
        """Routes calls through the current subscribers. Repeats if a finalizer has removed one meanwhile."""
        while True:
            subscribers = [each for each in self._subscribers if each.is_on]
            wrappers = [each.wrapper for each in subscribers]
            if self._set_layer is not None:
                self._set_layer(_layer_of(wrappers, self.original))
            else:
                outer, *inner = wrappers or [_call]
                self.calls = outer, functools.reduce(_around, reversed(inner), self.original)
            self._subscribers = subscribers
            if all(each.is_on for each in subscribers):
                return


def _remove(wrapped: "weakref.ref[_Wrapped]", subscriber: "weakref.ref[_Subscriber]") -> None:
    living, leaving = wrapped(), subscriber()
    if living is not None and leaving is not None:
        living.remove(leaving)


# By the id of the entry, which keeps the value alive.
_all: "weakref.WeakValueDictionary[int, _Wrapped]" = weakref.WeakValueDictionary()


def _wrapped_now(target: Any, name: str) -> _Wrapped | None:
    found = _all.get(id(vars(target).get(name)))
    return found if found is not None and found.is_installed else None


def _hot_entry(original: Callable[..., Any], is_traced: bool) -> tuple[Any, Callable[[Layer], None]]:
    layer = _packed(original)  # in a cell, because reading it is faster than reading an attribute
    is_compiling = torch.compiler.is_compiling

    def entry(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return layer(owner, args, kwargs)

    def traced_entry(owner: Any, *args: Any, **kwargs: Any) -> Any:
        # Compilers see a plain call: torch.compile folds is_compiling() into a constant.
        if is_compiling():
            return original(owner, *args, **kwargs)
        return layer(owner, args, kwargs)

    def set_layer(new: Layer) -> None:
        nonlocal layer
        layer = new

    return traced_entry if is_traced else entry, set_layer


def _entry_of(wrapped: _Wrapped, point: Point, target: Any) -> Any:
    """The callable that replaces the original."""
    original = wrapped.original
    if point.is_operator:
        return Operator(wrapped)
    if not isinstance(target, type | types.ModuleType):
        is_bound = inspect.ismethod(original)
        function: Callable[..., Any] = getattr(original, "__func__", original)

        # Bound, because learning-rate schedulers expect that of an optimizer's step. A copy of the object
        # has this attribute too, but its calls are not wrapped.
        @functools.wraps(function)
        def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if owner is not target and is_bound:
                return function(owner, *args, **kwargs)
            outer, inner = wrapped.calls
            return outer(inner, *args, **kwargs)

        return types.MethodType(method, target)

    is_traced, is_compiling = point.is_traced, torch.compiler.is_compiling

    @functools.wraps(original)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if is_traced and is_compiling():
            return original(*args, **kwargs)
        outer, inner = wrapped.calls
        return outer(inner, *args, **kwargs)

    if isinstance(target, types.ModuleType):  # where pickle finds it: a program sends torch.save to a process
        entry.__module__, entry.__qualname__ = target.__name__, point.attribute
    return entry


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _around(inner: Callable[..., Any], wrapper: Wrapper) -> Callable[..., Any]:
    return functools.partial(wrapper, inner)


def _layer_of(makers: list[Maker], original: Callable[..., Any]) -> Layer:
    layer = _packed(original)
    called = original
    for make in reversed(makers):
        layer = make(called)
        called = _unpacked(layer)
    return layer


def _packed(function: Callable[..., Any]) -> Layer:
    return lambda owner, args, kwargs: function(owner, *args, **kwargs)


def _unpacked(layer: Layer) -> Callable[..., Any]:
    return lambda owner, *args, **kwargs: layer(owner, args, kwargs)
