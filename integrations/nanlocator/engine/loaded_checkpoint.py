"""Tells the engine which checkpoint the program has loaded: if that one is finite, the values became bad
after it was read, and a restart from it would fail again."""

import os
from typing import Any

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_patches = Patches(__name__)


def follow() -> None:
    """From now on, as long as the process runs."""
    _patches.wrap(points.TORCH_LOAD, _load)


def _load(original: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = original(*args, **kwargs)
    file = args[0] if args else kwargs.get("f")
    if not isinstance(file, str | os.PathLike):
        file = getattr(file, "name", None)  # of an open file
    if isinstance(file, str | os.PathLike):
        _C.note_loaded_checkpoint(os.path.abspath(os.fsdecode(file)))
    return loaded
