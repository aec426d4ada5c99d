"""The connection between the ranks, and how a process leaves it."""

import atexit
import datetime
import os
import time
import weakref
from typing import Any

import torch.distributed as dist

from nanlocator import _C
from nanlocator.engine.endings import ending_error, first_line, is_failure_of_peers
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.this_rank import is_distributed, log

_QUIET = 10.0  # seconds
_MOST_BETWEEN_LOOKS = 1.0


class RankConnection:
    """The group that reduces the flag and the Store that carries ledgers. ``close`` ends it.

    The group is our own, so the flag never disturbs the sequence of the framework's collectives. Its time-out
    is training's, not gather_deadline: in a healthy job a rank may reach the flag minutes after the others,
    for instance after writing a checkpoint.
    """

    _installed = 0  # number of installs in this process, the same on all ranks: keeps Store keys apart

    def __init__(self, gather_deadline: datetime.timedelta) -> None:
        RankConnection._installed += 1
        self._group: dist.ProcessGroup | None = dist.new_group(
            timeout=_timeout_of(dist.distributed_c10d._get_default_group())
        )
        store = dist.distributed_c10d._get_default_store()
        self.communicator = _C.Communicator(
            group=self._group, store=store, prefix=f"nanlocator/{RankConnection._installed}"
        )
        self._goodbye = weakref.finalize(self, _say_goodbye, self.communicator, gather_deadline, os.getpid())
        # multiprocessing's processes do not call weakref's own atexit (Python 3.13).
        self._goodbye.atexit = False
        atexit.register(self._goodbye)

    def check_same(self, what: str, value: str) -> None:
        """Raises UsageError on the ranks whose value differs from the first rank's that has come here."""
        store = dist.distributed_c10d._get_default_store()
        key = f"nanlocator/{RankConnection._installed}/{what}"
        if (first := store.compare_set(key, "", value).decode()) != value:
            raise _C.UsageError(f"{what} must be the same on all ranks: {value} here, {first} elsewhere")

    def close(self) -> None:
        self._goodbye()
        atexit.unregister(self._goodbye)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def connect(options: _C.LocatorOptions) -> RankConnection | None:
    """Returns None for a single process. Collective."""
    return RankConnection(options.gather_deadline) if is_distributed() else None


def meet(name: str, patience: datetime.timedelta) -> bool:
    """Whether all ranks call this, so that they can talk to each other: in a program that does not know of
    it, some may wait for others that come later, or never do. Exchanges keys of the Store alone. All ranks
    that call it get the same answer, those that come too late at once.

    Args:
        name: of the meeting, the same on all ranks, and never used before.
    """
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    here, outcome = f"nanlocator/meeting/{name}/here", f"nanlocator/meeting/{name}/outcome"
    if store.add(here, 1) >= size:
        return bool(store.compare_set(outcome, "", "all") == b"all")
    begun, has_said = time.monotonic(), False
    # Not `wait`, which would keep other threads from the Store.
    while not store.check([outcome]) and (waited := time.monotonic() - begun) < patience.total_seconds():
        if waited > _QUIET and not has_said:
            has_said = True
            log(
                f"waits for ranks that do not train yet ({store.add(here, 0)} of {size} do), at most "
                f"{patience.total_seconds():.0f} s"
            )
        time.sleep(min(_MOST_BETWEEN_LOOKS, waited / 4 + 0.01))  # a thousand ranks ask one Store
    return bool(store.compare_set(outcome, "", "some") == b"all")


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns None, the backend's default, if no backend of the group has a time-out."""
    backends = [group._get_backend(device) for device in group._device_types]
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    return max((each._timeout for each in options if hasattr(each, "_timeout")), default=None)


def _say_goodbye(communicator: _C.Communicator, gather_deadline: datetime.timedelta, process: int) -> None:
    """Runs at the interpreter's exit, or when the connection is no longer needed. A process that ends with an
    exception reports it, so that peers that wait for it in a collective know why it does not come. A process
    that a peer's failure has ended lets that peer report, or waits until the peer's silence is noticed: if
    all survivors left at once, none would report which rank failed."""
    if os.getpid() != process:
        return  # a forked worker does not have our threads
    error = ending_error()
    if error is None or isinstance(error, NonFiniteGradientError | KeyboardInterrupt):
        communicator.leave()
    elif is_failure_of_peers(error):
        communicator.wait_for_loss(gather_deadline)
        communicator.leave()
    else:
        communicator.leave(first_line(error))
