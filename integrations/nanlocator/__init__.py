"""nanlocator: where was this NaN born?

    import nanlocator
    optimizer = nanlocator.LocatingOptimizer(optimizer, model)   # plain PyTorch
    import nanlocator.megatron
    locator = nanlocator.megatron.install(model_chunks, optimizer)  # Megatron-Core

See README.md for both, docs/ for everything else.
"""

import importlib
import platform

import torch

from nanlocator import _build_info
from nanlocator.engine import python_versions, torch_versions

if problem := python_versions.misfit(
    _build_info.PYTHON_VERSION, platform.python_version()
) or torch_versions.misfit(
    _build_info.TORCH_VERSION, _build_info.CXX11_ABI, torch.__version__, torch.compiled_with_cxx11_abi()
):
    raise ImportError(problem)

from nanlocator._C import (
    AgreementError,
    Error,
    FormatError,
    IoError,
    RankCoordinates,
    UnsupportedError,
    UsageError,
)
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
    "detect",
    "watch",
]


def __getattr__(name: str) -> object:
    if name == "replay":  # a command by itself: python -m imports it under another name
        return importlib.import_module("nanlocator.replay")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
