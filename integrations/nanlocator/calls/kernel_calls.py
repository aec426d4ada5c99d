"""Calls of kernels that PyTorch's dispatcher does not see. An extra pass of a bad step keeps them; they go
into bundles and are executed again, in the same process and in another one.

A record holds the arguments from before the call and the tensors' values after it, in host memory. C++
decides what to execute again and judges the results (nanlocator/replay/kernel_replay.hpp).
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanlocator import _C
from nanlocator.calls import inductor_kernels, kernels
from nanlocator.calls.bundle_code import consent, execute, find_named, import_named, line_of, require_own
from nanlocator.calls.kernel_references import references_of
from nanlocator.calls.kernel_signatures import register_signature as register_signature
from nanlocator.calls.kernel_source import python_function, source_of

_MOST_BYTES = 4 << 30  # of all copies in a pass


@dataclass(frozen=True)
class Imported:
    """An argument that is imported by its name: a dtype, a member of an enumeration."""

    module: str
    name: str

    def value(self) -> Any:
        return attribute(importlib.import_module(self.module), self.name)


Imported.__module__ = "nanlocator.kernel_calls"  # the class's name in bundles


@dataclass(frozen=True)
class _Slot:
    """The place of one of the record's tensors."""

    index: int


@dataclass
class KernelCallRecord:
    """One call. Its tensors are in a separate list: ``tensors[i]`` replaces ``_Slot(i)``."""

    name: str  # "planted_kernels::silu"
    launcher: str = "function"
    module: str = ""
    entry: str = ""
    file: str = ""
    why_not_replayed: str = ""
    names: list[str] = field(default_factory=list)  # of the positional arguments
    tensor_names: list[str] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    came_from: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""  # self-contained Python that defines the kernel
    source_file: str = "kernel.py"
    positional: tuple[Any, ...] = ()  # with slots
    named: dict[str, Any] = field(default_factory=dict)
    launch: list[Any] = field(default_factory=list)  # Triton: the grid
    role: str = ""  # of the bad tensor: an argument's name, or "output[0]"
    live: Any = None  # the kernel itself; None if it is not imported yet
    user_references: list[tuple[str, Callable[..., Any]]] = field(default_factory=list)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return _filled(self.positional, self.before)

    @property
    def keywords(self) -> dict[str, Any]:
        return _filled(self.named, self.before)

    def execute(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.live is None:
            raise _C.UnsupportedError(self.why_not_replayed or f"{self.name} has not been imported")
        args = _for_call(_filled(self.positional, tensors))
        kwargs = _for_call(_filled(self.named, tensors))
        if self.launcher == "triton":
            self.live.run(*args, grid=tuple(self.launch), warmup=False, **kwargs)
            return []
        return list(_C.tensors_in(self.live(*args, **kwargs)))

    def references(self) -> list[tuple[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]]]:
        bound: list[tuple[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]]] = []
        for family, reference in self.user_references or _registered.get(self.name, []):
            bound.append((family, self._bound(reference)))
        named = dict(zip(self.names, self.positional, strict=False))
        numbers = (bool, int, float, list, tuple)
        scalars = {k: v for k, v in (named | self.named).items() if isinstance(v, numbers)}
        return bound + references_of(self.name, self.tensor_names, scalars)

    def _bound(self, reference: Callable[..., Any]) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        def values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            args = _for_call(_filled(self.positional, tensors))
            result = reference(*args, **_for_call(_filled(self.named, tensors)))
            return list(_C.tensors_in(result))

        return values


_registered: dict[str, list[tuple[str, Callable[..., Any]]]] = {}


def register_reference(kernel: str, reference: Callable[..., Any], family: str = "") -> None:
    """Registers a ``reference`` for ``kernel`` ("my_extension::fwd"). It is called with the arguments of a
    call, floating-point tensors in float64 (and in float32), and returns the tensors that the kernel returns
    or writes, in any order. It judges a call only if it agrees with the kernel's own finite elements."""
    _registered.setdefault(kernel, []).append(
        (family or f"{reference.__module__}.{reference.__qualname__}", reference)
    )


