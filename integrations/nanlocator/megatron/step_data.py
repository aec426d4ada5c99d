"""The microbatches of one step, kept by reference so that the step can be executed again."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from nanlocator.state.batches import KeptBatch, named_tensors
from nanlocator.state.generators import GeneratorStates


class StepData:
    """Wraps a step's data iterator: returns its items and keeps them for ``replay``.

    ``data_iterator`` is the argument of ``forward_backward_func``: an iterator, a list of them (one per model
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
        """Returns the same items again, from the first one."""
        replays = {id(recorder): _Replay(recorder) for recorder in self._recorders.values()}

        def replay_of(recorder: "_Recorder | None") -> "_Replay | None":
            return None if recorder is None else replays[id(recorder)]

        if isinstance(self.recording, list):
            return [replay_of(recorder) for recorder in self.recording]
        return replay_of(self.recording)

    def changed(self) -> list[str]:
        """Sentences about items that the step has overwritten: its re-run sees the changed values."""
        return [sentence for recorder in self._recorders.values() for sentence in recorder.changed()]

    def describe(self) -> list[tuple[int, int | None, list[str]]]:
        """For each microbatch: number, chunk (None with one iterator) and a line per tensor."""
        recorders = self.recording if isinstance(self.recording, list) else [self.recording]
        seen: set[int] = set()
        lines = []
        for chunk, recorder in enumerate(recorders):
            if recorder is None or id(recorder) in seen:
                continue
            seen.add(id(recorder))
            for number, batch in enumerate(recorder.batches):
                of_chunk = chunk if isinstance(self.recording, list) else None
                lines.append((number, of_chunk, [_line(name, t) for name, t in named_tensors(batch.item)]))
        return lines


class _Recorder:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.batches: list[KeptBatch] = []
        # Saved after each item, because a data pipeline may draw from the global generators.
        self.generators: list[tuple[torch.Tensor, GeneratorStates]] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self.batches.append(KeptBatch(item))
        others = GeneratorStates()
        others.save()
        self.generators.append((torch.get_rng_state(), others))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def changed(self) -> list[str]:
        return [text for number, batch in enumerate(self.batches) for text in batch.changed(number)]


class _Replay:
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._position >= len(self._recorder.batches):
            raise RuntimeError(
                f"the re-run of the step requests more microbatches than the first pass's {self._position}"
            )
        item = self._recorder.batches[self._position].copy()
        self._restore_generators()
        self._position += 1
        return item

    def _restore_generators(self) -> None:
        of_torch, others = self._recorder.generators[self._position]
        torch.set_rng_state(of_torch)
        others.restore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def _line(name: str, tensor: torch.Tensor) -> str:
    """The fingerprint is BLAKE2b over the elements in row-major order, 8 bytes."""
    values = tensor.detach().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
    fingerprint = hashlib.blake2b(raw, digest_size=8).hexdigest()
    span = ""
    if values.dim() <= 1 and 0 < values.numel() <= 16 and not values.is_floating_point():
        span = f" = {values.tolist()}"  # sample indices
    elif values.numel() and not values.is_complex():
        span = f", {values.min().item():g} to {values.max().item():g}"
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{name}: {dtype} {list(values.shape)}{span}, fingerprint {fingerprint}"
