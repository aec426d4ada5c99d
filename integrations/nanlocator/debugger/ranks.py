"""Several ranks: a rank with a finding notifies the others through the c10d Store, without a collective.

The finding rank publishes its report, waits a moment until the others have it, and raises. On every other
rank a thread polls the Store; once it has the report, the rank raises at its next module call. A rank that
waits in a collective is ended by that collective's failure, after the finding rank's process has ended; the
error's traceback then names the finding rank, too.
"""

import contextlib
import itertools
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from nanlocator import _C
from nanlocator.engine.python_versions import add_note
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_LONGEST_REPORT = 1 << 20  # characters that are sent; the finding rank's file has all
_STORE_TIMEOUT = timedelta(seconds=10)
_TELL_DEADLINE = 5.0  # seconds beyond the polling interval; after that only the failure shows it
_ASKS_PER_SECOND = 2000  # of all ranks together, because one process serves the Store


@dataclass(frozen=True)
class Finding:
    """Published by the first rank with a bad value."""

    rank: int
    host: str
    batch: int
    what: str  # "encoder.block.2 T5Block: output has infs"
    report: str
    file: str  # on that host

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}) detected inf/nan in batch_number={self.batch}: "
            f"{self.what}. Its frames are in {self.file}"
        )


class PeerRanks:
    """The other ranks' debuggers of the same model. Every rank makes the same ones in the same order.

    Uses its own connection to the default Store, so that no other call waits for it. ``close`` ends the
    thread; so does the interpreter's exit.

    Args:
        number: of this debugger in the process; the same on all ranks.
        on_finding: called once, on the thread, when another rank has found something.
    """

    def __init__(self, number: int, on_finding: Callable[[Finding], None]) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._state = _State(
            dist.PrefixStore(f"nanlocator/transformers/{number}", _own_connection()),
            interval=max(0.2, self._size / _ASKS_PER_SECOND),
        )
        self._thread = threading.Thread(
            target=_ask_until_stopped,
            args=(self._state, on_finding),
            name="nanlocator: findings of other ranks",
            daemon=True,
        )
        self._hook = _ExceptHook(self._state)
        self._end = weakref.finalize(self, _stop, self._state, self._thread, self._hook)
        self._thread.start()

    def take_finding(self) -> Finding | None:
        """Returns another rank's finding, once. Costs nothing if there is none."""
        state = self._state
        if state.finding is None:
            return None
        with state.lock:
            finding, state.finding = state.finding, None
        return finding

    def publish(self, batch: int, what: str, report: str, file: str) -> None:
        """Notifies the others and waits until they know: a few tenths of a second, at most some seconds. The
        first rank to publish counts. Without the Store no rank can be notified."""
        finding = Finding(self._rank, socket.gethostname(), batch, what, report[-_LONGEST_REPORT:], file)
        if self.take_finding() is not None:
            return  # the others have another rank's finding, as this one has
        state = self._state
        with contextlib.suppress(RuntimeError):  # the rank that holds the Store has ended
            with state.lock:
                first, seen = state.keys()
                published = json.loads(state.store.compare_set(first, "", json.dumps(asdict(finding))))
                state.round += 1
                if published["rank"] != self._rank:
                    state.store.add(seen, 1)
                    return
            deadline = time.monotonic() + state.interval + _TELL_DEADLINE
            while state.store.add(seen, 0) < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.02)

    def close(self) -> None:
        """May be called twice."""
        self._end()


def _own_connection() -> dist.Store:
    try:
        store = _C.clone_store(dist.distributed_c10d._get_default_store())
    except (NotImplementedError, RuntimeError) as error:
        raise RuntimeError(
            "DebugUnderflowOverflow: the ranks cannot share their findings, because the Store of "
            f"torch.distributed (backend {dist.get_backend()}) allows no second connection: {error}. "
            "Initialise it with an init_method, a TCPStore or a FileStore"
        ) from error
    store.set_timeout(_STORE_TIMEOUT)
    return store


class _State:
    """Shared by the thread and its owner, which may be freed first."""

    def __init__(self, store: dist.Store, interval: float) -> None:
        self.store = store
        self.interval = interval
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.round = 0  # findings that this rank has made or received; the same on all ranks
        self.finding: Finding | None = None  # another rank's, until this one has raised

    def keys(self) -> tuple[str, str]:
        """Keys of this round: the finding, and the number of ranks that have received it."""
        return f"found/{self.round}", f"seen/{self.round}"


def _ask_until_stopped(state: _State, on_finding: Callable[[Finding], None]) -> None:
    while not state.stopped.wait(state.interval):
        try:
            with state.lock:
                found, seen = state.keys()
                if not state.store.check([found]):
                    continue
                state.finding = finding = Finding(**json.loads(state.store.get(found)))
                state.round += 1
                state.store.add(seen, 1)
        except RuntimeError:  # the rank that holds the Store has ended, and so have the others
            return
        on_finding(finding)


class _ExceptHook:
    """Adds the finding to the traceback of the exception that ends this process, because a failed collective
    does not mention it."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._patches = Patches(__name__)
        self._patches.wrap(points.EXCEPT_HOOK, self._call)

    def _call(
        self,
        previous: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        finding = self._state.finding
        if finding is not None and str(finding) not in str(error):
            add_note(error, f"nanlocator: DebugUnderflowOverflow: {finding}")
        previous(kind, error, traceback)

    def remove(self) -> None:
        self._patches.remove()


def _stop(state: _State, thread: threading.Thread, hook: _ExceptHook) -> None:
    state.stopped.set()
    if thread is not threading.current_thread():
        thread.join(_STORE_TIMEOUT.total_seconds())
    hook.remove()


_numbers = itertools.count()


def next_number() -> int:
    """Number of the next debugger of this process."""
    return next(_numbers)
