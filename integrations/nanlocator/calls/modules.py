"""Which module is running, and with which tensors: wraps ``torch.nn.Module.__call__`` while it is asked to.

    with nanlocator.calls.modules.ModuleHooks(model):      # the C++ module stack, for the operator trace
        model(batch)

One subscriber serves the process, however many models are watched; it goes with the last ``remove()``. It
changes no argument, no result and no random state.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches, lock

# Holders that are not called themselves: their children belong to the module that holds them.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ModuleObserver(Protocol):
    """What a ``_C.ModuleWatch`` is to hooks."""

    def enter(self, path: _C.ModulePath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call begins; returns what names it."""

    def leave(self, call: Any, output: Any) -> None:
        """It has returned."""

    def abandon(self, call: Any) -> None:
        """It has raised."""


class ModuleHooks:
    """Keeps the C++ module stack right for calls of ``model`` and everything below it.

    A module is named by ``model.named_modules()``, without the ``module.`` of DistributedDataParallel and
    with its class name where that name is empty. A shared module gets the name of the path through which
    it was called; one that was added later, or made on the fly, the caller's path and the attribute under
    which the caller holds it, else its class name. Modules called outside any named one (a loss) go by
    their class.

    Args:
        model: the model as it is called; wrapped or not.
        watch: also hands each call's inputs and outputs to this ``_C.ModuleWatch``, or what is like it.
        name_of: from the path in ``model.named_modules()`` to the name that is shown; "" gives the class
            name. It names this model's modules for every hook, until the last one is removed; the latest
            one given counts.
    """

    def __init__(
        self,
        model: nn.Module,
        watch: ModuleObserver | None = None,
        name_of: Callable[[str], str] | None = None,
    ) -> None:
        self.model = model
        self.watch = watch
        self._is_active = True
        new_tree = _Tree(model)  # before the lock: making it may collect garbage, and run a `remove`
        with lock:
            tree = next((t for t in _trees if t.model is model), None)
            if tree is None:
                _set_trees([*_trees, tree := new_tree])
            tree.hooks = [*tree.hooks, self]
            if name_of is not None:
                tree.show_as(name_of)
            _refresh_watches()
            if not _patches.are_on:
                _patches.wrap(points.MODULE_CALL, _around)
        self._tree = tree

    def remove(self) -> None:
        """Stops. Calls that are under way end as they began. May be called twice."""
        with lock:
            if not self._is_active:
                return
            self._is_active = False
            self._tree.hooks = [h for h in self._tree.hooks if h is not self]
            if not self._tree.hooks:
                _set_trees([t for t in _trees if t is not self._tree])
            _refresh_watches()
            if not _trees:
                _patches.remove()

    def __enter__(self) -> "ModuleHooks":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Tree:
    """The names below one watched model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.name_of: Callable[[str], str] = shown_module
        self.hooks: list[ModuleHooks] = []
        self.watches: list[ModuleObserver] = []
        self.named: dict[int, _Named] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.named.setdefault(id(module), _Named(module)).paths.append(path)

    def show_as(self, name_of: Callable[[str], str]) -> None:
        """Calls that are under way keep their names."""
        self.name_of = name_of
        for named in self.named.values():
            named.frames = {}


class _Named:
    """One module of a tree, and its name from each caller. The weak reference tells a module from a later
    one at the same address."""

    __slots__ = ("frames", "is_this", "paths")

    def __init__(self, module: nn.Module) -> None:
        self.is_this = weakref.ref(module)
        self.paths: list[str] = []
        self.frames: dict[str | None, _Frame] = {}  # by the caller's path


class _Frame:
    """A module that is running, under the name that it has in this call."""

    __slots__ = ("module", "path", "shown", "tree", "watches")

    def __init__(self, tree: "_Tree | None", module: nn.Module, path: str) -> None:
        self.tree = tree
        self.module = weakref.ref(module)
        self.path = path  # as in named_modules
        name_of = tree.name_of if tree is not None else shown_module
        self.shown = _C.ModulePath(name_of(path) or class_name(module))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Frame] = []


_threads = _Thread()
_trees: list[_Tree] = []  # replaced, never changed: other threads read it without the lock
_all_watches: list[ModuleObserver] = []
_patches = Patches(__name__)


def running_module() -> nn.Module | None:
    """The innermost module whose call this thread is in, as far as hooks follow it."""
    stack = _threads.stack
    return stack[-1].module() if stack else None


def _set_trees(trees: list[_Tree]) -> None:
    global _trees
    _trees = trees


def _refresh_watches() -> None:
    global _all_watches
    for tree in _trees:
        tree.watches = list({id(h.watch): h.watch for h in tree.hooks if h.watch is not None}.values())
    _all_watches = [watch for tree in _trees for watch in tree.watches]


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_call, original)


def _call(original: Callable[..., Any], self: nn.Module, args: Any, kwargs: Any) -> Any:
    stack = _threads.stack
    depth = len(stack)
    frame = _frame_of(self, stack[-1] if depth else None)
    watches = frame.tree.watches if frame.tree is not None else _all_watches
    scope = _C.module_depth()
    calls: list[Any] = []  # as `enter` names them
    # KeyboardInterrupt may come after any call below. Whatever was pushed by then is taken off: the
    # Python stack first, by a statement that nothing interrupts, then the C++ stack, by one call.
    try:
        stack.append(frame)
        _C.enter_module(frame.shown)
        for watch in watches:
            calls.append(watch.enter(frame.shown, args, kwargs))
        output = original(self, *args, **kwargs)
        while calls:
            watches[len(calls) - 1].leave(calls[-1], output)
            calls.pop()
        return output
    finally:
        del stack[depth:]
        _C.leave_modules(scope)
        for watch, call in zip(watches, calls, strict=False):
            watch.abandon(call)


def _frame_of(module: nn.Module, caller: _Frame | None) -> _Frame:
    tree = caller.tree if caller is not None else None
    named = _find(tree, module) if tree is not None else None
    if named is None:
        for other in _trees:
            if other is not tree and (named := _find(other, module)) is not None:
                tree, caller = other, None  # below another watched model, or none
                break
    if named is None:
        # Not kept: its name depends on what the caller holds now.
        return _Frame(tree, module, _path_below(module, caller))
    key = caller.path if caller is not None else None
    frame = named.frames.get(key)
    if frame is None:
        frame = named.frames[key] = _Frame(tree, module, nearest_path(named.paths, key))
    return frame


def _find(tree: _Tree, module: nn.Module) -> _Named | None:
    named = tree.named.get(id(module))
    return named if named is not None and named.is_this() is module else None


def nearest_path(paths: list[str], caller: str | None) -> str:
    """Of several registered paths the one right below the caller's, else below it at all, else the first."""
    if len(paths) > 1 and caller is not None:
        prefix = caller + "." if caller else ""
        below = [p for p in paths if p.startswith(prefix) and p != caller]
        return min(below or paths, key=lambda p: p.count("."))
    return paths[0]


