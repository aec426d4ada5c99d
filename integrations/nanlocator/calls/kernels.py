"""Shows calls that PyTorch's dispatcher does not see to an armed operator trace.

    with KernelCalls():
        model(batch)

Covers functions of extension modules, wherever a module has bound them, and methods of their classes;
Inductor's CPU kernels, in the modules that it generates; and Triton's launches, including kernels that
Inductor compiles or the interpreter runs. Inputs and outputs of each call are scanned
(nanlocator/operators/kernel_call.hpp). Everything is restored when the block ends.
"""

import contextlib
import functools
import gc
import importlib.machinery
import mmap
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nanlocator import _C
from nanlocator.calls import inductor_kernels, kernel_signatures
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

# Extension modules that take tensors but are not linked with Torch.
_WITHOUT_TORCH = ("cudnn", "nvfuser", "cupy_backends")
# Torch's own, and libraries whose kernels return data from other ranks, which is no input of the call.
_LEFT_OUT = (
    "torch",
    "nanlocator",
    "functorch",
    "deep_ep_cpp",
    "deep_ep",
    "mori",
    "mscclpp",
    "nvshmem",
    "pplx_kernels",
)
# TransformerEngine: an argument of such a type makes a kernel communicate while it computes.
_COMMUNICATOR = "CommOverlap"
_LINKED_WITH_TORCH = (b"libc10.", b"libtorch")
_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_UNNAMED = re.compile(r"arg\d+")  # pybind11's name for an unnamed argument


@dataclass(frozen=True)
class Entry:
    """The place of a kernel, which a process imports to execute the call again."""

    launcher: str  # "function", "triton", "inductor"
    module: types.ModuleType | None
    name: str  # in the module; for Triton, the function's qualified name
    live: Any  # the function, or the launched kernel


class Keeper(Protocol):
    """Keeps some of the calls (nanlocator.calls.kernel_calls)."""

    def begin(
        self, name: str, number: int, entry: Entry, names: list[str], args: tuple[Any, ...], kwargs: Any
    ) -> "Callable[[list[torch.Tensor]], None] | None":
        """Called before the call. The returned function is called after it, with the result's tensors."""


keeper: Keeper | None = None  # of the current pass


class KernelCalls:
    """Follows the calls from its construction until ``remove`` or the end of the block."""

    def __init__(self) -> None:
        self._patches = Patches(__name__)
        modules = [each for each in gc.get_objects() if type(each) is types.ModuleType]
        self._follow_extensions(modules)
        self._follow_inductor(modules)
        self._follow_triton()

    def __enter__(self) -> "KernelCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        self._patches.remove()

    def _follow_extensions(self, modules: list[types.ModuleType]) -> None:
        extensions = [each for each in modules if _is_extension(each)]
        if not extensions:
            return
        wrapped: dict[int, Callable[..., Any]] = {}
        for extension in extensions:
            for name, value in list(vars(extension).items()):
                if type(value) is types.BuiltinFunctionType:
                    entry = Entry("function", extension, name, value)
                    wrapped[id(value)] = _shown(entry, f"{_short_name(extension)}::{name}")
                elif type(value).__name__ == "pybind11_type":
                    self._follow_methods(value, extension)
        for module in modules:
            for name, value in list(vars(module).items()):
                if type(value) is types.BuiltinFunctionType and id(value) in wrapped:
                    self._show(module, name, wrapped[id(value)])

    def _follow_inductor(self, modules: list[types.ModuleType]) -> None:
        """Follows CPU kernels in the existing generated modules and in those of later compilations."""
        cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
        load = vars(cache).get("load_by_key_path") if cache is not None else None
        if load is None:
            return

        @functools.wraps(load.__func__)
        def load_by_key_path(cls: type, *args: Any, **kwargs: Any) -> types.ModuleType:
            module = load.__func__(cls, *args, **kwargs)
            self._follow_generated(module)
            return module

        self._patches.put(points.INDUCTOR_MODULES, classmethod(load_by_key_path))
        for each in modules:
            self._follow_generated(each)

    def _follow_generated(self, module: types.ModuleType) -> None:
        for name, value in list(vars(module).items()):
            if type(value) is not types.BuiltinFunctionType or module is value.__self__:
                continue
            if inductor_kernels.is_generated(value):
                entry = Entry("function", module, name, value)
                self._show(module, name, _shown(entry, f"inductor::{name}"))

    def _follow_methods(self, kind: type, extension: types.ModuleType) -> None:
        for name, value in list(vars(kind).items()):
            if type(value).__name__ == "instancemethod" and not name.startswith("__"):
                entry = Entry("function", extension, f"{kind.__name__}.{name}", value.__func__)
                shown = _shown(entry, f"{_short_name(extension)}::{entry.name}")
                self._show(kind, name, shown)

    def _follow_triton(self) -> None:
        for point in points.KERNEL_LAUNCHES:
            module, _, kind = point.owner.partition(":")
            kernels = getattr(sys.modules.get(module), kind, None)
            if kernels is not None and not hasattr(kernels.run, "is_shown"):  # else shown by an outer block
                launcher = "inductor" if point.package == "torch" else "triton"
                self._patches.put(point, _shown_launch(kernels.run, launcher))

    def _show(self, owner: Any, name: str, shown: Callable[..., Any]) -> None:
        self._patches.put(points.EXTENSION_FUNCTION, shown, of=owner, name=name)


