"""Files into which a re-run of a step writes: what a module keeps in them, a count of its calls or a cache,
is not restored."""

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from nanlocator.state.closures import LIBRARIES

_MOST_NAMED = 4
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_current: "WrittenFiles | None" = None  # the one whose step is re-run; an audit hook cannot be removed
_has_hook = False


class WrittenFiles:
    """A state (nanlocator.step.StepState). Between ``restore``, which comes before each pass, and ``leave``,
    the files that the program's own code opens for writing on this thread are noted; from the second pass
    on ``restore`` raises RuntimeError with their names. Files that a library opens, such as a compiler's
    cache, do not count."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._thread = 0

    def save(self) -> None:
        pass

    def restore(self) -> None:
        global _current
        _add_hook()
        _current, self._thread = self, threading.get_ident()
        if self._names:
            raise RuntimeError(", ".join(list(self._names)[:_MOST_NAMED]))

    def leave(self) -> None:
        """After the last re-run."""
        global _current
        _current = None
        self._names.clear()

    def note(self, path: Any, frame: FrameType | None) -> None:
        is_named = isinstance(path, str | bytes | os.PathLike)
        if is_named and threading.get_ident() == self._thread and _is_of_program(frame):
            self._names[os.fsdecode(path)] = None


def _add_hook() -> None:
    global _has_hook
    if not _has_hook:
        _has_hook = True
        sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _current is None:
        return
    path, mode, flags = arguments
    is_writing = any(each in mode for each in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
    if is_writing:
        _current.note(path, sys._getframe(1))


def _is_of_program(frame: FrameType | None) -> bool:
    """Whether the first code that is not Python's own is the program's."""
    for package in _packages(frame):
        if package not in sys.stdlib_module_names:
            return package not in LIBRARIES
    return False


def _packages(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back