class KeptKernelCalls:
    """The requested calls of a pass, by kernel and number."""

    def __init__(self) -> None:
        self._wanted: set[tuple[str, int]] = set()
        self._kept: dict[tuple[str, int], KernelCallRecord] = {}
        self._bytes = 0

    def want(self, calls: list[tuple[str, int]]) -> None:
        self._wanted, self._kept, self._bytes = {(name, number) for name, number in calls}, {}, 0

    def of(self, name: str, number: int) -> KernelCallRecord | None:
        return self._kept.get((name, number))

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        before, kernels.keeper = kernels.keeper, self if self._wanted else None
        _C.count_kernel_calls_from_zero()
        try:
            yield
        finally:
            kernels.keeper = before

    def begin(
        self,
        name: str,
        number: int,
        entry: kernels.Entry,
        names: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[list[torch.Tensor]], None] | None:
        """See nanlocator.calls.kernels.Keeper."""
        if (name, number) not in self._wanted:
            return None
        record = self._kept[name, number] = KernelCallRecord(name, entry.launcher, names=list(names))
        try:
            tensors = _describe(record, entry, args, kwargs)
            record.beside = [_C.beside_of(tensor) for tensor in tensors]
            record.before, devices = self._copies(tensors)
        except Exception as error:  # an argument's own code can raise anything; or no memory
            record.why_not_replayed = f"its arguments could not be kept: {_line(error)}"
            record.positional, record.named, record.before = (), {}, []
            record.tensor_names, record.beside, record.after = [], [], []
            return None
        record.came_from += devices

        def finish(results: list[torch.Tensor]) -> None:
            try:
                copies, devices = self._copies([*tensors, *results])
            except Exception as error:  # no memory
                record.why_not_replayed = f"its results could not be kept: {_line(error)}"
                copies, devices = record.before, []
            record.came_from += devices
            record.after, record.results = copies[: len(tensors)], copies[len(tensors) :]

        return finish

    def _copies(
        self, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, str]]]:
        copies, devices = _C.copies_on_host([t.detach() for t in tensors], max(0, _MOST_BYTES - self._bytes))
        self._bytes += sum(tensor.nbytes for tensor in copies)
        return copies, devices


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _describe(
    record: KernelCallRecord, entry: kernels.Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Fills in the fields that are known before the call; returns the tensors among the arguments."""
    tensors: list[torch.Tensor] = []
    problems: list[str] = []
    positional = [
        (record.names[i] if i < len(record.names) else f"argument[{i}]", arg) for i, arg in enumerate(args)
    ]
    if entry.launcher != "function":
        grid = kwargs.get("grid")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("grid", "warmup", "stream")}
        if entry.launcher == "triton":
            record.launch = _grid_of(entry.live, grid, args, kwargs)
    record.positional = tuple(_kept(value, name, record, tensors, problems) for name, value in positional)
    record.named = {key: _kept(value, key, record, tensors, problems) for key, value in kwargs.items()}
    record.settings = _C.current_settings()
    record.environment = {
        name: value for name, value in os.environ.items() if name.startswith(_C.KERNEL_VARIABLES)
    }
    record.live = entry.live
    if entry.module is not None:
        record.module, record.entry = entry.module.__name__, entry.name
        record.file = getattr(entry.module, "__file__", "") or ""
        if inductor_kernels.is_generated(entry.live):
            record.source = inductor_kernels.source_of(entry.module, entry.name)
    else:
        _describe_launch(record, entry.live)
    record.file = record.file and os.path.abspath(record.file)
    root = record.module.partition(".")[0]
    record.versions = {name: version for name in (root, "triton") if (version := _version(name))}
    if problems:
        record.why_not_replayed = "; ".join(problems)
    return tensors


def _describe_launch(record: KernelCallRecord, kernel: Any) -> None:
    function = python_function(kernel)
    record.module = str(getattr(function, "__module__", ""))
    record.entry = str(getattr(function, "__qualname__", record.name))
    with contextlib.suppress(TypeError, OSError):
        record.file = inspect.getsourcefile(function) or ""
    record.source = source_of(kernel)
    if record.launcher == "inductor":  # Inductor's generated code is a module of its own
        record.why_not_replayed = "Inductor compiled it for that process alone; its source is in the bundle"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            record.source = Path(record.file).read_text(encoding="utf-8")


def _kept(
    value: Any, name: str, record: KernelCallRecord, tensors: list[torch.Tensor], problems: list[str]
) -> Any:
    """``value`` with slots for its tensors. Adds a problem for a value that another process cannot have."""
    if isinstance(value, torch.Tensor):
        record.tensor_names.append(name)
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if value is None or type(value) in (bool, int, float, complex, str):
        return value
    if type(value) in (list, tuple, torch.Size):
        kept = [_kept(item, f"{name}[{i}]", record, tensors, problems) for i, item in enumerate(value)]
        return kept if type(value) is list else tuple(kept)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _kept(item, f"{name}[{key}]", record, tensors, problems) for key, item in value.items()}
    if isinstance(value, torch.device):
        return Imported("torch", f"device:{value}")
    found = _imported(value)
    if found is not None:
        return found
    problems.append(
        f"its argument {name}, a {type(value).__module__}.{type(value).__qualname__}, cannot be kept"
    )
    return None


def _imported(value: Any) -> Imported | None:
    """``value`` by the place of its definition, if that place holds an equal value."""
    if isinstance(value, torch.dtype):
        return Imported("torch", str(value).removeprefix("torch."))
    kind = type(value)
    candidates = [
        (getattr(value, "__module__", None), getattr(value, "__qualname__", None)),
        (kind.__module__, f"{kind.__qualname__}.{getattr(value, 'name', '')}"),  # a member of an enumeration
        ("triton.language", str(getattr(value, "name", ""))),  # Triton's dtypes
        (
            "triton.language",
            {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}.get(str(value)),
        ),
    ]
    for module, name in candidates:
        if not isinstance(module, str) or not isinstance(name, str) or "<" in name or module == "__main__":
            continue
        try:
            if module in sys.modules and attribute(sys.modules[module], name) == value:
                return Imported(module, name)
        except Exception:  # a comparison can raise anything
            continue
    return None


def attribute(owner: Any, path: str) -> Any:
    if path.startswith("device:"):
        return torch.device(path.removeprefix("device:"))
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if type(value) in (list, tuple):
        return type(value)(_filled(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _filled(item, tensors) for key, item in value.items()}
    return value


def _for_call(value: Any) -> Any:
    if isinstance(value, Imported):
        return value.value()
    if type(value) in (list, tuple):
        return type(value)(_for_call(item) for item in value)
    if type(value) is dict:
        return {key: _for_call(item) for key, item in value.items()}
    return value


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _grid_of(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The grid's sizes. A grid that is a function is called with the arguments."""
    if callable(grid):
        signature = inspect.signature(python_function(kernel))
        own = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind_partial(*args, **own)
        bound.apply_defaults()
        grid = grid(dict(bound.arguments) | kwargs)
    return [int(size) for size in (grid if isinstance(grid, tuple | list) else (grid,))]


# --- in another process ---


def load_record(bundle: Path, device: str, trust: bool = False) -> KernelCallRecord:
    """Loads a bundle's record and imports its kernel by name, which runs the module's code, as every import
    does. With ``trust``, runs the source in the bundle instead, or loads the file that the bundle names.

    Raises UnsupportedError if the kernel or an argument cannot be imported, FormatError if the tensors do not
    match."""
    kept = _C.kernel_call_of(bundle, device, lambda class_name, fields: (class_name, fields), _NotKept)
    record = KernelCallRecord(
        kept["name"],
        kept["launcher"],
        kept["module"],
        kept["entry"],
        kept["file"],
        kept["why_not_replayed"],
        list(kept["names"]),
        beside=kept["beside"],
        settings=kept["settings"],
        environment=kept["environment"],
        source_file=kept["source_file"],
        launch=kept["launch"],
        role=kept["role"],
    )
    problems: list[str] = []
    record.positional = tuple(
        _loaded(value, record.names[i] if i < len(record.names) else f"argument[{i}]", record, problems)
        for i, value in enumerate(kept["arguments"])
    )
    record.named = {key: _loaded(value, key, record, problems) for key, value in kept["keywords"].items()}
    record.after = [
        tensor if isinstance(tensor, torch.Tensor) else torch.empty(0) for tensor in kept["arguments_after"]
    ]
    record.results = [tensor for tensor in kept["results"] if isinstance(tensor, torch.Tensor)]
    if len(record.after) != len(record.before) or len(record.beside) != len(record.before):
        raise _C.FormatError(
            f"{bundle}: kernel_call has {len(record.before)} tensors among its arguments but "
            f"{len(record.after)} after the call"
        )
    if problems and not record.why_not_replayed:
        record.why_not_replayed = "; ".join(problems)
    if not record.why_not_replayed:
        folder = bundle if bundle.is_dir() else bundle.parent
        record.live = _import_kernel(record, folder, trust, kept["source_file"])
        for each in _imported_in((record.positional, record.named)):
            try:
                import_named(each.module, folder)
            except (Exception, SystemExit) as error:
                raise _C.UnsupportedError(
                    f"its argument {each.module}.{each.name} cannot be imported: {line_of(error)}"
                ) from error
    return record


class _NotKept:
    def __init__(self, description: str) -> None:
        self.description = description


def _loaded(value: Any, name: str, record: KernelCallRecord, problems: list[str]) -> Any:
    if isinstance(value, torch.Tensor):
        record.tensor_names.append(name)
        record.before.append(value)
        return _Slot(len(record.before) - 1)
    if isinstance(value, _NotKept):
        problems.append(f"its argument {name} could not be kept: {value.description}")
        return None
    if type(value) is tuple and len(value) == 2 and isinstance(value[1], dict):
        class_name = f"{Imported.__module__}.{Imported.__qualname__}"
        if value[0] == class_name and value[1].keys() == {"module", "name"}:
            return Imported(str(value[1]["module"]), str(value[1]["name"]))
        problems.append(f"its argument {name} is a {value[0]}, which cannot be restored")
        return None
    if type(value) in (list, tuple):
        return type(value)(_loaded(v, f"{name}[{i}]", record, problems) for i, v in enumerate(value))
    if type(value) is dict:
        return {key: _loaded(v, f"{name}[{key}]", record, problems) for key, v in value.items()}
    return value


def _imported_in(value: Any) -> Iterator[Imported]:
    if isinstance(value, Imported):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _imported_in(item)


def _import_kernel(record: KernelCallRecord, bundle: Path, trust: bool, source: str = "") -> Any:
    """Imports the kernel. A bundle may come from anywhere, so this returns only kernels, and runs the
    bundle's own code only with ``trust``."""
    for name, value in record.environment.items():
        if name == "TRITON_INTERPRET" and "triton" not in sys.modules:
            os.environ.setdefault(name, value)
    if trust and source:
        module = execute(bundle / source, f"nanlocator_kernel_{bundle.name.replace('.', '_')}")
        found = attribute(module, record.entry.rpartition(".")[2])
        return _triton_kernel(record, found) if record.launcher == "triton" else found
    try:
        return _kernel_in(_module_by_name(record, bundle), record)
    except (Exception, SystemExit) as error:  # the module's code can raise anything
        problem = f"{record.entry} of {record.module} cannot be imported: {line_of(error)}"
    if record.file and not os.path.isfile(record.file):
        problem += f", and {record.file} is not on this machine"
    elif record.file and trust:
        try:
            return _kernel_in(_module_by_file(record), record)
        except (Exception, SystemExit) as error:
            problem += f"; loading it from {record.file} failed, too: {line_of(error)}"
    advice = "" if trust else consent(bundle, [(record.module, record.file, source)])
    raise _C.UnsupportedError(problem + advice)


def _module_by_name(record: KernelCallRecord, bundle: Path) -> types.ModuleType:
    if record.module.startswith("__"):
        raise _C.UnsupportedError("it was defined in the training script itself")
    if record.module not in sys.modules:
        _require_module_of_kernels(record, str(find_named(record.module, bundle).origin))
    return importlib.import_module(record.module)


def _module_by_file(record: KernelCallRecord) -> types.ModuleType:
    _require_module_of_kernels(record, record.file)
    name = "nanlocator_program" if record.module.startswith("__") else record.module
    if record.launcher == "triton":
        return execute(Path(record.file), f"nanlocator_{name}" if name in sys.modules else name)
    require_own(record.file)
    spec = importlib.util.spec_from_file_location(name, record.file)
    assert spec is not None and spec.loader is not None  # its suffix is an extension module's
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _require_module_of_kernels(record: KernelCallRecord, file: str) -> None:
    """Raises UnsupportedError if ``file`` is no module with kernels. Called before any of its code runs."""
    is_one = (
        file.endswith(".py") if record.launcher == "triton" else kernels.is_extension(record.module, file)
    )
    if not is_one:
        raise _no_kernel(record)


def _kernel_in(module: types.ModuleType, record: KernelCallRecord) -> Any:
    if record.launcher == "triton":
        return _triton_kernel(record, attribute(module, record.entry))
    found = vars(module).get(record.entry)
    if not kernels.is_function_of_extension(found, module):
        raise _no_kernel(record)
    return found


def _triton_kernel(record: KernelCallRecord, found: Any) -> Any:
    """The launched kernel, without the autotuners and heuristics around it."""
    while not kernels.is_triton_kernel(found) and hasattr(found, "fn"):
        found = found.fn
    if not kernels.is_triton_kernel(found):
        raise _no_kernel(record)
    return found


def _no_kernel(record: KernelCallRecord) -> _C.UnsupportedError:
    kind = "Triton kernel" if record.launcher == "triton" else "function of a PyTorch extension module"
    return _C.UnsupportedError(f"{record.module}.{record.entry} is not a {kind} here")
