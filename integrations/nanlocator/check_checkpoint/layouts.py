"""What a path is: a file, a checkpoint, or a run's folder with several checkpoints; and what is in one."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanlocator.check_checkpoint import distributed, safetensors_files, torch_files
from nanlocator.check_checkpoint.report import Unread
from nanlocator.check_checkpoint.sources import File, UnreadError
from nanlocator.check_checkpoint.stored import Role, StoredTensor, Time, role_of_file

__all__ = ["Candidate", "Contents", "Run", "before", "contents", "iteration_of", "run_at"]

_TRACKER = "latest_checkpointed_iteration.txt"
_LATEST = "latest"  # DeepSpeed's
_NUMBERED = re.compile(r"(iter_|checkpoint[-_]|global_step|step[-_]?|epoch[-_]?)(\d+)")
_READ = re.compile(r".*\.(safetensors|pt|pth|bin|ckpt|pkl|pt\.tar|pth\.tar)", re.IGNORECASE)
# Files of weights that are not read. Others (configurations, tokenizers) hold none.
_KNOWN_UNREAD = re.compile(
    r".*\.(gguf|ggml|h5|hdf5|msgpack|npz|npy|onnx|zarr|nemo|orbax|tar|distcp)|\.zarray", re.IGNORECASE
)
_NO_WEIGHTS = re.compile(r"(tokenizer|sentencepiece|spm|vocab|spiece).*|.*\.json", re.IGNORECASE)
_DEEPEST, _MOST_FILES = 8, 200_000
_LONGEST_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    path: Path
    iteration: int | None


@dataclass(slots=True)
class Run:
    """``candidates``: the newest first. ``chosen``: the one that a resume would load, and ``why``."""

    candidates: list[Candidate] = field(default_factory=list)
    chosen: Candidate | None = None
    why: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Contents:
    """``tensors`` and ``numbers`` are there when `contents` returns; their elements were not read."""

    layout: str
    tensors: list[StoredTensor] = field(default_factory=list)
    numbers: list[tuple[str, torch_files.Number]] = field(default_factory=list)  # with their files
    unread: list[Unread] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0


def run_at(path: Path) -> Run | None:
    """None: the path is no folder of a run, but a checkpoint. Raises UnreadError."""
    if not path.is_dir() or _NUMBERED.fullmatch(path.name) or (path / distributed.METADATA).exists():
        return None
    tracker = _short_text(path / _TRACKER)
    numbered = _numbered(path)
    if tracker is not None:
        return _megatron_run(path, tracker, numbered)
    latest = _short_text(path / _LATEST)
    if latest is not None and not (path / "trainer_state.json").exists():
        return _deepspeed_run(path, latest, numbered)
    if numbered:
        why = f"{path} has no file that names the latest: the highest number of {len(numbered)}"
        return Run(numbered, numbered[0], why, _beside(path))
    return _lightning_run(path)


def before(candidate: Path) -> Path | None:
    """The checkpoint before this one, among its numbered siblings."""
    own = _NUMBERED.fullmatch(candidate.name)
    if own is None:
        return None
    older = [
        each
        for each in _numbered(candidate.parent)
        if each.iteration is not None and each.iteration < int(own[2]) and each.path.name.startswith(own[1])
    ]
    return older[0].path if older else None


def iteration_of(path: Path) -> int | None:
    found = _NUMBERED.fullmatch(path.name)
    return int(found[2]) if found else None


def _numbered(path: Path) -> list[Candidate]:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise UnreadError(f"{path} cannot be listed: {error.strerror}") from error
    found = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match and (path / name).is_dir() and len(match[2]) < 19:
            found.append(Candidate(path / name, int(match[2])))
    return sorted(found, key=lambda each: (-(each.iteration or 0), each.path.name))


def _short_text(path: Path) -> str | None:
    """The first line of a small text file; None if there is none."""
    if not path.exists():
        return None
    try:
        source = File(path, path.name)
        try:
            text = source.read(0, min(source.size, _LONGEST_TEXT))
        finally:
            source.close()
    except UnreadError as error:
        raise UnreadError(f"{path} {error}") from error
    return text.decode("utf-8", "replace").strip().partition("\n")[0]


def _megatron_run(path: Path, tracker: str, numbered: list[Candidate]) -> Run:
    named = "release" if tracker == "release" else f"iter_{int(tracker):07d}" if tracker.isdecimal() else None
    if named is None or len(tracker) > 18:
        raise UnreadError(f"{path / _TRACKER} names no iteration, but {tracker[:100]!r}")
    chosen = Candidate(path / named, None if named == "release" else int(tracker))
    if not chosen.path.is_dir():
        there = ", ".join(each.path.name for each in numbered[:5]) or "no checkpoint"
        raise UnreadError(f"{path / _TRACKER} names {named}, which is not there: there is {there}")
    notes = [
        f"{each.path.name} is newer than the one that {_TRACKER} names: its save may not have finished"
        for each in numbered
        if chosen.iteration is not None and (each.iteration or 0) > chosen.iteration
    ]
    return Run(numbered or [chosen], chosen, f"{_TRACKER} names it", notes)


def _deepspeed_run(path: Path, latest: str, numbered: list[Candidate]) -> Run:
    if latest != Path(latest).name or latest in ("", ".", ".."):
        raise UnreadError(f"{path / _LATEST} names a folder outside: {latest[:100]!r}")
    if not (path / latest).is_dir():
        raise UnreadError(f"{path / _LATEST} names {latest[:100]}, which is not there")
    chosen = Candidate(path / latest, iteration_of(path / latest))
    others = [each for each in numbered if each.path != chosen.path]
    return Run([chosen, *others], chosen, f"the file {_LATEST} names it")


def _lightning_run(path: Path) -> Run | None:
    """A folder of .ckpt files alone."""
    files = [each for each in path.iterdir() if each.is_file() and _READ.fullmatch(each.name)]
    if len(files) < 2 or any(each.suffix != ".ckpt" for each in files):
        return None
    files.sort(key=lambda each: -each.stat().st_mtime)
    last = next((each for each in files if each.name == "last.ckpt"), None)
    chosen = last or files[0]
    why = "ckpt_path='last' loads last.ckpt" if last else f"the newest of {len(files)} .ckpt files"
    ordered = [chosen, *(each for each in files if each != chosen)]
    return Run([Candidate(each, None) for each in ordered], Candidate(chosen, None), why)


def _beside(path: Path) -> list[str]:
    own = sorted(each.name for each in path.iterdir() if each.is_file() and _READ.fullmatch(each.name))
    if not own:
        return []
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return [f"{own[0]}{more} beside the checkpoints: not checked (give its path)"]


# --- one checkpoint -------------------------------------------------------------------------------


def contents(path: Path, keep_on: Time) -> Contents:
    """Raises UnreadError if there is no such path. Files that cannot be read are in ``unread``."""
    if not path.exists():
        raise UnreadError(f"{path}: no such file or folder")
    found = Contents(_layout_of(path))
    if not path.is_dir():
        _read_file(path, path.name, found, keep_on)
        if not found.tensors and not found.unread:
            raise UnreadError("it holds no tensors")
        return found
    for each in _files_of(path, found):
        label = str(each.relative_to(path))
        keep_on()
        if each.name == distributed.METADATA:
            prefix = label[: -len(distributed.METADATA)]
            with _Noting(found, label):
                for item in distributed.stored_tensors(each.parent, prefix, None, keep_on):
                    _add(found, item, label)
        else:
            _read_file(each, label, found, keep_on)
    _check_indexes(path, found)
    if not found.tensors and not found.unread:
        what = (
            f"the {found.files} files that were read hold no tensors" if found.files else "no file of tensors"
        )
        raise UnreadError(f"{what}: this is no checkpoint, or its save did not finish")
    return found


class _Noting:
    """Turns an UnreadError into an entry of `Contents.unread`."""

    def __init__(self, found: Contents, label: str, role: Role | None = None) -> None:
        self._found, self._label, self._role = found, label, role

    def __enter__(self) -> None:
        self._found.files += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, (UnreadError, RecursionError, MemoryError)):
            role = self._role.value if self._role else ""
            self._found.unread.append(Unread(self._label, str(error) or type(error).__name__, role))
            return True
        return False


def _add(found: Contents, item: StoredTensor | torch_files.Number, label: str) -> None:
    if isinstance(item, StoredTensor):
        found.tensors.append(item)
    else:
        found.numbers.append((label, item))


def _read_file(path: Path, label: str, found: Contents, keep_on: Time) -> None:
    role = role_of_file(path.name)
    with _Noting(found, label, role):
        source = File(path, label)
        try:
            if safetensors_files.looks_like_one(source, 0) or path.suffix == ".safetensors":
                for tensor in safetensors_files.stored_tensors(source, 0, source.size, role):
                    _add(found, tensor, label)
            elif torch_files.looks_like_one(source, 0):
                for item in torch_files.stored_tensors(source, 0, source.size, role, "", keep_on):
                    _add(found, item, label)
            elif source.size == 0:
                raise UnreadError("it is empty")
            elif role is not Role.OTHER:
                raise UnreadError("it is neither safetensors nor of torch.save")
        finally:
            source.close()


def _files_of(folder: Path, found: Contents) -> Iterator[Path]:
    """What may hold tensors, in the order of names. Links are followed, but not to a folder a second time."""
    seen: set[tuple[int, int]] = set()
    files = 0
    waiting = [(folder, 0)]
    while waiting:
        current, depth = waiting.pop()
        try:
            status = current.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            names = sorted(os.listdir(current))
        except OSError as error:
            found.unread.append(
                Unread(str(current.relative_to(folder)), f"cannot be listed: {error.strerror}")
            )
            continue
        is_distributed = distributed.METADATA in names
        if is_distributed:
            yield current / distributed.METADATA
        folders = []
        for name in names:
            each = current / name
            files += 1
            if files > _MOST_FILES:
                found.unread.append(Unread(name, f"the folder has more than {_MOST_FILES} files"))
                return
            if each.is_dir():
                if depth < _DEEPEST:
                    folders.append((each, depth + 1))
                else:
                    found.unread.append(Unread(str(each.relative_to(folder)), "too deep in the folder"))
            elif _READ.fullmatch(name) and not _NO_WEIGHTS.fullmatch(name):
                _note_link(each, folder, found)
                yield each
            elif _KNOWN_UNREAD.fullmatch(name) and not (is_distributed and name.endswith(".distcp")):
                reason = "files of this kind are not read"
                if name.endswith(".distcp"):
                    reason = f"{distributed.METADATA} is missing beside it: the save did not finish"
                found.unread.append(Unread(str(each.relative_to(folder)), reason))
        waiting.extend(reversed(folders))


def _note_link(path: Path, folder: Path, found: Contents) -> None:
    target = Path(os.path.realpath(path))  # unlike Path.resolve, for links in a circle, too
    if path.is_symlink() and not target.is_relative_to(os.path.realpath(folder)):
        found.notes.append(f"{path.relative_to(folder)} is a link to {target}")


def _check_indexes(folder: Path, found: Contents) -> None:
    """Tensors that an index names (model.safetensors.index.json) must be in the file that it names."""
    for index in sorted(folder.glob("*.index.json")):
        label = index.name
        with _Noting(found, label):
            source = File(index, label)
            try:
                weights = json.loads(source.read(0, source.size if source.size < 1 << 28 else 0))[
                    "weight_map"
                ]
                pairs = [(str(name), str(file)) for name, file in weights.items()]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UnreadError("no valid index of safetensors or torch.save files") from error
            finally:
                source.close()
            there = {(each.name, each.file) for each in found.tensors}
            unread = {each.what for each in found.unread}
            missing = [
                (name, file) for name, file in pairs if (name, file) not in there and file not in unread
            ]
            for file in sorted({file for _, file in missing}):
                names = [name for name, of in missing if of == file]
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                where = "is not there" if not (folder / file).exists() else "does not have it"
                found.unread.append(
                    Unread(f"{names[0]}{more}", f"{label} says it is in {file}, which {where}")
                )


def _layout_of(path: Path) -> str:
    """For people; nothing depends on it."""
    if not path.is_dir():
        suffix = path.suffix.lower()
        return {".safetensors": "safetensors", ".ckpt": "torch.save, Lightning"}.get(suffix, "torch.save")
    names = set(os.listdir(path))
    if distributed.METADATA in names:
        return (
            "Megatron-Core torch_dist"
            if {"common.pt", "metadata.json"} <= names
            else "torch.distributed.checkpoint"
        )
    if any(name.startswith("mp_rank_") and (path / name).is_dir() for name in names):
        return "Megatron legacy"
    if any(name.endswith("_states.pt") for name in names):
        return "DeepSpeed"
    if "trainer_state.json" in names:
        return "Hugging Face Trainer"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    return "folder"
