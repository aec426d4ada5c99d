"""Runs an unedited training script with nanlocator installed on its model.

    torchrun ... -m nanlocator.megatron [options] pretrain_gpt.py ARGS...

The script runs as Python would run it: as ``__main__``, with its own arguments, its folder first on the
path, its exit code and its traceback. Two functions are wrapped the moment their modules have been
imported, wherever the script finds them: Megatron-LM's ``setup_model_and_optimizer``, and Megatron-Core's
``get_megatron_optimizer`` for scripts with a loop of their own.
"""

import argparse
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from nanlocator.session import record_for_torchrun

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m nanlocator.megatron pretrain_gpt.py --num-layers 12 ...
  torchrun --nproc-per-node 8 -m nanlocator.megatron --on-bad skip --output-dir /logs/nan pretrain_gpt.py ...
  NANLOCATOR_ON_BAD=recover srun python -m nanlocator.megatron pretrain_gpt.py ...

Options stand before the script; what follows it is the script's. An option that is not given is read from its
variable, which holds 1 or 0 for those that are on or off.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script that `arguments` (default: the command line) name. Whatever it raises, SystemExit
    too, passes through; wrong use of the launcher exits with 2."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script}")
    _set_variables(options)
    installer = _Installer()
    sys.meta_path.insert(0, installer)
    try:
        _run(options.script, options.arguments)
    except Exception as error:
        _record(error)
        raise
    finally:
        if not installer.is_installed and os.environ.get("RANK", "0") == "0":
            print(
                "nanlocator: installed on nothing: the script has called neither megatron.training's "
                "setup_model_and_optimizer nor megatron.core's get_megatron_optimizer",
                file=sys.stderr,
                flush=True,
            )
    return 0


# --- the command line --------------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanlocator.megatron",
        description="Runs a Megatron training script, unedited, with nanlocator installed on its model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, text: str, **kind: Any) -> None:
        variable = f"NANLOCATOR_{name.upper()}"
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{text} [{variable}]", **kind)

    add("level", "what is watched at every step", choices=["grads", "boundaries", "modules", "operators"])
    add("on_bad", "what a bad step leads to", choices=["stop", "report", "skip", "recover"])
    add("output_dir", "folder of the run", metavar="FOLDER")
    add("rerun", "execute a bad step again, traced; always: every step", choices=["yes", "no", "always"])
    add("check_params", "scan parameters before and after the step", action=argparse.BooleanOptionalAction)
    add("gather_deadline", "how long to wait for silent ranks", type=float, metavar="SECONDS")
    add("bundle_bytes", "most bytes of bundles per rank", type=int, metavar="BYTES")
    add("bundle_count", "most bundles per rank", type=int, metavar="N")
    add("max_incidents", "findings to locate; further ones are counted", type=int, metavar="N")
    parser.add_argument("script", help="the training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, untouched")
    return parser


def _set_variables(options: argparse.Namespace) -> None:
    """What was given takes the place of its variable, where ``install`` finds it."""
    for name, value in vars(options).items():
        if name not in ("script", "arguments") and value is not None:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            os.environ[f"NANLOCATOR_{name.upper()}"] = text


def _run(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # there is none before Python 3.11
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # it was this launcher's
    runpy.run_path(script, run_name="__main__")


def _record(error: Exception) -> None:
    """So that torchrun's summary shows it, as with torch's decorator ``record`` in the script. What has been
    recorded before stays: a verdict, which says more."""
    if not os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", "")):
        record_for_torchrun(error)


# --- installing --------------------------------------------------------------------------------------


class _Installer(importlib.abc.MetaPathFinder):
    """Finds no module by itself: it wraps two functions as soon as others have loaded their modules,
    before anyone can have imported these functions by name."""

    def __init__(self) -> None:
        self.is_installed = False
        self._is_in_setup = False  # of Megatron-LM, which loads the checkpoint after the optimizer is made
        self._wrappers: dict[str, tuple[str, Callable[..., Any]]] = {
            "megatron.training.training": ("setup_model_and_optimizer", self._around_setup),
            "megatron.core.optimizer": ("get_megatron_optimizer", self._around_get_optimizer),
        }
        for module in [name for name in self._wrappers if name in sys.modules]:
            self._wrap(sys.modules[module])

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._wrappers:
            return None
        spec = self._find_by_others(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._wrap(module)

        spec.loader.exec_module = exec_module  # of this one loader object
        return spec

    def _find_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                return spec
        return None

    def _wrap(self, module: ModuleType) -> None:
        name, wrap = self._wrappers[module.__name__]
        original = getattr(module, name)
        setattr(module, name, functools.wraps(original)(functools.partial(wrap, original)))

    def _around_setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_in_setup = True
        try:
            result = original(*args, **kwargs)  # model chunks, optimizer, scheduler
        finally:
            self._is_in_setup = False
        self._install(result[0], result[1])
        return result

    def _around_get_optimizer(
        self, original: Callable[..., Any], config: Any, model_chunks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        optimizer = original(config, model_chunks, *args, **kwargs)
        if not self._is_in_setup:
            self._install(model_chunks, optimizer)
        return optimizer

    def _install(self, model_chunks: Any, optimizer: Any) -> None:
        if optimizer is None:  # evaluation
            return
        from nanlocator.megatron import install

        install(model_chunks, optimizer)
        self.is_installed = True
