"""The connection between the ranks, and how a process takes leave of the others."""

import atexit
import datetime
import os
import weakref
from typing import Any

import torch.distributed as dist

from nanlocator import _C
from nanlocator.engine.endings import ending_error, first_line, is_failure_of_peers
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.this_rank import is_distributed


class RankConnection:
    """The group that reduces the flag and the Store that carries ledgers; closed with ``close``.

    The group is one of our own, so that the flag never disturbs the sequence of the framework's
    collectives. Its time-out is training's, not gather_deadline: in a healthy job a rank may reach the flag
    minutes after the others, for instance after writing a checkpoint.
    """

    _installed = 0  # installs of this process, the same on all ranks: keeps Store keys apart

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
        # weakref's own is not called in a process of multiprocessing's (Python 3.13).
        self._goodbye.atexit = False
        atexit.register(self._goodbye)

    def close(self) -> None:
        self._goodbye()
        atexit.unregister(self._goodbye)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def connect(options: _C.LocatorOptions) -> RankConnection | None:
    """None for a process by itself. Collective."""
    return RankConnection(options.gather_deadline) if is_distributed() else None


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """None, the backend's default, where no backend of the group says."""
    backends = [group._get_backend(device) for device in group._device_types]
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    return max((each._timeout for each in options if hasattr(each, "_timeout")), default=None)


def _say_goodbye(communicator: _C.Communicator, gather_deadline: datetime.timedelta, process: int) -> None:
    """At the interpreter's exit, or when the connection is no longer needed. A process that an exception
    ends says so: its peers, which may wait for it in a collective, then know why it does not come. One that
    a peer's end has ended leaves the word to that peer, or waits until its silence is noticed: where all that
    are left end at once, nobody else would say whose end it was."""
    if os.getpid() != process:
        return  # a forked worker, which has none of our threads
    error = ending_error()
    if error is None or isinstance(error, NonFiniteGradientError | KeyboardInterrupt):
        communicator.leave()
    elif is_failure_of_peers(error):
        communicator.wait_for_loss(gather_deadline)
        communicator.leave()
    else:
        communicator.leave(first_line(error))
