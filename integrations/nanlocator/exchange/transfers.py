"""Transfers between ranks during a re-run: shown to the operator trace, or waited for at once.

torch.distributed lets a program compute while a collective or a message is in flight, and promises nothing
about memory that both use (torch.distributed's documentation, "Synchronous and asynchronous collective
operations"). Of the transfers that C++ issues by itself, DistributedDataParallel's buffers are followed; its
buckets are not, because it waits for them itself.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from nanlocator import _C
from nanlocator.exchange import buffer_broadcasts as broadcasts
from nanlocator.exchange.collectives import COLLECTIVES, Collective, FollowedWork, name_of
from nanlocator.hooks import points
from nanlocator.hooks.patches import Layer, Maker, Patches

# Seconds. A wait can be in vain: if messages cross, a peer may begin its transfer only after one of ours.
_LONGEST_WAIT = 3.0  # for one transfer
_LONGEST_IN_VAIN = 12.0  # sum over the transfers that did not end in time
_MESSAGES = {  # method: operator, is_sent
    "send": ("c10d::send", True),
    "recv": ("c10d::recv_", False),
}


class ShownTransfers:
    """Shows transfers to the operator trace from its construction until ``remove``."""

    def __init__(self) -> None:
        self._patches = Patches(__name__)
        self._coalesced: dict[int, list[_C.Transfer]] = {}  # by group, between _start_ and _end_coalescing
        self._under_way: list[_C.Transfer] = []  # those of this thread's program, ended or not
        self._named: dict[int, ProcessGroup] = {}  # by id, which is unique while the group is kept
        for name, collective in COLLECTIVES.items():
            self._wrap(name, functools.partial(self._collective, collective))
        for name, message in _MESSAGES.items():
            self._wrap(name, functools.partial(self._message, *message))
        self._wrap("_start_coalescing", self._start)
        self._wrap("_end_coalescing", self._end)
        for name in ("barrier", "monitored_barrier"):
            self._wrap(name, self._barrier)
        broadcasts.follow_broadcasts(self._patches, self._broadcast)

    def __enter__(self) -> "ShownTransfers":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        self._patches.remove()
        self._under_way.clear()

    def _wrap(self, name: str, make: Maker) -> None:
        self._patches.wrap(points.PROCESS_GROUP[name], make)

    def _collective(self, collective: Collective, inner: Callable[..., Any]) -> Layer:
        needed = max(collective.sent, collective.received)

        def method(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            if len(args) <= needed:  # tensors by keyword, which no known caller uses
                return inner(group, *args, **kwargs)
            self._name(group)
            transfer = _C.Transfer(
                collective.op,
                _C.tensors_in(args[collective.sent]),
                _C.tensors_in(args[collective.received]),
            )
            return self._followed(group, inner(group, *args, **kwargs), transfer)

        return method

    def _broadcast(
        self, group: ProcessGroup, sent: list[torch.Tensor] | None, received: list[torch.Tensor]
    ) -> Callable[[], None]:
        self._name(group)

        def end() -> None:  # not earlier: the broadcast itself reads and writes the buffers
            _C.Transfer(broadcasts.OPERATOR, sent or [], received if sent is None else []).end()

        return end

    def _name(self, group: ProcessGroup) -> None:
        if id(group) in self._named:
            return
        self._named[id(group)] = group
        if name := name_of(group):
            _C.name_process_group(group.group_name, name, dist.get_process_group_ranks(group))

    def _message(self, op: str, is_sent: bool, inner: Callable[..., Any]) -> Layer:
        def method(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            found = _C.tensors_in(args[0])
            transfer = _C.Transfer(op, found if is_sent else [], [] if is_sent else found)
            return self._followed(group, inner(group, *args, **kwargs), transfer)

        return method

    def _followed(self, group: ProcessGroup, work: Any, transfer: _C.Transfer) -> Any:
        if (coalesced := self._coalesced.get(id(group))) is not None:
            coalesced.append(transfer)  # a program can wait only for the work of _end_coalescing
            return work
        return self._until_waited_for(work, [transfer])

    def _until_waited_for(self, work: Any, transfers: list[_C.Transfer]) -> Any:
        if work is None:  # complete, as far as the current stream can see
            _end_all(transfers)
            return None
        self._under_way += transfers
        return _ShownWork(work, transfers)

    def _start(self, inner: Callable[..., Any]) -> Layer:
        def start(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            self._coalesced[id(group)] = []
            return inner(group, *args, **kwargs)

        return start

    def _end(self, inner: Callable[..., Any]) -> Layer:
        def end(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            transfers = self._coalesced.pop(id(group), [])
            return self._until_waited_for(inner(group, *args, **kwargs), transfers)

        return end

    def _barrier(self, inner: Callable[..., Any]) -> Layer:
        """A program that waits at a barrier waits for all transfers in flight."""

        def barrier(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            result = inner(group, *args, **kwargs)
            _end_all(self._under_way)
            self._under_way.clear()
            return result

        return barrier


class _ShownWork(FollowedWork):
    __slots__ = ("_transfers",)

    def __init__(self, work: Any, transfers: list[_C.Transfer]) -> None:
        super().__init__(work, lambda: _end_all(transfers))
        self._transfers = transfers

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_wait()
        return super().wait(*args, **kwargs)

    def synchronize(self) -> None:
        self._begin_wait()
        super().synchronize()

    def _begin_wait(self) -> None:
        for transfer in self._transfers:
            transfer.begin_wait()

    def get_future(self) -> Any:
        """Counts as the end of the wait, because a wait for the future is not seen."""
        self._end()
        return self._work.get_future()


def _end_all(transfers: list[_C.Transfer]) -> None:
    for transfer in transfers:
        transfer.end()


class SerialisedTransfers:
    """Waits for each transfer when it begins, from construction until ``remove``: at most three seconds each,
    without an error if it takes longer. After four such transfers it stops waiting: if a pipeline's messages
    cross, a pass would take minutes."""

    def __init__(self) -> None:
        self._patches = Patches(__name__)
        self._coalescing: set[int] = set()  # groups
        self._patience = _LONGEST_IN_VAIN
        for name in (*COLLECTIVES, *_MESSAGES, "_start_coalescing", "_end_coalescing"):
            self._patches.wrap(points.PROCESS_GROUP[name], functools.partial(self._waiting, name))

    def remove(self) -> None:
        self._patches.remove()

    def _waiting(self, name: str, inner: Callable[..., Any]) -> Layer:
        def method(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            if name == "_start_coalescing":
                self._coalescing.add(id(group))
            elif name == "_end_coalescing":
                self._coalescing.discard(id(group))
            work = inner(group, *args, **kwargs)
            if work is not None and id(group) not in self._coalescing:
                self._wait_for(work)
            return work

        return method

    def _wait_for(self, work: Any) -> None:
        longest = min(_LONGEST_WAIT, self._patience)
        end = time.monotonic() + longest
        while not work.is_completed():
            if time.monotonic() >= end:
                self._patience -= longest
                return
            time.sleep(1e-4)
