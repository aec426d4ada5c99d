"""The tensors of what torch.save wrote: the zip archives since torch 1.6, the older streams of pickles, and
single pickles. Nothing is executed: see pickles.py. What the calls in them mean is in torch/_utils.py and
torch/serialization.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanlocator.check_checkpoint import archives
from nanlocator.check_checkpoint.pickles import MOST_BYTES, Call, Named, Reader
from nanlocator.check_checkpoint.sources import Bytes, Source, UnreadError
from nanlocator.check_checkpoint.stored import (
    Part,
    Role,
    StoredTensor,
    Time,
    dtype_named,
    role_of_key,
    row_major,
)

__all__ = ["Number", "looks_like_one", "saved_object", "stored_tensors", "walk"]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_DEEPEST_FILES = 3  # bytes in a pickle that are such a file themselves: TransformerEngine's extra state
_MOST_FILES = 10_000  # of that kind, in one
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 1024
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}  # fmt: skip


@dataclass(eq=False, slots=True)
class _Storage:
    key: str
    dtype: str  # of its elements
    numel: int
    offset: int = 0  # of a view in the old format, in elements


_PLAIN = (str, int, Named, _Storage)  # hold no tensors


@dataclass(frozen=True, slots=True)
class Number:
    """A float beside an optimizer's tensors, such as a learning rate."""

    name: str
    value: float


