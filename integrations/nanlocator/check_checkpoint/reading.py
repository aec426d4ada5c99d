"""Streams tensors from their files through the engine's scan.

In: tensors with the places of their elements. Out: the `Statistics` of each. The files are read in order, in
blocks of at most `BLOCK` bytes, into `_BUFFERS` buffers: memory does not grow with the checkpoint. One thread reads
while the caller's scans the block before it, from the processor's cache.

Files are read and not mapped: a file system's error, or a file that somebody truncates, is an error with its
byte here, where a mapping would end the process by SIGBUS.
"""

import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from nanlocator import _C
from nanlocator.check_checkpoint.report import Statistics
from nanlocator.check_checkpoint.sources import File, Source, UnreadError
from nanlocator.check_checkpoint.stored import Part, StoredTensor, Time

__all__ = ["BLOCK", "can_be_bad", "measure"]

BLOCK = 4 << 20  # bytes
_BUFFERS = 3
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
    buffer: mmap.mmap | None = None
    problem: str = ""


def measure(
    tensors: Iterable[StoredTensor],
    take: Callable[[StoredTensor, Statistics], None],
    count: Callable[[int], None],
    keep_on: Time,
) -> None:
    """Calls ``take`` with each tensor's statistics as soon as all of its parts were read; ``tensor.unread`` is
    set before if a part could not be. ``count`` receives the bytes of each block. An error of ``keep_on``
    passes through, and the tensors that were not taken were not read."""
    parts = _parts_of(tensors, take)
    pieces = [piece for part in parts for piece in _pieces_of(part)]
    free: queue.SimpleQueue[mmap.mmap | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[_Block | BaseException | None] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(mmap.mmap(-1, BLOCK))
    # A daemon: a read from a file system that does not answer may never return.
    threading.Thread(
        target=_read, args=(_blocks(pieces), free, ready), name="nanlocator checkpoint reader", daemon=True
    ).start()
    try:
        while (block := _next(ready, keep_on)) is not None:
            if isinstance(block, BaseException):
                raise block
            if block.buffer is not None:
                if not block.problem:
                    _scan(block, block.buffer)
                free.put(block.buffer)
            count(block.length)
            for piece in block.pieces:
                _finish(piece.of, block.problem, take)
    finally:
        free.put(None)  # ends the reader


def _next(
    ready: "queue.SimpleQueue[_Block | BaseException | None]", keep_on: Time
) -> "_Block | BaseException | None":
    while True:
        keep_on()
        try:
            return ready.get(timeout=0.2)
        except queue.Empty:
            continue


def _finish(part: _PartRead, problem: str, take: Callable[[StoredTensor, Statistics], None]) -> None:
    part.unread = part.unread or problem
    part.pieces -= 1
    if part.pieces > 0:
        return
    for whole in part.wholes:
        whole.statistics.add(part.statistics)
        whole.tensor.unread = whole.tensor.unread or part.unread
        whole.parts -= 1
        if whole.parts == 0:
            take(whole.tensor, whole.statistics)


def _parts_of(
    tensors: Iterable[StoredTensor], take: Callable[[StoredTensor, Statistics], None]
) -> list[_PartRead]:
    """In the order of the files. Equal parts, of tied weights, are one."""
    found: dict[tuple[object, ...], _PartRead] = {}
    bytes_of: dict[Source, int] = {}  # in the order of appearance
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
                found[key] = _PartRead(part, [])
            found[key].wholes.append(whole)
            whole.parts += 1
        if whole.parts == 0:
            take(tensor, whole.statistics)
    order = {source: number for number, source in enumerate(bytes_of)}
    return sorted(found.values(), key=lambda each: (order[each.part.source], each.part.offset))


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


def _read(
    blocks: Iterator[_Block],
    free: "queue.SimpleQueue[mmap.mmap | None]",
    ready: "queue.SimpleQueue[_Block | BaseException | None]",
) -> None:
    last: Source | None = None
    try:
        for block in blocks:
            if last is not block.source and isinstance(last, File):
                last.close()
            last = block.source
            block.buffer = free.get()
            if block.buffer is None:
                break
            try:
                block.source.read_into(memoryview(block.buffer)[: block.length], block.offset)
            except UnreadError as error:
                block.problem = f"{block.source.label} {error}"
            ready.put(block)
        ready.put(None)
    except BaseException as error:
        ready.put(error)
    finally:
        if isinstance(last, File):
            last.close()


def _scan(block: _Block, buffer: mmap.mmap) -> None:
    views, factors = [], []
    for piece in block.pieces:
        part = piece.of.part
        count = piece.length // part.dtype.itemsize
        view = torch.frombuffer(buffer, dtype=part.dtype, count=count, offset=piece.offset - block.offset)
        if piece.sizes is not None:
            view = view.as_strided(piece.sizes, part.strides)
        factors.append(2 if part.dtype.is_complex else 1)
        if part.dtype in _CONVERTED:
            view = view.float()
        elif not can_be_bad(part.dtype):
            view = view.double()
        views.append(view)
    for piece, seen, factor in zip(block.pieces, _C.scan(views), factors, strict=True):
        piece.of.statistics.add(Statistics.of(seen, _index(piece, seen.first_bad // factor)))


def _index(piece: _Piece, position: int) -> tuple[int, ...] | None:
    """The index in the whole tensor of an element of the piece, counted in row-major order, or in the order of
    memory if it is flat."""
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
