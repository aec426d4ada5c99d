"""Tells the engine which checkpoints the program has loaded and saved. If what it has loaded is finite, the
values became bad after it was read, and a restart from it would fail again; where it saves is where a restart
finds the one to load."""

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_MOST_LEVELS = 3  # {"state": {"model": {"weight": ...}}}
_MOST_MEMBERS = 64  # beside the weights

# Path and names of what was loaded before the parameters were known; without names, a checkpoint.
_loaded_before: deque[tuple[str | None, list[Any] | None]] = deque(maxlen=16)


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
        if names() and _loaded_before:
            _C.note_loaded_checkpoint(_latest_with(names()) or "")
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
            file = args[0] if args else kwargs.get("f")
            if not (names := self._names()):
                _loaded_before.append((_path_of(file), list(_keys_in(loaded))))
            if not names or _holds_weights(loaded, names):
                _note_loaded(file)
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
            if _are_of_weights(tensors, self._names()):
                _note_saved(file, updates)
        return saved

    def _load_distributed(self, original: Any, reader: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(reader, *args, **kwargs)
        with contextlib.suppress(Exception):
            path = getattr(reader, "path", None)
            if not self._names():
                _loaded_before.append((_path_of(path), None))
            _note_loaded(path)
        return loaded

    def _save_distributed(self, original: Any, writer: Any, *args: Any, **kwargs: Any) -> Any:
        updates = self._updates()
        saved = original(writer, *args, **kwargs)
        with contextlib.suppress(Exception):
            _note_saved(getattr(writer, "path", None), updates)
        return saved


def _latest_with(names: Collection[str]) -> str | None:
    """The latest file that was loaded before the parameters were known and that has one of them: the others
    may be data."""
    loaded = [path for path, keys in _loaded_before if keys is None or _are_of_weights(keys, names)]
    _loaded_before.clear()
    return loaded[-1] if loaded else None


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


def _holds_weights(saved: Any, names: Collection[str]) -> bool:
    """Whether it is a module, or has a state dictionary, with one of these parameters."""
    return _are_of_weights(_keys_in(saved), names)


def _are_of_weights(keys: Iterable[Any], names: Collection[str]) -> bool:
    """Whether one of them is of these parameters; a wrapper may have put something before the names
    ("module.weight")."""
    last = {name.rpartition(".")[2] for name in names}
    return any(_ends_with(key, names, last) for key in keys)


def _keys_in(saved: Any, levels: int = _MOST_LEVELS) -> Iterator[str]:
    """The names of parameters and tensors in modules and dictionaries."""
    if isinstance(saved, torch.nn.Module):
        yield from (name for name, _ in saved.named_parameters())
        return
    if isinstance(saved, dict):
        yield from (key for key, value in saved.items() if isinstance(value, torch.Tensor))
        members: Iterable[Any] = saved.values()
    elif isinstance(saved, list | tuple):
        members = saved
    else:
        return
    inner = [each for each in members if isinstance(each, dict | list | tuple | torch.nn.Module)]
    for each in inner[:_MOST_MEMBERS] if levels > 1 else []:
        yield from _keys_in(each, levels - 1)


def _ends_with(key: Any, names: Collection[str], last: set[str]) -> bool:
    if not isinstance(key, str) or key.rpartition(".")[2] not in last:
        return False
    while key:
        if key in names:
            return True
        key = key.partition(".")[2]
    return False
