"""A re-run that waits for what the loop gave its calls in the first pass: an item of a queue, a lock that the
loop holds now. It would wait for ever, in a job that somebody could have restarted."""

import contextlib
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
_BETWEEN_LOOKS = 0.5
_SIGNAL = signal.SIGURG  # ignored by default, so that a late one does no harm

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WAITING = tuple(
    os.path.join(sysconfig.get_path("stdlib"), name)
    for name in ("threading.py", "queue.py", f"multiprocessing{os.sep}")
)


class BlockedRerunError(RuntimeError):
    pass


@contextlib.contextmanager
def not_blocked() -> Iterator[None]:
    """Ends the block with BlockedRerunError once its thread has stood still for some time, in code that waits
    for another thread or process. With several ranks only where the standard library waits: the program's
    own line may wait for a peer. Only on the main thread, which alone gets signals, and only if the program
    does not use SIGURG itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        yield
        return
    watch = _Watch(threading.get_ident())
    signal.signal(_SIGNAL, watch.interrupt)
    watch.start()
    try:
        yield
    finally:
        try:
            watch.stop()
        finally:
            signal.signal(_SIGNAL, signal.SIG_DFL)


class _Watch(threading.Thread):
    """Looks at the thread ``watched`` from beside it."""

    def __init__(self, watched: int) -> None:
        super().__init__(name="nanlocator re-run", daemon=True)
        self._watched = watched
        self._clock = time.pthread_getcpuclockid(watched)
        self._is_over = threading.Event()
        self._sending = threading.Lock()
        self._place = ""

    def stop(self) -> None:
        """After it, no signal is sent."""
        self._is_over.set()  # the handler of one that is on its way does nothing
        with self._sending:
            pass

    def interrupt(self, *_: object) -> None:
        """The signal's handler, on the watched thread."""
        if self._place and not self._is_over.is_set():
            raise BlockedRerunError(
                f"it stood still at {self._place} for {_PATIENCE:.0f} s, as for something that the program "
                "had only once"
            )

    def run(self) -> None:
        before, since = (0, 0, 0.0), time.monotonic()
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
            elif time.monotonic() - since > _PATIENCE:
                self._place = _place_of(frame)
                with self._sending:
                    if not self._is_over.is_set():
                        signal.pthread_kill(self._watched, _SIGNAL)
                since = time.monotonic()
            del frame  # with what the re-run computes


def _may_wait(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(_WAITING):
        return True
    return not is_distributed() and not file.startswith((_OWN, _TORCH))


def _place_of(frame: FrameType) -> str:
    """The program's line."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith((*_WAITING, _TORCH, _OWN)):
        caller = caller.f_back
    caller = caller or frame
    return f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
