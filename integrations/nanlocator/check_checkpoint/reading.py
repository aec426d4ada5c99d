"""Streams tensors from their files through the engine's scan.

In: tensors with the places of their elements. Out: the `Statistics` of each. The files are read in order, in
blocks of at most `BLOCK` bytes, by `_THREADS` threads, each of which reads a block and scans it from the
processor's cache: memory does not grow with the checkpoint.

Files are read, or mapped, which spares a copy. A file system's error, or a file that somebody truncates, is
then no error with its byte, but a SIGBUS: only the command, a process of its own, maps.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from nanlocator import _C
from nanlocator.check_checkpoint.report import Statistics
from nanlocator.check_checkpoint.sources import File, Source, UnreadError
from nanlocator.check_checkpoint.stored import Part, StoredTensor, Time

__all__ = ["BLOCK", "Plan", "can_be_bad"]

BLOCK = 4 << 20  # bytes
# Reading a block from the page cache takes about as long as scanning it: two threads are as fast as a mere
# read by one. More would only help file systems that answer slowly.
_THREADS = min(2, os.cpu_count() or 1)
_LARGEST_GAP = 64 << 10  # bytes between two tensors that are read rather than skipped
_MOST_READS = 8  # of a file's size; more are views of one memory that are larger than it together
_CONVERTED = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")  # the scan has no such types
    if hasattr(torch, name)
)


def can_be_bad(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@dataclass(eq=False, slots=True)
class _Whole:
    """A tensor and what is known of it."""

    tensor: StoredTensor
    parts: int = 0  # that were not read yet
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(eq=False, slots=True)
class _PartRead:
    """A part that is read once, though several tensors may share it."""

    part: Part
    wholes: list[_Whole]
    pieces: int = 0  # that were not read yet
    statistics: Statistics = field(default_factory=Statistics)
    unread: str = ""


@dataclass(slots=True)
class _Piece:
    """Of a part, at most a block. Without sizes: all elements of its bytes, in the order of memory."""

    of: _PartRead
    offset: int  # byte in the source
    first: int  # the first element's distance from the part's first, in memory
    length: int  # bytes
    sizes: tuple[int, ...] | None


@dataclass(slots=True)
class _Block:
    source: Source
    offset: int
    length: int
    pieces: list[_Piece]
    mapping: mmap.mmap | None = None
    problem: str = ""


Take = Callable[[StoredTensor, Statistics], None]


class Plan:
    """What is to be read, in the order of the files. ``bytes``: of the tensors' elements."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self._empty: list[_Whole] = []
        self._left: dict[Source, int] = {}  # pieces, by the sources in the order of their appearance
        pieces = [piece for part in self._parts_of(tensors) for piece in _pieces_of(part)]
        for piece in pieces:
            self._left[piece.of.part.source] += 1
        self.bytes = sum(piece.length for piece in pieces)
        self._blocks = _blocks(pieces)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_over = False

    def measure(self, take: Take, count: Callable[[int], None], keep_on: Time, *, maps_files: bool) -> None:
        """Calls ``take`` with each tensor's statistics as soon as all of its parts were read; its
        ``unread`` is set before if a part could not be. ``count`` receives the bytes of each block. Both
        are called by one of the threads at a time. An error of ``keep_on``, which this thread calls, too,
        passes through: the tensors that were not taken were not read."""
        for whole in self._empty:
            take(whole.tensor, whole.statistics)
        # Daemons: a read from a file system that does not answer may never return.
        threads = [
            threading.Thread(
                target=self._work,
                args=(take, count, keep_on, maps_files),
                name="nanlocator checkpoint reader",
                daemon=True,
            )
            for _ in range(_THREADS)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    keep_on()
                    thread.join(0.1)
        finally:
            self._is_over = True
        if self._error is not None:
            raise self._error

    def _parts_of(self, tensors: Iterable[StoredTensor]) -> list[_PartRead]:
        """In the order of the files. Equal parts, of tied weights, are one."""
        found: dict[tuple[object, ...], _PartRead] = {}
        bytes_of: dict[Source, int] = {}
        for tensor in tensors:
            whole = _Whole(tensor)
            for part in tensor.parts:
                if part.span == 0:
                    continue
                key = (part.source, part.offset, part.dtype, part.sizes, part.strides, part.at)
                if key not in found:
                    total = bytes_of.get(part.source, 0) + part.span_bytes
                    if total > _MOST_READS * part.source.size:
                        tensor.unread = "one of views of the same memory that are larger than it together"
                        continue
                    bytes_of[part.source] = total
                    self._left.setdefault(part.source, 0)
                    found[key] = _PartRead(part, [])
                found[key].wholes.append(whole)
                whole.parts += 1
            if whole.parts == 0:
                self._empty.append(whole)
        order = {source: number for number, source in enumerate(bytes_of)}
        return sorted(found.values(), key=lambda each: (order[each.part.source], each.part.offset))

    def _work(self, take: Take, count: Callable[[int], None], keep_on: Time, maps_files: bool) -> None:
        buffer = mmap.mmap(-1, BLOCK)
        try:
            while (block := self._next(maps_files)) is not None:
                keep_on()
                seen = _scan(block, buffer)
                with self._lock:
                    if self._is_over:
                        return
                    count(sum(piece.length for piece in block.pieces))
                    self._finish(block, seen, take)
        except BaseException as error:
            self._error = self._error or error
            self._is_over = True

    def _next(self, maps_files: bool) -> _Block | None:
        with self._lock:
            block = None if self._is_over else next(self._blocks, None)
            if block is not None and isinstance(block.source, File):
                try:
                    block.source.open()
                except UnreadError as error:
                    block.problem = f"{block.source.label} {error}"
                # The scan needs aligned elements.
                if maps_files and all(
                    each.offset % each.of.part.dtype.itemsize == 0 for each in block.pieces
                ):
                    block.mapping = block.source.map()
            return block

    def _finish(self, block: _Block, seen: list[Statistics], take: Take) -> None:
        for piece, statistics in zip(block.pieces, seen, strict=True):
            part = piece.of
            part.statistics.add(statistics)
            part.unread = part.unread or block.problem
            part.pieces -= 1
            if part.pieces > 0:
                continue
            for whole in part.wholes:
                whole.statistics.add(part.statistics)
                if part.part.at and part.part.sizes[:1] == (1,) and len(part.part.sizes) > 1:
                    layers, layer = whole.statistics.layers, part.part.at[0]
                    layers[layer] = max(layers.get(layer, 0.0), part.statistics.absmax)
                whole.tensor.unread = whole.tensor.unread or part.unread
                whole.parts -= 1
                if whole.parts == 0:
                    take(whole.tensor, whole.statistics)
        self._left[block.source] -= len(block.pieces)
        if self._left[block.source] == 0 and isinstance(block.source, File):
            block.source.close()


def _pieces_of(of: _PartRead) -> Iterator[_Piece]:
    part = of.part
    item = part.dtype.itemsize
    if part.is_dense_or_overlaps:
        step = BLOCK // item
        for first in range(0, part.span, step):
            of.pieces += 1
            yield _Piece(of, part.offset + first * item, first, min(step, part.span - first) * item, None)
        return
    # With gaps: divided at the outermost dimension until a piece fits.
    waiting = [(0, part.sizes)]
    while waiting:
        first, sizes = waiting.pop()
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, part.strides, strict=True))
        if span * item <= BLOCK:
            of.pieces += 1
            yield _Piece(of, part.offset + first * item, first, span * item, sizes)
            continue
        outer = max(
            (d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: (sizes[d] - 1) * part.strides[d]
        )
        half = sizes[outer] // 2
        rest = (*sizes[:outer], sizes[outer] - half, *sizes[outer + 1 :])
        waiting.append((first + half * part.strides[outer], rest))
        waiting.append((first, (*sizes[:outer], half, *sizes[outer + 1 :])))


def _blocks(pieces: list[_Piece]) -> Iterator[_Block]:
    block: _Block | None = None
    for piece in pieces:
        source, item = piece.of.part.source, piece.of.part.dtype.itemsize
        if block is not None:
            begin = piece.offset - block.offset
            end = max(block.length, begin + piece.length)
            gap = begin - block.length
            if (
                block.source is source
                and 0 <= begin
                and begin % item == 0  # the scan needs aligned elements
                and gap <= _LARGEST_GAP
                and end <= BLOCK
            ):
                block.length = end
                block.pieces.append(piece)
                continue
            yield block
        block = _Block(source, piece.offset, piece.length, [piece])
    if block is not None:
        yield block


def _scan(block: _Block, buffer: mmap.mmap) -> list[Statistics]:
    """Of each piece. If the block cannot be read, ``block.problem`` says why."""
    base = 0
    if block.mapping is not None:
        buffer = block.mapping
    elif not block.problem:
        base = block.offset
        try:
            block.source.read_into(memoryview(buffer)[: block.length], block.offset)
        except UnreadError as error:
            block.problem = f"{block.source.label} {error}"
    if block.problem:
        return [Statistics() for _ in block.pieces]
    views = [_view(piece, buffer, piece.offset - base) for piece in block.pieces]
    return [
        Statistics.of(seen, _index(piece, seen.first_bad // (2 if piece.of.part.dtype.is_complex else 1)))
        for piece, seen in zip(block.pieces, _C.scan(views), strict=True)
    ]


def _view(piece: _Piece, buffer: mmap.mmap, offset: int) -> torch.Tensor:
    part = piece.of.part
    view = torch.frombuffer(
        buffer, dtype=part.dtype, count=piece.length // part.dtype.itemsize, offset=offset
    )
    if piece.sizes is not None:
        view = view.as_strided(piece.sizes, part.strides)
    if part.dtype in _CONVERTED:
        return view.float()
    return view if can_be_bad(part.dtype) else view.double()


def _index(piece: _Piece, position: int) -> tuple[int, ...] | None:
    """The index in the whole tensor of an element of the piece, counted in row-major order, or in the order
    of memory if it is flat."""
    if position < 0:
        return None
    part = piece.of.part
    memory = piece.first
    if piece.sizes is None:
        memory += position
    else:
        for size, stride in zip(reversed(piece.sizes), reversed(part.strides), strict=True):
            memory += position % size * stride
            position //= size
    index = [0] * len(part.sizes)
    for d in sorted(range(len(index)), key=lambda d: -part.strides[d]):
        if part.sizes[d] > 1 and part.strides[d] > 0:
            index[d] = min(memory // part.strides[d], part.sizes[d] - 1)
            memory -= index[d] * part.strides[d]
    if part.at:
        index = [here + there for here, there in zip(index, part.at, strict=True)]
    return tuple(index)
