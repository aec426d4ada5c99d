"""Decides which code that a bundle names may run (docs/security.md).

A module is imported by its name, with the import path unchanged. Modules in the current folder or in the
folder of the run are refused: both may have come with the bundle. A file runs only with consent
(``--trust``), and only if root and the user alone could have written it.
"""

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import site
import stat
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanlocator import _C

_MOST_LINKS = 40  # symbolic links in one path: Linux's limit

# --- modules, by name ---


def import_named(name: str, bundle: Path) -> types.ModuleType:
    """Imports the module ``name``. Raises ModuleNotFoundError if there is none, UnsupportedError if it may
    have come with ``bundle``, and any error of the module's own code."""
    if name not in sys.modules:
        find_named(name, bundle)
    return importlib.import_module(name)


def find_named(name: str, bundle: Path) -> importlib.machinery.ModuleSpec:
    """The spec that importing ``name`` would load. Imports the packages around the module, but not itself."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise _C.UnsupportedError(f"{name!r} is not a module name")
    for depth in range(len(parts)):
        named = ".".join(parts[: depth + 1])
        spec = importlib.util.find_spec(named)  # imports the package around it, which was checked before
        if spec is None:
            raise ModuleNotFoundError(f"No module named {named!r} (the current folder is not searched)")
        found = spec
        for place in found.submodule_search_locations or [str(found.origin)]:
            if os.path.isabs(place) and not _is_installed(place):  # others are built in or have no file
                _require_elsewhere(named, place, depth, bundle)
    return found


def _require_elsewhere(name: str, place: str, depth: int, bundle: Path) -> None:
    for path in (Path(place), Path(os.path.realpath(place))):
        folder = path.parents[depth]  # the entry of the import path
        if _came_with(path, folder, bundle):
            raise _C.UnsupportedError(
                f"{name} is found at {path}, which may have come with the bundle: "
                f"remove {folder} from the import path (PYTHONPATH)"
            )
        if folder.resolve() == Path.cwd() and not _is_editable(Path.cwd()):
            raise _C.UnsupportedError(
                f"{name} is in the current folder, from which nothing is imported: "
                "change to another folder, or import it first in Python"
            )


def _came_with(path: Path, folder: Path, bundle: Path) -> bool:
    """Whether ``path`` is in the folder of the run (nanlocator_run, for nanlocator_run/a0/bundles/NAME), or,
    if the bundle has been moved out of a run, in the bundle or beside it."""
    bundle = Path(os.path.realpath(bundle))
    if bundle.parent.name != "bundles":
        return path.is_relative_to(bundle) or folder == bundle.parent
    run = bundle.parent.parent
    return path.is_relative_to(run.parent if re.fullmatch(r"a\d+", run.name) else run)


@functools.cache
def _folders_of_python() -> tuple[str, ...]:
    own = sysconfig.get_paths()
    named = [own[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*named, *site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _is_installed(place: str) -> bool:
    """Also true if the environment lies in the current folder."""
    return os.path.realpath(place).startswith(_folders_of_python())


def _is_editable(folder: Path) -> bool:
    """Whether `pip install -e` has put ``folder``, or a folder around it, on the import path. Reads only the
    metadata of distributions outside ``folder``."""
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != folder]
    for installed in importlib.metadata.distributions(path=elsewhere):
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        is_editable = origin.get("dir_info", {}).get("editable")
        if is_editable and f"{folder.as_uri()}/".startswith(f"{origin.get('url')}/"):
            return True
    return False


# --- files, with consent ---


def execute(file: Path, name: str, text: str | None = None) -> types.ModuleType:
    """Executes the Python in ``file``, or ``text`` in its place, as the module ``name``. Never loads the
    compiled file beside it."""
    file = Path.cwd() / file
    require_own(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise _C.UnsupportedError(f"{file} is not a Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # decorators look there
    exec(compile(file.read_bytes() if text is None else text, str(file), "exec"), module.__dict__)
    return module


def require_own(file: str | Path) -> None:
    """Raises UnsupportedError if anyone but root and the user could have written the file or could replace
    it. In a folder with the sticky bit, such as /tmp, others cannot replace the user's files; such a folder
    may lie above the file's own folder."""
    own = os.geteuid()
    way = list(_way_to(Path.cwd() / file))
    for place in way:
        status = os.lstat(place)
        is_link = stat.S_ISLNK(status.st_mode)  # a link's own permission bits have no effect
        is_sticky = status.st_mode & stat.S_ISVTX and place != os.path.dirname(way[-1])
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_link and not is_sticky:
            said = f"{place} is writable by group or others"
        elif status.st_uid not in (0, own):
            said = f"{place} belongs to user {status.st_uid}"
        else:
            continue
        if status.st_uid == own and not status.st_mode & stat.S_ISVTX:
            advice = f"Read the file, then run: chmod go-w {shlex.quote(place)}"
        else:
            advice = (
                "Read the file, then copy it to a folder that only you can write to, like all folders above "
                "it: for bundled source, the whole bundle; for a module, where PYTHONPATH finds it; for a "
                "library, anywhere, with --load FILE.so"
            )
        raise _C.UnsupportedError(f"{file} was not loaded, despite --trust: {said}. {advice}")


def _way_to(file: Path) -> Iterator[str]:
    """Every folder and link on the path to the file, and the file itself. Links are followed step by step."""
    waiting, place, links = list(reversed(file.parts)), "", 0
    while waiting:
        part = waiting.pop()
        path = os.path.dirname(place) if part == ".." else os.path.join(place, part)
        if os.path.islink(path):
            yield path
            links += 1
            if links > _MOST_LINKS:
                raise _C.UnsupportedError(f"{file} leads through too many symbolic links")
            waiting += reversed(Path(os.readlink(path)).parts)
        else:
            place = path
            yield place


def consent(bundle: Path, named: Sequence[tuple[str, str, str]]) -> str:
    """The end of a message about a missing module: names the code that was not loaded, each as (module, file,
    source), and how to load it."""
    roots = {module.partition(".")[0] for module, _, _ in named if not module.startswith("__")}
    missing = sorted(root for root in roots if root.isidentifier() and importlib.util.find_spec(root) is None)
    files = [file for _, file, _ in named if file and os.path.isfile(file)]
    sources = [Path(source).name for _, _, source in named if source]
    held = [f"names {', '.join(files)}"] * bool(files) + [f"contains {', '.join(sources)}"] * bool(sources)
    ways = [f"install the package that provides {', '.join(missing)}"] * bool(missing)
    if any(".so" in Path(file).name for file in files):
        ways.append("load your own copy of the library: --load FILE.so")
    if held:
        command = f"nanlocator replay {shlex.quote(str(bundle))} --trust"
        ways.append(f"if you trust where the bundle came from: {command} (in Python: trust=True)")
    if not ways:
        return ""
    said = f" The bundle {' and '.join(held)}: none of that was loaded." if held else ""
    advice = "; or ".join(ways)
    return f".{said} {advice[0].upper()}{advice[1:]}"


def line_of(error: BaseException) -> str:
    """The error's first line; it begins with the type's name unless nanlocator raised the error."""
    line = str(error).partition("\n")[0]
    return line if isinstance(error, _C.Error) else f"{type(error).__name__}: {line}"
