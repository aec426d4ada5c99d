"""The samples of a step: what torch's DataLoaders have given out, by the indices of their datasets.

A loader asks its sampler for the indices of a batch before it fetches them, with workers some batches ahead,
which it numbers (torch/utils/data/dataloader.py)."""

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches, weakly
from nanlocator.state.batches import version_of

_MOST_BATCHES = 64  # of the latest, which a step may have read
_MOST_LISTED = 8
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class _Batch:
    dataset: str
    indices: list[int]
    tensors: list[tuple["weakref.ref[torch.Tensor]", int]]  # with their versions


class LoadedBatches:
    """Follows all loaders of the process as long as it lives. Keeps the latest batches alive, up to 64 MiB of
    host memory, because a program that moves them to its device drops them."""

    def __init__(self) -> None:
        # By iterator and the number of the batch, which is 0 for each without workers.
        self._ahead: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        self._given: collections.deque[_Batch] = collections.deque(maxlen=_MOST_BATCHES)
        self._kept: collections.deque[tuple[list[torch.Tensor], int]] = collections.deque()  # with bytes
        self._bytes = 0  # of them
        self._patches = Patches(__name__)
        self._patches.wrap(points.LOADER_INDICES, weakly(self._ask))
        self._patches.wrap(points.LOADER_NEXT, weakly(self._give))
        self._removal = weakref.finalize(self, self._patches.remove)
        self._removal.atexit = False

    def _ask(self, original: Callable[..., Any], iterator: Any) -> Any:
        indices = original(iterator)
        self._ahead.setdefault(iterator, {})[getattr(iterator, "_send_idx", 0)] = indices
        return indices

    def _give(self, original: Callable[..., Any], iterator: Any) -> Any:
        data = original(iterator)
        indices = self._ahead.get(iterator, {}).pop(getattr(iterator, "_rcvd_idx", 1) - 1, None)
        is_known = isinstance(indices, list) and all(type(each) is int for each in indices)
        if is_known and getattr(iterator, "_in_order", True):
            given = _C.tensors_in(data)
            tensors = [(weakref.ref(each), version_of(each)) for each in given]
            self._keep([each for each in given if each.device.type == "cpu" and each.layout == torch.strided])
            self._given.append(_Batch(type(iterator._dataset).__name__, indices, tensors))
        return data

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        size = sum(each.nbytes for each in tensors)
        self._kept.append((tensors, size))
        self._bytes += size
        while self._bytes > _MOST_BYTES or len(self._kept) > _MOST_BATCHES:
            _, size = self._kept.popleft()
            self._bytes -= size

    def describe(self, has_read: Callable[[torch.Tensor], bool]) -> list[str]:
        """For each batch that the step has read, in order: "samples 70 to 79 of Feats; NaN or Inf in 77".
        Waits for the device."""
        lines = []
        for batch in self._given:
            with contextlib.suppress(RuntimeError, TypeError):  # a tensor without these operators
                lines += _described(batch, has_read)
        return lines


def _described(batch: _Batch, has_read: Callable[[torch.Tensor], bool]) -> list[str]:
    tensors = [(each, was) for reference, was in batch.tensors if (each := reference()) is not None]
    # The largest one, because others, labels, may be the same in several batches.
    largest = max((each for each, _ in tensors), key=torch.numel, default=None)
    if largest is None or not has_read(largest):
        return []
    unchanged = [each for each, was in tensors if version_of(each) == was]
    rows = {row for each in unchanged for row in _bad_rows(each, len(batch.indices))}
    bad = [batch.indices[row] for row in sorted(rows)]
    holds = f"; NaN or Inf in {_listed(bad)}" if bad else ""
    return [f"samples {_listed(batch.indices)} of {batch.dataset}{holds}"]


def are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, on any devices; a NaN may be among them."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    tensor, other = tensor.detach().cpu(), other.detach().cpu()
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    return torch.allclose(tensor, other, rtol=0.0, atol=0.0, equal_nan=True)


def _bad_rows(tensor: torch.Tensor, rows: int) -> list[int]:
    if (
        not tensor.is_floating_point()
        or tensor.dim() == 0
        or len(tensor) != rows
        or tensor.layout != torch.strided
    ):
        return []
    tensor = tensor.detach()
    is_bad = torch.isnan(tensor) | torch.isposinf(tensor)
    return [int(row) for row in is_bad.reshape(rows, -1).any(1).nonzero()]


def _listed(indices: Sequence[int]) -> str:
    """ "70 to 79" or "3, 17, 5 and 21 more"."""
    is_range = all(b - a == 1 for a, b in itertools.pairwise(indices))
    if is_range and len(indices) > 2:
        return f"{indices[0]} to {indices[-1]}"
    more = len(indices) - _MOST_LISTED
    text = ", ".join(map(str, indices[:_MOST_LISTED]))
    return f"{text} and {more} more" if more > 0 else text