def is_triton_kernel(found: Any) -> bool:
    kind = type(found)
    return kind.__name__ in ("JITFunction", "InterpretedFunction") and kind.__module__.startswith("triton.")


def is_function_of_extension(found: Any, module: types.ModuleType) -> bool:
    return type(found) is types.BuiltinFunctionType and _is_extension(module)


def is_extension(name: str, file: str) -> bool:
    """Whether the module ``name`` in ``file`` has kernels that are watched."""
    root = name.partition(".")[0]
    if not file.endswith(_SUFFIXES) or root in _LEFT_OUT:
        return False
    return root in _WITHOUT_TORCH or holds_one_of(file, _LINKED_WITH_TORCH)


def _is_extension(module: types.ModuleType) -> bool:
    try:
        file = vars(module).get("__file__") or ""
        name = str(module.__name__)
    except (AttributeError, TypeError):
        return False
    if inductor_kernels.is_extension(module):  # followed in its generated module
        return False
    return isinstance(file, str) and is_extension(name, file)


@functools.cache
def holds_one_of(file: str, words: tuple[bytes, ...]) -> bool:
    """Whether ``file`` contains one of ``words``; also false if it cannot be read."""
    try:
        with open(file, "rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(word) >= 0 for word in words)
    except (OSError, ValueError):  # ValueError: an empty file
        return False


def _short_name(module: types.ModuleType) -> str:
    return str(module.__name__).rpartition(".")[2]


def _shown(entry: Entry, name: str) -> Callable[..., Any]:
    function = entry.live
    own_names = _argument_names(entry)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        names = own_names
        if all(map(_UNNAMED.fullmatch, own_names)):
            names = kernel_signatures.argument_names(name, len(args)) or own_names
        arguments = dict(named_tensors(args, kwargs, names))
        if not arguments or any(_COMMUNICATOR in type(arg).__name__ for arg in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        with _shown_call(name, list(arguments.items()), entry, names, args, kwargs) as results:
            result = function(*args, **kwargs)
            results += _C.tensors_in(result)
        return result

    return call


def _shown_launch(run: Callable[..., Any], launcher: str) -> Callable[..., Any]:
    @functools.wraps(run)
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return run(kernel, *args, **kwargs)
        names = list(getattr(kernel, "arg_names", ()) or ())
        arguments = dict(named_tensors(args, kwargs, names))
        entry = Entry(launcher, None, _name_of_kernel(kernel), kernel)
        name = f"triton::{entry.name}"
        with _shown_call(name, list(arguments.items()), entry, names, args, kwargs):
            return run(kernel, *args, **kwargs)

    vars(launch)["is_shown"] = True
    return launch


def _name_of_kernel(kernel: Any) -> str:
    function = getattr(kernel, "fn", kernel)
    return str(getattr(function, "__name__", type(kernel).__name__))


@contextlib.contextmanager
def _shown_call(
    name: str,
    arguments: list[tuple[str, torch.Tensor]],
    entry: Entry,
    names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[list[torch.Tensor]]:
    """A context that scans the call; yields a list that takes the results."""
    results: list[torch.Tensor] = []
    call = _C.KernelCall(name, arguments)
    try:
        kept = keeper and keeper.begin(name, call.number, entry, names, args, kwargs)
        yield results
        call.end(results)
        if kept:
            kept(results)
    finally:
        call.close()


def named_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the argument's name, with an index or key if the argument holds several."""
    positional = [(names[i] if i < len(names) else f"argument[{i}]", arg) for i, arg in enumerate(args)]
    for name, value in (*positional, *kwargs.items()):
        yield from _tensors_in(value, name)


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            yield from _held_by(value, name)
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _tensors_in(item, f"{name}[{i}]")
    elif type(value) is dict:
        for key, item in value.items():
            yield from _tensors_in(item, f"{name}[{key}]")
    else:
        value = getattr(value, "base", value)  # Triton's TensorWrapper and TensorDescriptor
        found = _C.tensors_in(value)
        for i, tensor in enumerate(found):
            yield (name if isinstance(value, torch.Tensor) else f"{name}[{i}]"), tensor
        if not found:
            yield from _held_by(value, name)


def _held_by(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What the attributes of a quantised tensor hold: payload and scales (TransformerEngine's
    Float8TensorStorage, torchao's wrappers)."""
    for attribute, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, torch.Tensor):
            yield f"{name}.{attribute}", held


def _argument_names(entry: Entry) -> list[str]:
    """From Inductor's source, else from the first line of pybind11's docstring."""
    if entry.module is not None and inductor_kernels.is_generated(entry.live):
        return inductor_kernels.argument_names(entry.module, entry.name)
    signature = (getattr(entry.live, "__doc__", None) or "").partition("\n")[0]
    inside = re.search(r"\((.*)\)", signature)
    # A default may contain a colon too: "otype: DType = <DType.kFloat32: 4>".
    return re.findall(r"(?:^|, )(\w+): ", inside.group(1)) if inside else []
