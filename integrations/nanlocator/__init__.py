"""nanlocator: where was this NaN born?

    python -m nanlocator train.py ARGS...                          # a script that is not edited

    nanlocator.watch(model, optimizer)                             # one line before a PyTorch loop
    nanlocator.transformers.NanLocatorCallback()                   # a callback of transformers' Trainer
    nanlocator.megatron.install(model_chunks, optimizer)           # Megatron-Core
    nanlocator.deepspeed.install(engine)                           # DeepSpeed

`help(nanlocator.watch)` has the options' place; README.md and docs/ have everything else.
"""

import importlib as _importlib
import os as _os
import sys as _sys

from nanlocator.calls.import_path import leave_out_current_folder as _leave_out_current_folder

# `python -m` has put the current folder first on the import path; it may have come with a bundle, or with a
# checkpoint.
if _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)].endswith(
    ("nanlocator.replay", "nanlocator.check_checkpoint")
):
    _leave_out_current_folder()

import platform as _platform

import torch as _torch

from nanlocator import _build_info
from nanlocator.engine import python_versions as _python_versions
from nanlocator.engine import torch_versions as _torch_versions

if _problem := _python_versions.misfit(
    _build_info.PYTHON_VERSION, _platform.python_version()
) or _torch_versions.misfit(
    _build_info.TORCH_VERSION, _build_info.CXX11_ABI, _torch.__version__, _torch.compiled_with_cxx11_abi()
):
    raise ImportError(_problem)

from nanlocator._C import (
    AgreementError,
    Error,
    FormatError,
    IoError,
    RankCoordinates,
    UnsupportedError,
    UsageError,
)
from nanlocator.check_checkpoint import check_checkpoint
from nanlocator.detect import detect
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.verdict import Verdict
from nanlocator.loops.guard import guard
from nanlocator.loops.optimizer import LocatingOptimizer
from nanlocator.loops.watch import Watch, watch

__version__ = _build_info.VERSION

if (
    _os.environ.get("NANLOCATOR", "0") not in ("", "0")
    and "nanlocator_autoload" not in _sys.modules
    and "nanlocator" not in _sys.orig_argv
):
    print(
        "nanlocator: NANLOCATOR is set, but has no effect in this Python: its site-packages hold no "
        "nanlocator.pth, which pip installs. Start the script with python -m nanlocator instead",
        file=_sys.stderr,
        flush=True,
    )

__all__ = [
    "AgreementError",
    "Error",
    "FormatError",
    "IoError",
    "LocatingOptimizer",
    "NonFiniteGradientError",
    "RankCoordinates",
    "UnsupportedError",
    "UsageError",
    "Verdict",
    "Watch",
    "check_checkpoint",
    "detect",
    "guard",
    "watch",
]


# `replay` is also a command: python -m imports it under another name.
_ON_DEMAND = frozenset({"replay", "megatron", "deepspeed", "transformers", "debugger"})


def __getattr__(name: str) -> object:
    if name in _ON_DEMAND:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names. Rooms and the frameworks' packages are imported by their paths."""
    return [*__all__, "__version__", "replay"]
