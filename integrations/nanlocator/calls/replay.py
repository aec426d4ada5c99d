"""Executes bundles again: ``run`` for the operator call, ``load`` for the module call around it."""

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanlocator import _C
from nanlocator.calls.kernel_calls import attribute, load_record
from nanlocator.calls.module_calls import tensors_in
from nanlocator.calls.operator_registration import register
from nanlocator.calls.pickled_modules import unpickled

_REPEATS: int = _C.parse_replay(["BUNDLE"]).repeats  # the command's default


def run(
    bundle: str | os.PathLike[str],
    device: str | None = None,
    repeats: int = _REPEATS,
    other_devices: bool = True,
    reference: Callable[..., Any] | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Executes the operator or kernel call of ``bundle`` again and returns the report (docs/replay.md).
    Imports the module of the kernel or custom operator by name.

    ``reference``: computes the kernel's expected results. It is called with the arguments of the call,
    floating-point tensors in float64, and returns the tensors that the kernel returns or writes, in any
    order. ``trust``: loads the files and executes the source that the bundle names. **They can do all that
    you can: use it only if you trust where the bundle comes from** (docs/security.md).
    """
    if _C.has_kernel_call(Path(bundle)):
        return _kernel_report(bundle, device, repeats, reference, trust)
    if reference is not None:
        raise _no_reference(bundle)
    return json.loads(_report(bundle, device, repeats, other_devices, trust).to_json())


def _no_reference(bundle: str | os.PathLike[str]) -> _C.UsageError:
    return _C.UsageError(f"{bundle} contains no kernel call: only a kernel can be compared with a reference")


def _kernel_report(
    bundle: str | os.PathLike[str],
    device: str | None,
    repeats: int,
    reference: Callable[..., Any] | None,
    trust: bool,
) -> dict[str, Any]:
    record = load_record(Path(bundle), device or _recorded_device(bundle), trust)
    if reference is not None:
        record.user_references = [(getattr(reference, "__qualname__", "the given function"), reference)]
    replayed = _C.replay_kernel_record(record, repeats, record.role)
    report = json.loads(replayed.to_json())
    return {
        "version": 1,
        "kernel": record.name,
        **report,
        "sentences": replayed.sentences(record.name),
        "environment": _environment_changes(record.environment),
    }


def _environment_changes(recorded: dict[str, str]) -> list[dict[str, str | None]]:
    """Changed environment variables by which kernel libraries choose their kernels. Cache folders, which
    Torch sets by itself, do not count."""
    here = {name: value for name, value in os.environ.items() if name.startswith(_C.KERNEL_VARIABLES)}
    return [
        {"name": name, "recorded": recorded.get(name), "here": here.get(name)}
        for name in sorted(recorded.keys() | here.keys())
        if recorded.get(name) != here.get(name) and not name.endswith("_CACHE_DIR")
    ]


def _report(
    bundle: str | os.PathLike[str],
    device: str | None,
    repeats: int,
    other_devices: bool,
    trust: bool,
) -> Any:
    register(Path(bundle), trust)
    return _C.replay_bundle(Path(bundle), device or _recorded_device(bundle), repeats, other_devices)


def _recorded_device(bundle: str | os.PathLike[str]) -> str:
    path = Path(bundle)
    text = (path if path.is_file() else path / "bundle.json").read_text(encoding="utf-8")
    return "cuda" if '"cuda:' in text and torch.cuda.is_available() else "cpu"


class RecordedObject(SimpleNamespace):
    """A dataclass, ModelOutput or named tuple of the recorded call: its fields, and ``class_name``."""

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return [value for name, value in vars(self).items() if name != "class_name"][key]
        return vars(self)[key]


@dataclass(frozen=True)
class NotKept:
    """A value that a bundle cannot hold."""

    description: str


@dataclass
class ReplayedModule:
    """The results of a bound module."""

    outputs: Any
    grad_inputs: tuple[torch.Tensor | None, ...] = ()
    weight_gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class RecordedModuleCall:
    """A recorded module call, in fresh memory."""

    name: str
    class_name: str
    is_training: bool
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: Any
    weights: dict[str, torch.Tensor]
    grad_outputs: list[torch.Tensor | None]
    grad_inputs: list[torch.Tensor | None]
    settings: dict[str, str]
    folder: Path
    pickle_file: str
    pickle_problem: str
    allow_pickle: bool

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        return self.arguments, self.keywords

    def bind(self, module: torch.nn.Module) -> Callable[[], ReplayedModule]:
        """Copies the recorded weights and buffers into ``module``. Returns a callable that runs its forward
        on the recorded inputs and, if gradients were recorded, its backward."""
        _copy_weights(self, module)
        module.train(self.is_training)

        def replay() -> ReplayedModule:
            leaves: list[torch.Tensor] = []
            arguments = _fresh(self.arguments, leaves)
            keywords = _fresh(self.keywords, leaves)
            module.zero_grad(set_to_none=True)
            with _recorded_autocast(self.settings):
                outputs = module(*arguments, **keywords)
            replayed = ReplayedModule(outputs)
            if self.grad_outputs:
                _backward(outputs, self.grad_outputs)
                replayed.grad_inputs = tuple(leaf.grad for leaf in leaves)
                replayed.weight_gradients = {
                    name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None
                }
            return replayed

        return replay

    def __call__(self) -> ReplayedModule:
        """Binds and runs the module that the bundle holds as a pickle."""
        return self.bind(self.unpickled_module())()

    def unpickled_module(self) -> torch.nn.Module:
        if not self.pickle_file:
            raise _C.UsageError(
                f"the bundle contains no pickle of {self.class_name or 'the module'}"
                + (f" ({self.pickle_problem})" if self.pickle_problem else "")
                + "; build the module yourself and call .bind(module)"
            )
        if not self.allow_pickle:
            raise _C.UsageError(
                f"{self.pickle_file} must be unpickled to call {self.class_name}, and unpickling runs "
                "whatever code the file asks for. If you trust where the bundle came from: "
                "load(bundle, allow_pickle=True). Otherwise build the module yourself and call .bind(module)"
            )
        return unpickled((self.folder / self.pickle_file).read_bytes(), self.weights)


def load(
    bundle: str | os.PathLike[str], device: str | None = None, allow_pickle: bool = False
) -> RecordedModuleCall:
    """The module call of ``bundle``. Executes and unpickles nothing."""
    call = _C.module_call_of(
        Path(bundle),
        device or _recorded_device(bundle),
        lambda class_name, fields: RecordedObject(class_name=class_name, **fields),
        NotKept,
    )
    return RecordedModuleCall(
        folder=Path(call.pop("folder")), pickle_file=call.pop("pickle"), allow_pickle=allow_pickle, **call
    )


def _copy_weights(call: RecordedModuleCall, module: torch.nn.Module) -> None:
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    missing = sorted(call.weights.keys() - own.keys())
    unknown = sorted(own.keys() - call.weights.keys())
    if missing or unknown:
        raise _C.UsageError(
            f"the recorded {call.class_name} and the given {type(module).__name__} have different weights: "
            f"recorded only {missing[:5]}, given only {unknown[:5]}. "
            "Build the module with the same configuration"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            recorded = call.weights[name]
            if tensor.shape != recorded.shape:
                raise _C.UsageError(
                    f"{name} was recorded with shape {list(recorded.shape)} but has "
                    f"{list(tensor.shape)} in the given module. Build the module with the same configuration"
                )
            tensor.data = recorded.clone()


def _fresh(value: Any, leaves: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone(memory_format=torch.preserve_format)
        if value.requires_grad:
            copy.requires_grad_(True)
            leaves.append(copy)
            return copy.clone()  # a leaf cannot be written in place; the recorded tensor was no leaf
        return copy
    if isinstance(value, NotKept):
        raise _C.UnsupportedError(f"an argument could not be kept in the bundle: {value.description}")
    if isinstance(value, dict):
        return {key: _fresh(item, leaves) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fresh(item, leaves) for item in value)
    return value


def _backward(outputs: Any, grad_outputs: list[torch.Tensor | None]) -> None:
    """``grad_outputs`` belong to the outputs that require a gradient, in order."""
    differentiable = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if len(differentiable) != len(grad_outputs):
        raise _C.UsageError(
            f"{len(grad_outputs)} output gradients were recorded, but the module returns "
            f"{len(differentiable)} outputs that require one"
        )
    pairs = [(t, g) for t, g in zip(differentiable, grad_outputs, strict=True) if g is not None]
    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _recorded_autocast(settings: dict[str, str]) -> torch.autocast:
    words = settings.get("autocast", "off").split()
    if len(words) < 2:
        return torch.autocast("cpu", enabled=False)
    return torch.autocast(words[0], dtype=getattr(torch, words[1]))


def main(argv: list[str] | None = None) -> int:
    options = _C.parse_replay(sys.argv[1:] if argv is None else argv)
    try:
        for library in options.load:
            torch.ops.load_library(library)
        if options.export_python:
            return _export(options.bundle, options.export_python)
        if _C.has_kernel_call(Path(options.bundle)):
            return _replay_kernel(options)
        if options.reference:
            raise _C.UsageError(f"{_no_reference(options.bundle)}; see nanlocator replay --help")
        report = _report(
            options.bundle,
            options.device,
            options.repeats,
            not options.this_device_only,
            options.trust,
        )
    except (_C.Error, OSError, RuntimeError, ImportError) as error:
        print(f"nanlocator.replay: {_printable(error)}", file=sys.stderr)
        return 2
    except Exception:  # in an imported module, or in nanlocator; not status 1, which means "bad again"
        print(_printable(traceback.format_exc()), file=sys.stderr)
        return 2
    content = json.loads(report.to_json())
    print(json.dumps(content) if options.json else report.format(colour=sys.stdout.isatty()), end="")
    recorded = [run for run in content["runs"] if run["variant"] == "recorded"]
    if any(run["problem"] for run in recorded):
        return 2
    bad = any(o["nan"] or o["pos_inf"] or o["neg_inf"] for run in recorded for o in run["outputs"])
    return 1 if bad else 0


def _printable(text: object) -> str:
    """The text with each line made printable. All lines but the first are indented, so that none looks like
    this program's own."""
    return "\n  ".join(map(_C.printable, str(text).split("\n")))


def _export(bundle: str, file: str) -> int:
    script = _C.export_python(Path(bundle))
    if file == "-":
        print(script, end="")
    else:
        Path(file).write_text(script, encoding="utf-8")
        print(f"wrote {_printable(file)}", file=sys.stderr)
    return 0


def _replay_kernel(options: argparse.Namespace) -> int:
    reference = _function_named(options.reference) if options.reference else None
    report = _kernel_report(options.bundle, options.device, options.repeats, reference, options.trust)
    if options.json:
        print(json.dumps(report))
    else:
        print(f"{_C.printable(report['kernel'])}\n\nconclusion: {report['conclusion']}")
        sentences = [*report["sentences"], *map(_sentence, report["environment"])]
        print(*(f"  - {_C.printable(sentence)}" for sentence in sentences), sep="\n")
    if report["conclusion"] == "not_replayed":
        return 2
    return 0 if report["conclusion"] == "not_bad_again" else 1


def _sentence(change: dict[str, str | None]) -> str:
    recorded, here = (
        "not set" if value is None else repr(value) for value in (change["recorded"], change["here"])
    )
    return f"the variable {change['name']} was {recorded} in training but is {here} here"


def _function_named(path: str) -> Callable[..., Any]:
    module, colon, name = path.partition(":")
    if not colon:
        raise _C.UsageError(f"--reference {path}: expected MODULE:FUNCTION; see nanlocator replay --help")
    here = os.getcwd()
    sys.path.append(here)  # for the caller's own module; last, so that it shadows no module of Python
    try:
        return attribute(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _C.UsageError(f"--reference {path}: {error}") from error
    finally:
        sys.path[:] = [entry for entry in sys.path if entry is not here]
