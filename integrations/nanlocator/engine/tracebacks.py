"""Tracebacks as the program would have them: without frames of this package, and a verdict's text once.

They are changed when an uncaught exception is printed (sys.excepthook): each frame that an exception leaves
adds itself, so frames can be taken out only at the end."""

import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CleanTracebacks:
    """Until ``remove``, uncaught exceptions of the program are printed without our frames. An error that
    arises in this package keeps them."""

    _left: ClassVar[list["CleanTracebacks"]] = []  # removed while an error was about to be printed

    def __init__(self) -> None:
        self._patches = Patches(__name__)
        while CleanTracebacks._left:
            CleanTracebacks._left.pop()._patches.remove()
        self._patches.wrap(points.EXCEPT_HOOK, _print)

    def remove(self) -> None:
        if isinstance(sys.exc_info()[1], NonFiniteGradientError):
            CleanTracebacks._left.append(self)
        else:
            self._patches.remove()


def _print(
    original: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> Any:
    is_of_program = isinstance(error, NonFiniteGradientError | KeyboardInterrupt)
    if is_of_program or not _is_own(_innermost(traceback)):
        traceback = without_own_frames(traceback)
    shown = error.as_printed() if isinstance(error, NonFiniteGradientError) else error
    return original(kind, shown.with_traceback(traceback), traceback)


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Unlinks this package's frames, and those of runpy above them. Changes ``traceback``."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    if any(_is_own(entry) for entry in entries):
        while entries and (_is_own(entries[0]) or _is_of_runpy(entries[0])):
            del entries[0]
    entries = [entry for entry in entries if not _is_own(entry)]
    following = None
    for entry in reversed(entries):
        if entry.tb_next is not following:
            entry.tb_next = following
        following = entry
    return following


def stack_of_program() -> TracebackType | None:
    """The calls that have led here, as the traceback of an error in the innermost line that is not ours."""
    traceback: TracebackType | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return without_own_frames(traceback)


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _is_own(entry: TracebackType | None) -> bool:
    return entry is not None and entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _is_of_runpy(entry: TracebackType) -> bool:
    return entry.tb_frame.f_globals.get("__name__") == "runpy"
