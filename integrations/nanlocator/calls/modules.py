"""Follows the running modules and their tensors: wraps ``torch.nn.Module.__call__`` while it is needed.

    with nanlocator.calls.modules.ModuleHooks(model):      # the C++ module stack, for the operator trace
        model(batch)

One subscriber serves the process, however many models are watched, until the last ``remove()``. It changes no
argument, no result and no random state.
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

# Shown names leave out wrappers' attributes. Containers are not called themselves: their children belong to
# the module that holds the container.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ModuleObserver(Protocol):
    """The interface of a ``_C.ModuleWatch`` that hooks use."""

    def enter(self, path: _C.ModulePath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call begins. The result identifies it in ``leave`` and ``abandon``."""

    def leave(self, call: Any, output: Any) -> None:
        """The call has returned."""

    def abandon(self, call: Any) -> None:
        """The call has raised."""


class ModelInputs:
    """An observer that tells the operator trace which tensors the program passes to its models."""

    def enter(self, path: _C.ModulePath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(_threads.stack) == 1:
            _C.note_model_inputs(args, kwargs)

    def leave(self, call: Any, output: Any) -> None:
        pass

    def abandon(self, call: Any) -> None:
        pass


class ModuleHooks:
    """Keeps the C++ module stack up to date for calls of ``model`` and of all modules in it.

    A module's name is its name in ``model.named_modules()``, without DistributedDataParallel's ``module.``;
    if that is empty, its class name. A shared module gets the path through which it was called. A module that
    was added later, or made on the fly, gets the caller's path and the attribute under which the caller holds
    it, else its class name. A module called outside every named one (a loss) gets its class name.

    Args:
        model: the model as it is called; wrapped or not.
        watch: also receives each call's inputs and outputs.
        name_of: maps the path in ``model.named_modules()`` to the shown name; "" means the class name. It
            names this model's modules for every hook, until the last one is removed; the latest one counts.
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
        """Stops following. Running calls end as they began. May be called twice."""
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
        """Changes the shown names. Running calls keep theirs."""
        self.name_of = name_of
        for named in self.named.values():
            named.frames = {}


class _Named:
    """One module of a tree, and its name from each caller. The weak reference distinguishes it from a later
    module at the same address."""

    __slots__ = ("frames", "is_this", "paths")

    def __init__(self, module: nn.Module) -> None:
        self.is_this = weakref.ref(module)
        self.paths: list[str] = []
        self.frames: dict[str | None, _Frame] = {}  # by the caller's path


class _Frame:
    """A running module, with its name in this call."""

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
_trees: list[_Tree] = []  # replaced, never modified: other threads read it without the lock
_all_watches: list[ModuleObserver] = []
_patches = Patches(__name__)


def running_module() -> nn.Module | None:
    """The innermost followed module whose call this thread is executing."""
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
    calls: list[Any] = []  # the results of `enter`
    # KeyboardInterrupt may come after any call below. Everything pushed by then is popped: first from the
    # Python stack, by a statement that cannot be interrupted, then from the C++ stack, by one call.
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
                tree, caller = other, None  # the caller is in another watched model, or in none
                break
    if named is None:
        # Not cached: its name depends on the caller's current attributes.
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
    """The registered path directly below the caller's, else any path below it, else the first."""
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
    """Tensors that modules hold as plain attributes, such as rotary tables and masks: state of the model that
    is neither a parameter nor a buffer. Each with its name, "decoder.rotary.cos"; also tensors one level down
    in lists and dictionaries, "decoder.rotary.cos[0]"."""
    # Megatron's DistributedDataParallel has a list named `buffers`.
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
    """The key without dots, because the part of a name before its last dot is the module."""
    return str(key).replace(".", "_")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor: the very tensor that it holds, so that the engine can keep a weak
    reference to it (from torch 2.13 on, to_local() of a Parameter returns a view). Any other tensor is
    returned unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def shown(path: str) -> str:
    """The path of a parameter or module without wrappers' parts: DistributedDataParallel's at its start,
    torch.compile's, FullyShardedDataParallel's and activation checkpointing's anywhere."""
    path = path.removeprefix("_orig_mod.").removeprefix("module.")
    if not any(wrapper in path for wrapper in _WRAPPERS):
        return path
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def shown_module(path: str) -> str:
    """The same for a module. "" for the module that DistributedDataParallel wraps, which is shown by its
    class, like the model itself."""
    return "" if path.removeprefix("_orig_mod.") == "module" else shown(path)


def class_name(module: nn.Module) -> str:
    """The module's class name; for torch.compile's wrapper, that of the wrapped module."""
    return type(getattr(module, "_orig_mod", module)).__name__


def named_by_class(models: list[nn.Module]) -> dict[str, nn.Module]:
    """The models by name. A single model has no name; several have their class names, numbered if
    repeated."""
    if len(models) == 1:
        return {"": models[0]}
    names: dict[str, nn.Module] = {}
    for each in models:
        name = class_name(each)
        names[name if name not in names else f"{name}{len(names)}"] = each
    return names


def common_module(parameters: list[str]) -> str:
    """The innermost module that contains all ``parameters``; "" for the model itself."""
    paths = [name.split(".")[:-1] for name in parameters]
    return ".".join(parts[0] for parts in itertools.takewhile(_are_equal, zip(*paths, strict=False)))


def _are_equal(parts: tuple[str, ...]) -> bool:
    return len(set(parts)) == 1
