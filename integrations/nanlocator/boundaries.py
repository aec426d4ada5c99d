"""What ranks hand to each other: crossings of process groups, shown to the engine before and after.

The methods of ``ProcessGroup`` are replaced on the class while a forward-backward pass is watched. That also
covers functions which others bound when they were imported (Megatron-Core 0.16.1, tensor_parallel/layers.py
and mappings.py). Calls of groups that are not watched pay one look-up.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from nanlocator import _C
from nanlocator.collectives import COLLECTIVES, Collective, FollowedWork
from nanlocator.patches import Patches, replace

Tensors = list[torch.Tensor]


class Boundaries:
    """What leaves and enters this rank in the passes that are watched.

        boundaries = Boundaries([("pp", group)])
        boundaries.begin_step()
        with boundaries.watching():
            forward_backward(...)
        sightings, coverage = boundaries.collect(iteration)

    Nothing waits before ``collect``; no argument and no result is changed.

    Args:
        groups: those that are watched, each under the name that ledgers give it; of one that is there twice
            the first name counts.
        modules: that are named as the place of what crosses in them, by these names.
        unwatched: names of groups whose members exchange activations without ProcessGroup, too.
        threads: for the scan of a bad tensor in host memory.
    """

    def __init__(
        self,
        groups: Iterable[tuple[str, ProcessGroup]],
        modules: Iterable[tuple[str, torch.nn.Module]] = (),
        unwatched: Collection[str] = (),
        threads: int | None = None,
    ) -> None:
        self.watch = _C.BoundaryWatch(threads or torch.get_num_threads())
        self._groups: dict[int, _WatchedGroup] = {}
        for name, group in groups:
            if id(group) not in self._groups:
                watched = self._groups[id(group)] = _WatchedGroup(name, group, self.watch)
                if name in unwatched:
                    self.watch.has_unwatched(watched.number)
        self._message_groups = {**self._groups, **self._stand_ins()}
        self._replaced: list[Callable[[], None]] = []  # what takes each off
        # Where a set is given: the (group, operator) of what is seen in the passes that begin from then on.
        self.exchanges: set[tuple[str, str]] | None = None
        self._is_removed = False
        self._patches = Patches()
        for name, module in modules:
            self._patches.wrap(module, "forward", self._named_forward(name))

    def begin_step(self) -> None:
        """Forgets the step before."""
        self.watch.begin_step()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches this process's crossings inside it. Not to be nested."""
        if not self._is_removed:
            self._install()
        try:
            yield
        finally:
            self._uninstall()

    def collect(self, iteration: int) -> "tuple[list[_C.Sighting], list[_C.CrossingCoverage]]":
        """What was bad since ``begin_step``, in execution order, and how much was looked at. Waits for the
        devices."""
        return self.watch.collect(iteration)

    def remove(self) -> None:
        """Watches no more. May be called twice, and inside ``watching``."""
        self._is_removed = True
        self._uninstall()
        self._patches.remove()

    def _named_forward(self, name: str) -> Callable[..., Any]:
        """Names what crosses in a module's forward, and in the backward of what it computes. Only modules
        that exchange something are followed: a wrapped call of every module costs 3 % of a small step."""
        path, watch = _C.ModulePath(name), self.watch

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = watch.enter(path)
            try:
                return original(*args, **kwargs)
            finally:
                watch.leave(call)

        return forward

    # The schedule's steps, which tell whose tensors are sent and received between them.

    def begin_forward(self, microbatch: int | None, chunk: int, inputs: Tensors) -> None:
        self.watch.begin_forward(microbatch, chunk, inputs)

    def end_forward(self, microbatch: int | None, chunk: int, outputs: Tensors) -> None:
        self.watch.end_forward(microbatch, chunk, outputs)

    def begin_backward(self, microbatch: int | None, chunk: int, output_grads: Tensors) -> None:
        self.watch.begin_backward(microbatch, chunk, output_grads)

    def end_backward(self, microbatch: int | None, chunk: int, input_grads: Tensors) -> None:
        self.watch.end_backward(microbatch, chunk, input_grads)

    def _stand_ins(self) -> "dict[int, _WatchedGroup]":
        """Two pipeline stages send one way through the group of all ranks, so that both ways overlap
        (p2p_communication.py, _p2p_ops). Each pair of ranks sees one group per direction: these messages
        count as the pipeline group's."""
        world = dist.group.WORLD
        for watched in self._groups.values():
            if watched.name == "pp" and len(watched.members) == 2 and world is not None:
                return {id(world): watched.through(world)}
        return {}

    def _install(self) -> None:
        operators = {"send": "send", "recv": "recv"}
        makers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
            "send": self._watched_send,
            "recv": self._watched_receive,
            "_start_coalescing": self._watched_start,
            "_end_coalescing": self._watched_end,
        }
        for name, collective in COLLECTIVES.items():
            operators[name] = collective.op
            makers[name] = lambda inner, collective=collective: self._watched_collective(collective, inner)
        for name, make in makers.items():
            inner = getattr(ProcessGroup, name, None)
            if inner is not None:
                if self.exchanges is not None and name in operators:
                    inner = self._noted(operators[name], self.exchanges, inner)
                self._replaced.append(replace(ProcessGroup, name, make(inner)))

    def _noted(
        self, operator: str, exchanges: set[tuple[str, str]], inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        groups = self._message_groups

        def noted(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if (watched := groups.get(id(group))) is not None:
                exchanges.add((watched.name, operator))
            return inner(group, *args, **kwargs)

        return noted

    def _uninstall(self) -> None:
        while self._replaced:
            self._replaced.pop()()

    def _watched_collective(self, collective: Collective, inner: Callable[..., Any]) -> Callable[..., Any]:
        groups, watch = self._groups, self.watch
        op, sent, received, root = collective.op, collective.sent, collective.received, collective.root
        needed = max(sent, received, root or 0)

        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            watched = groups.get(id(group))
            if watched is None:
                return inner(group, *args, **kwargs)
            if len(args) <= needed:
                # Tensors by keyword, as nobody passes them: counted like the other members do, and left
                # unfinished, so that the coverage does not claim it.
                watch.begin_collective(watched.number, op, None)
                return inner(group, *args, **kwargs)
            inputs, outputs = args[sent], None if collective.is_gather else args[received]
            if root is not None and not watched.is_root(args[root]):
                inputs = None if collective.only_root_sends else inputs
                outputs = None if collective.only_root_receives else outputs
            crossing = watch.begin_collective(watched.number, op, inputs)
            return watched.observed(inner(group, *args, **kwargs), crossing, outputs)

        return method

    def _watched_send(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        groups, watch = self._message_groups, self.watch

        def send(group: ProcessGroup, tensors: Tensors, to: int, *args: Any, **kwargs: Any) -> Any:
            watched = groups.get(id(group))
            if watched is not None and (peer := watched.peer(to)) is not None:
                watch.send(watched.number, peer, tensors)
            return inner(group, tensors, to, *args, **kwargs)

        return send

    def _watched_receive(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        groups, watch = self._message_groups, self.watch

        def recv(group: ProcessGroup, tensors: Tensors, source: int, *args: Any, **kwargs: Any) -> Any:
            watched = groups.get(id(group))
            if watched is None or (peer := watched.peer(source)) is None:
                return inner(group, tensors, source, *args, **kwargs)
            crossing = watch.begin_receive(watched.number, peer)
            return watched.observed(inner(group, tensors, source, *args, **kwargs), crossing, tensors)

        return recv

    def _watched_start(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            result = inner(group, *args, **kwargs)
            if (watched := self._message_groups.get(id(group))) is not None:
                watched.coalesced = []
            return result

        return start

    def _watched_end(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def end(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            work = inner(group, *args, **kwargs)
            watched = self._message_groups.get(id(group))
            if watched is None or watched.coalesced is None:
                return work
            crossings, watched.coalesced = watched.coalesced, None
            return _observed(work, crossings, self.watch)

        return end


class _WatchedGroup:
    """A process group, and what the engine calls it."""

    def __init__(self, name: str, group: ProcessGroup, watch: "_C.BoundaryWatch") -> None:
        self.name = name
        self.group = group  # keeps its id from being another's
        self.watch = watch
        self.members = dist.get_process_group_ranks(group)
        self.number = watch.add_group(name, self.members)
        self.coalesced: _Crossings | None = None  # between _start_coalescing and _end_coalescing
        self._peers = {dist.get_group_rank(group, rank): rank for rank in self.members}
        self._rank = group.rank()

    def through(self, group: ProcessGroup) -> "_WatchedGroup":
        """The same messages, where they are sent by the ranks of ``group``."""
        other = object.__new__(_WatchedGroup)
        vars(other).update(vars(self), group=group)
        other._peers = {dist.get_group_rank(group, rank): rank for rank in self.members}
        return other

    def peer(self, rank_in_group: int) -> int | None:
        """Its global rank; None for one that is no member."""
        return self._peers.get(rank_in_group)

    def is_root(self, root: Any) -> bool:
        """``root``: the method's options, or the root's rank in this group."""
        return (root if isinstance(root, int) else root.rootRank) == self._rank

    def observed(self, work: Any, crossing: int, received: Any) -> Any:
        if self.coalesced is None:
            return _observed(work, [(crossing, received)], self.watch)
        # NCCL: nothing has started yet, and only the work of _end_coalescing can be waited for.
        self.coalesced.append((crossing, received))
        return work


_Crossings = list[tuple[int, Any]]  # with the tensors that are received


def _observed(work: Any, crossings: _Crossings, watch: "_C.BoundaryWatch") -> Any:
    """Looks at what has arrived once it has been waited for."""
    look = functools.partial(_finish, crossings, watch)
    if work is not None:
        return FollowedWork(work, look)
    look()  # complete already, as far as the current stream can see
    return None


def _finish(crossings: _Crossings, watch: "_C.BoundaryWatch") -> None:
    for crossing, received in crossings:
        watch.finish(crossing, received)
