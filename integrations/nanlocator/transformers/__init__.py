"""The debugger of Hugging Face transformers, under its own names: change the import.

    from nanlocator.transformers import DebugUnderflowOverflow, detect_overflow

docs/transformers.md tells what is the same and what is mended. Works with any ``nn.Module``; transformers
itself is not needed, but for ``NanLocatorCallback`` and ``patch``.
"""

from typing import TYPE_CHECKING, Any

from nanlocator.debugger.autocast import no_autocast
from nanlocator.debugger.debug import DebugOption, DebugUnderflowOverflow
from nanlocator.debugger.detect import detect_overflow, get_abs_min_max
from nanlocator.debugger.patch import patch

if TYPE_CHECKING:
    from nanlocator.transformers.trainer import NanLocatorCallback

__all__ = [
    "DebugOption",
    "DebugUnderflowOverflow",
    "NanLocatorCallback",
    "detect_overflow",
    "get_abs_min_max",
    "no_autocast",
    "patch",
]


def __getattr__(name: str) -> Any:
    """NanLocatorCallback is a class of transformers' Trainer: only it needs transformers."""
    if name != "NanLocatorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanlocator.transformers.trainer import NanLocatorCallback

    return NanLocatorCallback
