"""nanlocator: where was this NaN born?

    import nanlocator
    optimizer = nanlocator.LocatingOptimizer(optimizer, model)   # plain PyTorch
    import nanlocator.megatron
    locator = nanlocator.megatron.install(model_chunks, optimizer)  # Megatron-Core

See README.md for both, docs/ for everything else.
"""

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
from nanlocator.loops.optimizer import LocatingOptimizer
from nanlocator.loops.watch import Watch, watch

__version__ = _build_info.VERSION

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
    "Watch",
    "check_checkpoint",
    "detect",
    "watch",
]


def __getattr__(name: str) -> object:
    if name == "replay":  # also a command: python -m imports it under another name
        import nanlocator.replay as module

        return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names. Rooms and the frameworks' packages are imported by their paths."""
    return [*__all__, "__version__", "replay"]
