"""The tensors of a folder that torch.distributed.checkpoint wrote: .metadata, and the ranks' files.
Megatron-Core's format torch_dist is the same.

.metadata is a pickle of the classes in torch/distributed/checkpoint/metadata.py and filesystem.py. It is read
without executing it (pickles.py), and only these classes are understood: anything else is an error that names
what was found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanlocator.check_checkpoint import safetensors_files, torch_files
from nanlocator.check_checkpoint.pickles import Call, Named, Reader
from nanlocator.check_checkpoint.sources import File, Source, UnreadError
from nanlocator.check_checkpoint.stored import Part, Role, StoredTensor, Time, role_of_path

__all__ = ["METADATA", "stored_tensors"]

METADATA = ".metadata"
_PACKAGE = "torch.distributed.checkpoint."


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The fields of a dataclass of torch.distributed.checkpoint with this name."""
    function = value.function if isinstance(value, Call) else None
    if not isinstance(function, Named) or not function.module.startswith(_PACKAGE) or function.name != name:
        found = function if isinstance(function, Named) else type(value).__name__
        raise UnreadError(
            f"{METADATA} has {found} where {name} is expected: of an unknown version, or damaged"
        )
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise UnreadError(f"{METADATA} has a {name} without fields")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > 64:
        raise UnreadError(f"{METADATA} has no valid shape or offsets")
    if any(type(each) is not int or not 0 <= each < 1 << 62 for each in value):
        raise UnreadError(f"{METADATA} has no valid shape or offsets")
    return tuple(value)


class _Folder:
    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self._files: dict[str, File | UnreadError] = {}

    def file(self, name: Any) -> File:
        """A file of the folder itself: .metadata chooses the name."""
        if not isinstance(name, str) or name != Path(name).name or name in ("", "..", "."):
            shown = name[:200] if isinstance(name, str) else type(name).__name__
            raise UnreadError(f"{METADATA} names a file outside of its folder: {shown}")
        if name not in self._files:
            try:
                self._files[name] = File(self.path / name, f"{self.label}{name}")
            except UnreadError as error:
                self._files[name] = UnreadError(f"{name} {error}")
        found = self._files[name]
        if isinstance(found, UnreadError):
            raise found
        return found

    def close(self) -> None:
        for file in self._files.values():
            if isinstance(file, File):
                file.close()


def stored_tensors(
    path: Path, label: str, role: Role | None, keep_on: Time
) -> Iterator[StoredTensor | torch_files.Number]:
    """Everything that .metadata of the folder ``path`` lists. ``label``: what precedes its files' names.
    Raises UnreadError if .metadata cannot be read."""
    folder = _Folder(path, label)
    source = folder.file(METADATA)
    try:
        fields = _fields(
            Reader(source, 0, source.size, lambda each: Call(None, (each,)), keep_on).next(), "Metadata"
        )
        entries, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(stored, dict):
            raise UnreadError(f"{METADATA} lists no tensors and their files: of another storage, or damaged")
        places: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
        for key, info in stored.items():
            index = _fields(key, "MetadataIndex")
            name, offset = index["fqn"], index.get("offset")
            if not isinstance(name, str):  # hashing anything else might take any time
                raise UnreadError(f"{METADATA} has a tensor without a name")
            places[name, None if offset is None else _numbers(offset)] = _fields(info, "_StorageInfo")
        parts = 0
        for name, entry in entries.items():
            keep_on()
            if not isinstance(name, str):
                raise UnreadError(f"{METADATA} has a tensor without a name")
            if (
                isinstance(entry, Call)
                and isinstance(entry.function, Named)
                and (entry.function.name == "BytesStorageMetadata")
            ):
                yield from _object(folder, name, places.get((name, None)), role, keep_on)
            else:
                tensor = _fields(entry, "TensorStorageMetadata")
                parts += len(tensor["chunks"])
                if parts > len(places) + len(entries):  # else they could be listed over and over
                    raise UnreadError(f"{METADATA} lists more parts of tensors than it has places of")
                yield _tensor(folder, name, tensor, places, role, keep_on)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadError(f"{METADATA} is damaged: {type(error).__name__} {str(error)[:100]}") from error
    finally:
        folder.close()


def _region(folder: _Folder, info: dict[str, Any] | None) -> tuple[File, int, int]:
    if info is None:
        raise UnreadError(f"{METADATA} does not say where it is")
    if info.get("transform_descriptors"):
        raise UnreadError("it is stored transformed, such as compressed")
    file = folder.file(info["relative_path"])
    offset, length = _numbers((info["offset"], info["length"]))
    try:
        file.require(offset, length)
    except UnreadError as error:
        raise UnreadError(f"{info['relative_path']}: {error}") from error
    return file, offset, offset + length


def _object(
    folder: _Folder, name: str, info: dict[str, Any] | None, role: Role | None, keep_on: Time
) -> Iterator[StoredTensor | torch_files.Number]:
    """An object that is no tensor, but may hold some."""
    role = role or role_of_path(name)
    try:
        file, begin, end = _region(folder, info)
        yield from torch_files.stored_tensors(file, begin, end, role, name, keep_on)
    except UnreadError as error:
        yield StoredTensor(name, role, "object", (), folder.label + METADATA, unread=str(error))


def _tensor(
    folder: _Folder,
    name: str,
    entry: dict[str, Any],
    places: dict[Any, dict[str, Any]],
    role: Role | None,
    keep_on: Time,
) -> StoredTensor:
    shape = _numbers(entry["size"])
    tensor = StoredTensor(name, role or role_of_path(name), "?", shape, folder.label + METADATA)
    problems: list[str] = []
    files: dict[str, None] = {}
    for chunk in entry["chunks"]:
        keep_on()
        fields = _fields(chunk, "ChunkStorageMetadata")
        at, sizes = _numbers(fields["offsets"]), _numbers(fields["sizes"])
        info = places.get((name, at)) or (places.get((name, None)) if not any(at) else None)
        try:
            file, begin, end = _region(folder, info)
            files[file.label] = None
            found = _whole_tensor(file, begin, end, keep_on)
        except UnreadError as error:
            problems.append(f"the part at {list(at)}: {error}" if any(at) else str(error))
            continue
        tensor.dtype = found.dtype
        if found.unread:
            problems.append(found.unread)
        elif found.shape != sizes:
            problems.append(f"the part at {list(at)} has the shape {list(found.shape)}, not {list(sizes)}")
        else:
            tensor.parts += [Part(p.source, p.offset, p.dtype, p.sizes, p.strides, at) for p in found.parts]
    if problems:
        more = f" (and {len(problems) - 1} more parts)" if len(problems) > 1 else ""
        tensor.unread = problems[0] + more
    if files:
        first, *others = files
        tensor.file = first + (f" and {len(others)} more" if others else "")
    return tensor


def _whole_tensor(source: Source, begin: int, end: int, keep_on: Time) -> StoredTensor:
    """The one tensor that is stored at these bytes."""
    if safetensors_files.looks_like_one(source, begin):
        found: list[Any] = list(safetensors_files.stored_tensors(source, begin, end, Role.WEIGHTS))
    else:
        found = list(torch_files.stored_tensors(source, begin, end, Role.WEIGHTS, "", keep_on))
    if len(found) != 1 or not isinstance(found[0], StoredTensor):
        raise UnreadError(f"{source.label} has {len(found)} tensors at byte {begin}, where one is expected")
    return found[0]
