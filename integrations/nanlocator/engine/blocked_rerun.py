"""A re-run that waits for what the loop gave its calls in the first pass: an item of a queue, a lock that the
loop holds now, a line that polls. It would wait for ever, in a job that somebody could have restarted."""

import contextlib
import math
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch

from nanlocator.engine.this_rank import is_distributed

_PATIENCE = 30.0  # seconds without a step of Python and without processor time
_LONGEST = 300.0  # seconds of a re-run, of one rank
_TIMES = 30  # of the first pass's time, a re-run may take, which traces
_BETWEEN_LOOKS = 0.5
_SIGNAL = signal.SIGURG  # ignored by default, so that a late one does no harm

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_WAITING = tuple(_STDLIB + name for name in ("threading.py", "queue.py", f"multiprocessing{os.sep}"))


class BlockedRerunError(RuntimeError):
    pass


class _Blocked(BaseException):
    """No Exception: the program's own code may catch those."""


@contextlib.contextmanager
def not_blocked(first_pass: float = 0.0) -> Iterator[None]:
    """Ends the block with BlockedRerunError once its thread has stood still for some time, in code that waits
    for another thread or process, or has run for much longer than the first pass, which took ``first_pass``
    seconds. With several ranks only where the standard library waits: the program's own line may wait for a
    peer. Only on the main thread, which alone gets signals, and only if the program does not use SIGURG
    itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        yield
        return
    watch = _Watch(threading.get_ident(), first_pass)
    signal.signal(_SIGNAL, watch.interrupt)
    watch.start()
    try:
        yield
    except _Blocked as error:
        raise BlockedRerunError(str(error)) from None
    finally:
        try:
            watch.stop()
        finally:
            signal.signal(_SIGNAL, signal.SIG_DFL)


class _Watch(threading.Thread):
    """Looks at the thread ``watched`` from beside it."""

    def __init__(self, watched: int, first_pass: float) -> None:
        super().__init__(name="nanlocator re-run", daemon=True)
        self._watched = watched
        self._patience = max(_PATIENCE, 3 * first_pass)
        self._longest = math.inf if is_distributed() else max(_LONGEST, _TIMES * first_pass)
        self._clock = time.pthread_getcpuclockid(watched)
        self._is_over = threading.Event()
        self._sending = threading.Lock()
        self._why = ""

    def stop(self) -> None:
        """After it, no signal is sent."""
        self._is_over.set()  # the handler of one that is on its way does nothing
        with self._sending:
            pass

    def interrupt(self, *_: object) -> None:
        """The signal's handler, on the watched thread."""
        if self._why and not self._is_over.is_set():
            raise _Blocked(self._why)

    def run(self) -> None:
        before, since, begun = (0, 0, 0.0), time.monotonic(), time.monotonic()
        while not self._is_over.wait(_BETWEEN_LOOKS):
            frame = sys._current_frames().get(self._watched)
            if frame is None:
                return
            used = time.clock_gettime(self._clock)
            now = (id(frame), frame.f_lasti, used)
            is_still = now[:2] == before[:2] and used - before[2] < _BETWEEN_LOOKS / 50
            before = now
            if not is_still or not _may_wait(frame):
                since = time.monotonic()
            if time.monotonic() - since > self._patience:
                self._end(f"it stood still at {_place_of(frame)} for {self._patience:.0f} s")
                since = time.monotonic()
            elif time.monotonic() - begun > self._longest:
                self._end(f"it was still at {_place_of(frame)} after {self._longest:.0f} s")
            del frame  # with what the re-run computes

    def _end(self, why: str) -> None:
        self._why = why + ", as for something that the program had only once"
        with self._sending:
            if not self._is_over.is_set():
                signal.pthread_kill(self._watched, _SIGNAL)


def _may_wait(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(_WAITING):
        return True
    return not is_distributed() and not file.startswith((_OWN, _TORCH))


def _place_of(frame: FrameType) -> str:
    """The program's line."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith((_STDLIB, _TORCH, _OWN)):
        caller = caller.f_back
    caller = caller or frame
    return f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
