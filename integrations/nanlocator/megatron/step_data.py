"""The microbatches of one step, kept by reference so that the step can be executed again."""

import copy
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


class StepData:
    """Stands between a step and its data iterator: hands items on and keeps them, for ``replay``.

    ``data_iterator`` is what ``forward_backward_func`` takes: an iterator, a list of them (one per model
    chunk, the same object for chunks that share one), or None on ranks that draw no data.
    """

    def __init__(self, data_iterator: Any) -> None:
        recorders: dict[int, _Recorder] = {}

        def recorder(iterator: Any) -> "_Recorder | None":
            if iterator is None:
                return None
            return recorders.setdefault(id(iterator), _Recorder(iterator))

        is_list = isinstance(data_iterator, list)
        self.recording = [recorder(i) for i in data_iterator] if is_list else recorder(data_iterator)
        self._recorders = recorders

    def replay(self) -> Any:
        """The same items again, from the first one."""
        replays = {id(recorder): _Replay(recorder) for recorder in self._recorders.values()}

        def replay_of(recorder: "_Recorder | None") -> "_Replay | None":
            return None if recorder is None else replays[id(recorder)]

        if isinstance(self.recording, list):
            return [replay_of(recorder) for recorder in self.recording]
        return replay_of(self.recording)

    def changed(self) -> list[str]:
        """Sentences about items that the step has written to: its repeat finds them as they are now."""
        return [sentence for recorder in self._recorders.values() for sentence in recorder.changed()]

    def describe(self) -> list[tuple[int, int | None, list[str]]]:
        """Of each microbatch: number, chunk (None with one iterator) and a line per tensor."""
        recorders = self.recording if isinstance(self.recording, list) else [self.recording]
        told: set[int] = set()
        lines = []
        for chunk, recorder in enumerate(recorders):
            if recorder is None or id(recorder) in told:
                continue
            told.add(id(recorder))
            for number, item in enumerate(recorder.items):
                of_chunk = chunk if isinstance(self.recording, list) else None
                lines.append((number, of_chunk, [_line(name, t) for name, t in _named(item)]))
        return lines


class _Recorder:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.items: list[Any] = []
        self.versions: list[list[int]] = []
        self.generators: list[Any] = []  # a data pipeline may draw from the global ones

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self.items.append(_shallow(item))
        self.versions.append([_version(tensor) for _, tensor in _named(item)])
        self.generators.append(_generator_states())
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def changed(self) -> list[str]:
        return [
            f"microbatch {number}: '{name}' was written in place by the step"
            for number, (item, versions) in enumerate(zip(self.items, self.versions, strict=True))
            for (name, tensor), version in zip(_named(item), versions, strict=True)
            if _version(tensor) != version
        ]


class _Replay:
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._position >= len(self._recorder.items):
            raise RuntimeError(
                f"the repeat of the step asks for more than the first pass's {self._position} microbatches"
            )
        item = _shallow(self._recorder.items[self._position])
        _set_generator_states(self._recorder.generators[self._position])
        self._position += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def _generator_states() -> Any:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def _set_generator_states(states: Any) -> None:
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _shallow(item: Any) -> Any:
    """Containers copied, tensors not: the step may take entries out of its batch."""
    if type(item) is dict:
        return {key: _shallow(value) for key, value in item.items()}
    if isinstance(item, dict):
        return copy.copy(item)
    if type(item) in (list, tuple):
        return type(item)(_shallow(value) for value in item)
    return item


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # nobody counts writes to inference tensors


def _named(item: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        return [(name or "data", item)]
    if isinstance(item, dict):
        pairs = [(str(key), value) for key, value in item.items()]
    elif isinstance(item, list | tuple):
        pairs = [(str(index), value) for index, value in enumerate(item)]
    else:
        return []
    prefix = f"{name}." if name else ""
    return [found for key, value in pairs for found in _named(value, prefix + key)]


def _line(name: str, tensor: torch.Tensor) -> str:
    """The digest is BLAKE2b over the elements in row-major order, 8 bytes."""
    values = tensor.detach().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    span = ""
    if values.numel() and not values.is_complex():
        span = f", {values.min().item():g} to {values.max().item():g}"
    return f"{name}: {str(values.dtype).removeprefix('torch.')} {list(values.shape)}{span}, digest {digest}"
