"""For Hugging Face transformers: a callback for its Trainer, and its debugger under the original names.

    from nanlocator.transformers import NanLocatorCallback
    from nanlocator.transformers import DebugUnderflowOverflow, detect_overflow

docs/transformers.md compares the debugger with transformers' and lists the bugs it fixes. It works with any
``nn.Module``; only ``NanLocatorCallback`` and ``patch`` need transformers itself.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanlocator.debugger.autocast import no_autocast
    from nanlocator.debugger.debug import DebugOption, DebugUnderflowOverflow
    from nanlocator.debugger.detect import detect_overflow, get_abs_min_max
    from nanlocator.debugger.patch import patch
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

_DEBUGGER = {
    "DebugOption": "debug",
    "DebugUnderflowOverflow": "debug",
    "detect_overflow": "detect",
    "get_abs_min_max": "detect",
    "no_autocast": "autocast",
    "patch": "patch",
}


def __getattr__(name: str) -> Any:
    """Imports at first use: the callback needs transformers' Trainer, and a build may lack the debugger."""
    if name == "NanLocatorCallback":
        module = importlib.import_module("nanlocator.transformers.trainer")
    elif name not in _DEBUGGER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif importlib.util.find_spec("nanlocator.debugger") is None:
        raise ImportError(
            f"{name} needs nanlocator's debugger: rebuild nanlocator without NANLOCATOR_DEBUGGER=OFF"
        )
    else:
        module = importlib.import_module(f"nanlocator.debugger.{_DEBUGGER[name]}")
    value = globals()[name] = getattr(module, name)
    return value
