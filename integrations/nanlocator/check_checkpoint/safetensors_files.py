"""The tensors of a safetensors file, by the rules of its format: 8 bytes of length, a JSON header, the data.

The library's own checks (safetensors/src/tensor.rs) are made here, too, with the tensor's name: a file that
it would refuse is not called readable.
"""

import json
import math
import struct
from typing import Any

from nanlocator.check_checkpoint.sources import Source, UnreadError
from nanlocator.check_checkpoint.stored import Part, Role, StoredTensor, dtype_named, role_of_path, row_major

__all__ = ["looks_like_one", "stored_tensors"]

_LONGEST_HEADER = 100_000_000  # the library's own limit
# The format's name: bits of an element, torch's name. Without the latter no element can be NaN or Inf.
_DTYPES = {
    "F64": (64, "float64"), "F32": (32, "float32"), "F16": (16, "float16"), "BF16": (16, "bfloat16"),
    "F8_E4M3": (8, "float8_e4m3fn"), "F8_E5M2": (8, "float8_e5m2"), "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F4": (4, ""), "F6_E2M3": (6, ""), "F6_E3M2": (6, ""),
    "C64": (64, "complex64"),
    "I64": (64, "int64"), "I32": (32, "int32"), "I16": (16, "int16"), "I8": (8, "int8"),
    "U64": (64, "uint64"), "U32": (32, "uint32"), "U16": (16, "uint16"), "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
}  # fmt: skip


def looks_like_one(source: Source, begin: int) -> bool:
    if source.size < begin + 9:
        return False
    head = source.read(begin, 9)
    return head[8:] == b"{" and head[:2] != b"PK"


def stored_tensors(source: Source, begin: int, end: int, role: Role | None) -> list[StoredTensor]:
    """Raises UnreadError if nothing of the file can be trusted. A tensor that lies beyond the end of a
    truncated file is unread alone."""
    if end - begin < 8:
        raise UnreadError(f"it has {end - begin} bytes, which is no safetensors file: truncated")
    (length,) = struct.unpack("<Q", source.read(begin, 8))
    if length > _LONGEST_HEADER or begin + 8 + length > end:
        raise UnreadError(
            f"the header would have {length} bytes at byte {begin + 8}, of {end - begin}: truncated, "
            "or no safetensors"
        )
    header = _header(source.read(begin + 8, length), begin + 8)
    data = begin + 8 + length
    found = []
    for name, entry in header.items():
        if name != "__metadata__":
            found.append((name, *_entry(name, entry)))
    _require_cover([(first, last, name) for name, _, _, first, last in found], end - data)
    tensors = []
    for name, kind, shape, first, last in found:
        dtype = _DTYPES[kind][1]
        tensor = StoredTensor(name, role or role_of_path(name), dtype or kind, shape, source.label)
        tensors.append(tensor)
        if data + last > end:
            tensor.unread = f"its bytes {data + first} to {data + last} lie beyond the end {end}: truncated"
        elif dtype:
            try:
                tensor.parts = [Part(source, data + first, dtype_named(dtype), shape, row_major(shape))]
            except UnreadError as error:
                tensor.unread = str(error)
    return tensors


def _header(content: bytes, offset: int) -> dict[str, Any]:
    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        header = json.loads(content, object_pairs_hook=without_repetition)
    except (ValueError, RecursionError) as error:
        raise UnreadError(f"the header at byte {offset} is no valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise UnreadError(f"the header at byte {offset} is no JSON object")
    return header


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte in the data."""
    try:
        kind, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise UnreadError(f"the header's entry for {name} is incomplete") from error
    if kind not in _DTYPES:
        raise UnreadError(f"{name} has the unknown dtype {kind}")
    numbers = (*shape, first, last)
    if any(type(each) is not int or not 0 <= each < 1 << 63 for each in numbers) or len(shape) > 64:
        raise UnreadError(f"the header's entry for {name} has no valid shape or offsets")
    if last - first != (math.prod(shape) * _DTYPES[kind][0] + 7) // 8:
        raise UnreadError(
            f"{name}: {kind} {list(shape)} does not have the {last - first} bytes of its offsets"
        )
    return kind, shape, first, last


def _require_cover(ranges: list[tuple[int, int, str]], size: int) -> None:
    """The data are the tensors, one after the other, without holes and overlaps."""
    reached = 0
    for first, last, name in sorted(ranges):
        if first != reached:
            what = "overlaps the tensor before it" if first < reached else "leaves a hole before it"
            raise UnreadError(
                f"{name} at byte {first} of the data {what}: damaged, and safetensors refuses it"
            )
        reached = last
    if reached < size:
        raise UnreadError(
            f"{size - reached} bytes follow the last tensor: damaged, and safetensors refuses it"
        )