class _Place:
    """Where the bytes of each storage are."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ranges: dict[str, tuple[int, int]] = {}  # by key: first byte and length


def looks_like_one(source: Source, begin: int) -> bool:
    return source.size >= begin + 4 and source.read(begin, 4)[:1] in (b"P", b"\x80")


def stored_tensors(
    source: Source, begin: int, end: int, role: Role | None, prefix: str, keep_on: Time, depth: int = 0
) -> Iterator[StoredTensor | Number]:
    """Raises UnreadError if nothing can be read, and at the end of a stream if it was cut off."""
    content, place = saved_object(source, begin, end, keep_on)
    yield from walk(content, place, role, prefix, keep_on, depth)


def saved_object(source: Source, begin: int, end: int, keep_on: Time) -> tuple[Any, _Place]:
    """What was saved, of dictionaries, lists, numbers, texts and Calls."""
    if source.read(begin, min(4, end - begin)) == archives.MAGIC:
        return _from_archive(source, begin, end, keep_on)
    return _from_stream(source, begin, end, keep_on)


def _persistent(identifier: Any) -> Any:
    match identifier:
        case ("storage", Named(name=kind), (str() | int()) as key, _, int(numel), *rest) if kind in _STORAGES:
            storage = _Storage(str(key), _STORAGES[kind], numel)
            if rest and isinstance(rest[0], tuple):  # the old format's views: key, offset, size
                _, storage.offset, storage.numel = rest[0]
            return storage
        case ("module", cls, *_):
            return cls
    return Call(None, (identifier,))


def _from_archive(source: Source, begin: int, end: int, keep_on: Time) -> tuple[Any, _Place]:
    records = archives.read_directory(source, begin, end)
    pickle = next((name for name in records if name.partition("/")[2] == "data.pkl"), None)
    if pickle is None:
        is_script = any(name.partition("/")[2] == "constants.pkl" for name in records)
        raise UnreadError(
            "a zip archive without data.pkl: " + ("of TorchScript" if is_script else "not of torch.save")
        )
    root = pickle.partition("/")[0]
    if any(name.startswith(f"{root}/code/") for name in records):
        raise UnreadError("an archive of TorchScript, which torch.load does not read as a checkpoint")
    if order := records.get(f"{root}/byteorder"):
        text = source.read(order.begin(source), min(order.size, 16))
        if text != b"little":
            raise UnreadError(f"its numbers are {text.decode('ascii', 'replace')}-endian")
    first = records[pickle].begin(source)
    if records[pickle].size > MOST_BYTES:
        raise UnreadError(f"its pickle has {records[pickle].size} bytes, more than {MOST_BYTES}")
    place = _ArchivePlace(source, root, records)
    return Reader(source, first, first + records[pickle].size, _persistent, keep_on).next(), place


class _ArchivePlace(_Place):
    def __init__(self, source: Source, root: str, records: dict[str, archives.Record]) -> None:
        super().__init__(source)
        self._root, self._records = root, records

    def range_of(self, key: str) -> tuple[int, int]:
        record = self._records.get(f"{self._root}/data/{key}")
        if record is None:
            raise UnreadError(f"the record {self._root}/data/{key} is missing")
        if key not in self.ranges:
            self.ranges[key] = (record.begin(self.source), record.size)
        return self.ranges[key]


class _StreamPlace(_Place):
    def range_of(self, key: str) -> tuple[int, int]:
        if key not in self.ranges:
            raise UnreadError(f"the storage {key} is missing: truncated")
        return self.ranges[key]


def _from_stream(source: Source, begin: int, end: int, keep_on: Time) -> tuple[Any, _Place]:
    place = _StreamPlace(source)
    storages: dict[str, _Storage] = {}

    def persistent(identifier: Any) -> Any:
        found = _persistent(identifier)
        if isinstance(found, _Storage):
            whole = identifier[4]
            storages.setdefault(found.key, _Storage(found.key, found.dtype, whole))
        return found

    reader = Reader(source, begin, end, persistent, keep_on)
    content = reader.next()
    if content != _LEGACY_MAGIC:
        return content, place  # a single pickle
    reader.next()  # version of the protocol
    system = reader.next()
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise UnreadError("its numbers are big-endian")
    content = reader.next()
    keys = reader.next()
    at = reader.offset
    for key in map(str, keys):
        if at + 8 > end or key not in storages:
            break  # the tensors that need it say so
        numel = int.from_bytes(source.read(at, 8), "little")
        length = numel * dtype_named(storages[key].dtype).itemsize
        if numel != storages[key].numel or at + 8 + length > end:
            break
        place.ranges[key] = (at + 8, length)
        at += 8 + length
    return content, place


# --- what the objects mean ------------------------------------------------------------------------


def walk(
    content: Any, place: Any, role: Role | None, prefix: str, keep_on: Time, depth: int = 0
) -> Iterator[StoredTensor | Number]:
    """The tensors in ``content``, in its order, under names such as "model.layers.0.weight"."""
    seen: set[int] = set()
    files = 0
    waiting: list[tuple[Any, str, Role | None, int]] = [(content, prefix, role, 0)]
    while waiting:
        keep_on()
        value, path, role, level = waiting.pop()
        if isinstance(value, float):
            if role is Role.OPTIMIZER:
                yield Number(path, value)
            continue
        if isinstance(value, Call) and value.function == Named("_codecs", "encode"):
            value = _encoded(value)
        if isinstance(value, bytes):
            if value[:4] == archives.MAGIC and depth < _DEEPEST_FILES and files < _MOST_FILES:
                files += 1
                yield from _file_in_file(bytes(value), place.source.label, role, path, keep_on, depth)
            continue
        if isinstance(value, Call) and (tensor := _tensor_in(value, path, role or Role.WEIGHTS, place)):
            yield tensor
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))  # content keeps it alive
        if isinstance(value, dict) and value.keys() >= {"state", "param_groups"} and role is None:
            role = Role.OPTIMIZER
        inner = [
            (
                each,
                _below(path, key),
                role_of_key(role, str(key), level) if isinstance(key, str) else role,
                level + 1,
            )
            for key, each in _children(value)
            if not isinstance(each, _PLAIN) and each is not None
        ]
        waiting.extend(reversed(inner))


def _encoded(call: Call) -> Any:
    """Bytes, as protocol 2 writes them."""
    match call.arguments:
        case (str() as text, "latin1" | "latin-1") if text.startswith(archives.MAGIC.decode("latin1")):
            return text.encode("latin1", "replace")
    return call.arguments


def _below(path: str, key: Any) -> str:
    if isinstance(key, tuple):
        key = f"({', '.join(map(str, key))})"
    text = str(key) if isinstance(key, (str, int, float, Named)) else "?"
    whole = f"{path}.{text}" if path else text
    return whole if len(whole) <= _LONGEST_NAME else "..." + whole[3 - _LONGEST_NAME :]


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, Call):
        if len(value.arguments) < _MOST_DIMENSIONS:
            yield from enumerate(value.arguments)
        else:  # perhaps those of many calls, to be walked through once
            yield "arguments", value.arguments
        if isinstance(value.state, dict):
            yield from value.state.items()
        elif value.state is not None:
            yield "state", value.state
        yield from enumerate(value.items)
        yield from value.pairs.items()


def _file_in_file(
    content: bytes, label: str, role: Role | None, path: str, keep_on: Time, depth: int
) -> Iterator[StoredTensor | Number]:
    try:
        source = Bytes(content, label)
        yield from stored_tensors(source, 0, source.size, role, path, keep_on, depth + 1)
    except UnreadError as error:
        yield StoredTensor(path, role or Role.WEIGHTS, "bytes", (len(content),), label, unread=str(error))


def _tensor_in(call: Call, path: str, role: Role, place: Any) -> StoredTensor | None:
    """None if the call makes no tensor, or one that is made of tensors among its arguments and its state."""
    name = str(call.function) if isinstance(call.function, Named) else ""
    arguments = call.arguments
    tensor = StoredTensor(path, role, "?", (), place.source.label)
    try:
        if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            inner = arguments[0]
            return _tensor_in(inner, path, role, place) if isinstance(inner, Call) else None
        if name == "torch._tensor._rebuild_from_type_v2":
            function, _, inner_arguments, state = arguments
            inner = Call(function, inner_arguments)
            found = _tensor_in(inner, path, role, place) if isinstance(inner_arguments, tuple) else None
            # A wrapper, such as a DTensor, keeps its tensors in its state.
            return None if found is None or (not found.parts and not found.unread and state) else found
        if name in (
            "torch._utils._rebuild_tensor",
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_qtensor",
        ):
            _fill(tensor, arguments[0], arguments[1:4], None, place)
        elif name == "torch._utils._rebuild_tensor_v3":
            _fill(tensor, arguments[0], arguments[1:4], arguments[6].name, place)
        elif name == "torch._utils._rebuild_meta_tensor_no_storage":
            tensor.dtype, tensor.shape = arguments[0].name, _shape(arguments[1])
            tensor.unread = "saved on the meta device: it has no values"
        elif _is_array(call, name):
            if role is Role.OTHER:
                return None
            tensor.unread = "a numpy array, which is not looked into"
        else:
            return None
    except UnreadError as error:
        tensor.unread = str(error)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        tensor.unread = f"unknown arguments of {name}: {error}"
    return tensor


def _is_array(call: Call, name: str) -> bool:
    """A numpy array of floating-point numbers."""
    if not name.startswith("numpy") or not name.endswith("._reconstruct"):
        return False
    state = call.state
    dtype = state[2] if isinstance(state, tuple) and len(state) > 2 else None
    kind = dtype.arguments[0] if isinstance(dtype, Call) and dtype.arguments else "f"
    return isinstance(kind, str) and kind[:1] in "fcV"


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        raise UnreadError("it has no valid shape or strides")
    shape = tuple(value)
    if any(type(each) is not int or not 0 <= each < 1 << 62 for each in shape):
        raise UnreadError("it has no valid shape or strides")
    return shape


def _fill(tensor: StoredTensor, storage: Any, view: tuple[Any, ...], dtype: str | None, place: Any) -> None:
    if isinstance(storage, Call) and storage.function == Named("torch.storage", "_load_from_bytes"):
        raise UnreadError("a tensor that was pickled without torch.save")
    if not isinstance(storage, _Storage):
        raise UnreadError("its storage is of an unknown kind")
    first, sizes, strides = view
    sizes, strides = _shape(sizes), _shape(strides)
    (first,) = _shape((first,))
    tensor.shape, tensor.dtype = sizes, dtype or storage.dtype
    if len(sizes) != len(strides):
        raise UnreadError("it has no valid shape or strides")
    kind = dtype_named(tensor.dtype)
    if math.prod(sizes) == 0:
        strides = row_major(sizes)
    begin, length = place.range_of(storage.key)
    offset = (storage.offset + first) * kind.itemsize
    part = Part(place.source, begin + offset, kind, sizes, strides)
    if offset + part.span_bytes > length:
        raise UnreadError(
            f"it reaches beyond the {length} bytes of its storage at byte {begin}: truncated or damaged"
        )
    tensor.parts = [part]