def _path_below(module: nn.Module, caller: _Frame | None) -> str:
    parent = caller.module() if caller is not None else None
    if caller is None or parent is None:
        return class_name(module)
    name = _name_in(parent, module) or class_name(module)
    return f"{caller.path}.{name}" if caller.path else name


def _name_in(parent: nn.Module, module: nn.Module) -> str | None:
    for name, child in parent._modules.items():
        if child is module:
            return name
        if isinstance(child, _HOLDERS) and (inner := _name_in(child, module)) is not None:
            return f"{name}.{inner}"
    for name, value in vars(parent).items():
        if value is module:
            return name
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if item is module:
                    return f"{name}.{index}"
        elif isinstance(value, dict) and name != "_modules":
            for key, item in value.items():
                if item is module:
                    return f"{name}.{key}"
    return None


def tensor_attributes(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors that modules hold as plain attributes, such as rotary tables and masks: neither parameters nor
    buffers, and state of the model all the same. By name, "decoder.rotary.cos"; in lists and dictionaries
    one level down, "decoder.rotary.cos[0]"."""
    # Megatron's DistributedDataParallel has a list that is called `buffers`.
    registered = {id(t) for t in (*nn.Module.parameters(model), *nn.Module.buffers(model))}
    return [
        (f"{path}.{name}" if path else name, local_part(tensor))
        for path, module in model.named_modules()
        for name, tensor in _tensors_in(vars(module))
        if id(tensor) not in registered
    ]


def _tensors_in(attributes: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in list(attributes.items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if _is_tensor(item))
        elif isinstance(value, dict):
            yield from ((f"{name}[{_key(k)}]", item) for k, item in list(value.items()) if _is_tensor(item))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _key(key: Any) -> str:
    """Without dots: what stands before the last one is the module."""
    return str(key).replace(".", "_")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor: the tensor that it holds, which the engine may remember weakly. Of a
    Parameter to_local() gives a view of it from torch 2.13 on. Any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def shown(path: str) -> str:
    """Of a parameter or a module, without what wrappers put into it: DistributedDataParallel before it,
    torch.compile, FullyShardedDataParallel and activation checkpointing anywhere."""
    path = path.removeprefix("_orig_mod.").removeprefix("module.")
    if not any(wrapper in path for wrapper in _WRAPPERS):
        return path
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def shown_module(path: str) -> str:
    """Nothing for what DistributedDataParallel wraps: it goes by its class, as the model itself does."""
    return "" if path.removeprefix("_orig_mod.") == "module" else shown(path)


def class_name(module: nn.Module) -> str:
    """Not of the wrapper that torch.compile makes."""
    return type(getattr(module, "_orig_mod", module)).__name__


def named_by_class(models: list[nn.Module]) -> dict[str, nn.Module]:
    """One goes without a name; of several each by its class, with a number where that is taken."""
    if len(models) == 1:
        return {"": models[0]}
    names: dict[str, nn.Module] = {}
    for each in models:
        name = class_name(each)
        names[name if name not in names else f"{name}{len(names)}"] = each
    return names


def common_module(parameters: list[str]) -> str:
    """The innermost that has all of them below it; "" for the model itself."""
    paths = [name.split(".")[:-1] for name in parameters]
    return ".".join(parts[0] for parts in itertools.takewhile(_are_equal, zip(*paths, strict=False)))


def _are_equal(parts: tuple[str, ...]) -> bool:
    return len(set(parts)) == 1
