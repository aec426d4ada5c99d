"""Tells the engine which checkpoints the program has loaded and saved. If what it has loaded is finite, the
values became bad after it was read, and a restart from it would fail again; where it saves is where a restart
finds the one to load."""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_MOST_LEVELS = 3  # {"state": {"model": {"weight": ...}}}
_MOST_MEMBERS = 64  # beside the weights


class CheckpointFiles:
    """Follows ``torch.load`` and ``torch.save``, and those of torch.distributed.checkpoint and safetensors if
    the program has imported them, until ``remove``.

    Args:
        updates: the number of the last step whose update is in the weights, where it is known.
        names: those of the watched parameters, empty if they are not known yet. What a program saves is a
            checkpoint if it has one of them; so is what it loads, or if it may have.
    """

    def __init__(self, updates: Callable[[], int | None], names: Callable[[], Collection[str]]) -> None:
        _C.forget_saved_checkpoints()  # of an earlier training in this process
        self._updates, self._names = updates, names
        self._patches = Patches(__name__)
        self._patches.wrap(points.TORCH_LOAD, self._load)
        self._patches.wrap(points.TORCH_SAVE, self._save)
        if "safetensors.torch" in sys.modules:
            self._patches.wrap(points.SAFETENSORS_SAVE, self._save_safetensors)
        if "torch.distributed.checkpoint" in sys.modules:
            self._patches.wrap(points.DISTRIBUTED_LOAD, self._load_distributed)
            self._patches.wrap(points.DISTRIBUTED_SAVE, self._save_distributed)

    def remove(self) -> None:
        self._patches.remove()

    def _load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        with contextlib.suppress(Exception):  # a note must not end what has been loaded
            if not (names := self._names()) or _holds_weights(loaded, names):
                _note_loaded(args[0] if args else kwargs.get("f"))
        return loaded

    def _save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        updates = self._updates()
        saved = original(*args, **kwargs)
        with contextlib.suppress(Exception):
            if _holds_weights(args[0] if args else kwargs.get("obj"), self._names()):
                _note_saved(args[1] if len(args) > 1 else kwargs.get("f"), updates)
        return saved

    def _save_safetensors(self, original: Any, tensors: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        updates = self._updates()
        saved = original(tensors, file, *args, **kwargs)
        with contextlib.suppress(Exception):
            names = self._names()
            last = {name.rpartition(".")[2] for name in names}
            if any(_ends_with(key, names, last) for key in tensors):
                _note_saved(file, updates)
        return saved

    def _load_distributed(self, original: Any, reader: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(reader, *args, **kwargs)
        with contextlib.suppress(Exception):
            _note_loaded(getattr(reader, "path", None))
        return loaded

    def _save_distributed(self, original: Any, writer: Any, *args: Any, **kwargs: Any) -> Any:
        updates = self._updates()
        saved = original(writer, *args, **kwargs)
        with contextlib.suppress(Exception):
            _note_saved(getattr(writer, "path", None), updates)
        return saved


def _note_loaded(file: Any) -> None:
    if (path := _path_of(file)) is not None:
        _C.note_loaded_checkpoint(path)


def _note_saved(file: Any, updates: int | None) -> None:
    if (path := _path_of(file)) is not None:
        _C.note_saved_checkpoint(path, updates)


def _path_of(file: Any) -> str | None:
    """None for what is not a file of this machine."""
    if not isinstance(file, str | os.PathLike):
        file = getattr(file, "name", None)  # of an open file
    if not isinstance(file, str | os.PathLike):
        return None
    path = os.fsdecode(file)
    return None if ":/" in path else os.path.abspath(path)


def _holds_weights(saved: Any, names: Collection[str], levels: int = _MOST_LEVELS) -> bool:
    """Whether it is a module, or has a state dictionary of one of these parameters; a wrapper may have put
    something before the names ("module.weight")."""
    if isinstance(saved, torch.nn.Module):
        return any(name in names for name, _ in saved.named_parameters())
    if isinstance(saved, dict):
        last = {name.rpartition(".")[2] for name in names}
        if any(
            isinstance(value, torch.Tensor) and _ends_with(key, names, last) for key, value in saved.items()
        ):
            return True
        members: Iterable[Any] = saved.values()
    elif isinstance(saved, list | tuple):
        members = saved
    else:
        return False
    inner = [each for each in members if isinstance(each, dict | list | tuple | torch.nn.Module)]
    return levels > 1 and any(_holds_weights(each, names, levels - 1) for each in inner[:_MOST_MEMBERS])


def _ends_with(key: Any, names: Collection[str], last: set[str]) -> bool:
    if not isinstance(key, str) or key.rpartition(".")[2] not in last:
        return False
    while key:
        if key in names:
            return True
        key = key.partition(".")[2]
    return False
