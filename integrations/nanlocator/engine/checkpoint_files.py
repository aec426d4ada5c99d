"""Tells the engine which checkpoints the program has loaded and saved. If what it has loaded is finite, the
values became bad after it was read, and a restart from it would fail again; where it saves is where a restart
finds the one to load."""

import os
import sys
from collections.abc import Callable
from typing import Any

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches


class CheckpointFiles:
    """Follows ``torch.load`` and ``torch.save``, and those of torch.distributed.checkpoint if the program has
    imported it, until ``remove``.

    Args:
        updates: the number of the last step whose update is in the weights, where it is known.
    """

    def __init__(self, updates: Callable[[], int | None]) -> None:
        self._updates = updates
        self._patches = Patches(__name__)
        self._patches.wrap(points.TORCH_LOAD, self._load)
        self._patches.wrap(points.TORCH_SAVE, self._save)
        if "torch.distributed.checkpoint" in sys.modules:
            self._patches.wrap(points.DISTRIBUTED_LOAD, self._load_distributed)
            self._patches.wrap(points.DISTRIBUTED_SAVE, self._save_distributed)

    def remove(self) -> None:
        self._patches.remove()

    def _load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        if (path := _path_of(args[0] if args else kwargs.get("f"))) is not None:
            _C.note_loaded_checkpoint(path)
        return loaded

    def _save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        saved = original(*args, **kwargs)
        if (path := _path_of(args[1] if len(args) > 1 else kwargs.get("f"))) is not None:
            _C.note_saved_checkpoint(path, self._updates())
        return saved

    def _load_distributed(self, original: Any, reader: Any, *args: Any, **kwargs: Any) -> Any:
        if (path := _path_of(reader.path)) is not None:
            _C.note_loaded_checkpoint(path)
        return original(reader, *args, **kwargs)

    def _save_distributed(self, original: Any, writer: Any, *args: Any, **kwargs: Any) -> Any:
        saved = original(writer, *args, **kwargs)
        if (path := _path_of(writer.path)) is not None:
            _C.note_saved_checkpoint(path, self._updates())
        return saved


def _path_of(file: Any) -> str | None:
    if not isinstance(file, str | os.PathLike):
        file = getattr(file, "name", None)  # of an open file
    return os.path.abspath(os.fsdecode(file)) if isinstance(file, str | os.PathLike) else None
