"""The debugger of Hugging Face transformers, under its own names: change the import.

    from nanlocator.transformers import DebugUnderflowOverflow, detect_overflow

docs/transformers.md tells what is the same and what is mended. Works with any ``nn.Module``; transformers
itself is not needed.
"""

from nanlocator.transformers.debug import DebugOption, DebugUnderflowOverflow
from nanlocator.transformers.detect import detect_overflow, get_abs_min_max

__all__ = ["DebugOption", "DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max"]
