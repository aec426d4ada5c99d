"""nanlocator: where was this NaN born?

    import nanlocator
    optimizer = nanlocator.LocatingOptimizer(optimizer, model)   # plain PyTorch
    import nanlocator.megatron
    locator = nanlocator.megatron.install(model_chunks, optimizer)  # Megatron-Core

See README.md for both, docs/ for everything else.
"""

import torch

from nanlocator import _build_info

if torch.__version__ != _build_info.TORCH_VERSION:
    raise ImportError(
        f"nanlocator {_build_info.VERSION} was built against torch {_build_info.TORCH_VERSION}, but torch "
        f"{torch.__version__} is installed: its C++ classes may differ. Build nanlocator again in this "
        "environment: pip install --no-build-isolation --force-reinstall --no-deps <source folder>"
    )

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
from nanlocator.errors import NonFiniteGradientError
from nanlocator.optimizer import LocatingOptimizer

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
    "detect",
]
