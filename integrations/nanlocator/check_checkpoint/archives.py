"""The directory of a zip archive that torch.save wrote: a whole file, or a part of one.

Only what torch writes is accepted: records that are stored, not compressed, and do not overlap. Nothing is
decompressed, so nothing grows. The layout is that of PKWARE's APPNOTE.TXT, 4.3.
"""

import struct
from dataclasses import dataclass

from nanlocator.check_checkpoint.sources import Source, UnreadError

__all__ = ["MAGIC", "Record", "read_directory"]

MAGIC = b"PK\x03\x04"
_END, _END64, _LOCATOR64, _ENTRY = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02"
_LONGEST_END = 22 + 65535  # with a comment
_MOST_DIRECTORY = 128 << 20  # some two million records
_IN_64 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    header: int  # byte of its local header in the source
    size: int
    is_stored: bool  # neither compressed nor encrypted

    def begin(self, source: Source) -> int:
        """Byte of its content."""
        if not self.is_stored:
            raise UnreadError(
                f"the record {self.name} is compressed or encrypted, which torch.save does not do"
            )
        local = source.read(self.header, 30)
        if local[:4] != MAGIC:
            raise UnreadError(f"no record of a zip archive at byte {self.header}: damaged")
        name, extra = struct.unpack_from("<HH", local, 26)
        begin: int = self.header + 30 + name + extra
        source.require(begin, self.size)
        return begin


def read_directory(source: Source, begin: int, end: int) -> dict[str, Record]:
    """The records in the archive at the bytes ``begin`` to ``end``, by name. Raises UnreadError."""
    # Nearly always without a comment; the long read is for archives with one.
    for length in (22 + 20 + 56 + 1024, _LONGEST_END):
        tail_begin = max(begin, end - length)
        tail = source.read(tail_begin, end - tail_begin)
        at = tail.rfind(_END)
        if at >= 0:
            break
    if at < 0 or at + 22 > len(tail):
        raise UnreadError(
            f"the archive's directory is missing before byte {end}: truncated, or the save was interrupted"
        )
    count, size, offset = struct.unpack_from("<HII", tail, at + 10)
    locator = at - 20
    if locator >= 0 and tail[locator : locator + 4] == _LOCATOR64:
        position = begin + struct.unpack_from("<Q", tail, locator + 8)[0]
        end64 = source.read(position, 56)
        if end64[:4] != _END64:
            raise UnreadError(f"the archive's directory is damaged at byte {position}")
        count, size, offset = struct.unpack_from("<QQQ", end64, 32)
    if size > _MOST_DIRECTORY or begin + offset + size > end:
        raise UnreadError(
            f"the archive's directory would have {size} bytes at byte {begin + offset}: damaged"
        )
    records = _entries(source.read(begin + offset, size), begin, count)
    _refuse_overlaps(records, begin + offset)
    return records


def _entries(directory: bytes, begin: int, count: int) -> dict[str, Record]:
    records: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        if directory[at : at + 4] != _ENTRY or at + 46 > len(directory):
            raise UnreadError("the archive's directory is damaged")
        flags, method = struct.unpack_from("<HH", directory, at + 8)
        stored, size = struct.unpack_from("<II", directory, at + 20)
        name_length, extra_length, comment_length = struct.unpack_from("<HHH", directory, at + 28)
        (header,) = struct.unpack_from("<I", directory, at + 42)
        name = directory[at + 46 : at + 46 + name_length].decode("utf-8", "replace")
        extra = directory[at + 46 + name_length : at + 46 + name_length + extra_length]
        size, stored, header = _wide(extra, size, stored, header)
        if name in records:
            raise UnreadError(f"the archive has two records {name}")
        is_stored = method == 0 and not flags & 1 and stored == size
        records[name] = Record(name, begin + header, stored, is_stored)
        at += 46 + name_length + extra_length + comment_length
    return records


def _wide(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """The 64-bit values of the fields that 32 bits cannot hold (APPNOTE 4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = values.pop(0) if size == _IN_64 else size
            stored = values.pop(0) if stored == _IN_64 else stored
            header = values.pop(0) if header == _IN_64 else header
        at += 4 + length
    return size, stored, header


def _refuse_overlaps(records: dict[str, Record], directory: int) -> None:
    """Else a small file could hold any number of tensors, each as large as the file."""
    in_order = sorted(records.values(), key=lambda record: record.header)
    for number, record in enumerate(in_order):
        following = in_order[number + 1].header if number + 1 < len(in_order) else directory
        if record.header + 30 + len(record.name) + record.size > following:
            raise UnreadError(
                f"the record {record.name} at byte {record.header} overlaps what follows it: damaged"
            )
