"""What ranks hand to each other: crossings of process groups, shown to the engine before and after.

The methods of ``ProcessGroup`` are wrapped on the class while a forward-backward pass is watched. That also
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
from nanlocator.exchange import buffer_broadcasts as broadcasts
from nanlocator.exchange.collectives import COLLECTIVES, Collective, FollowedWork, name_of
from nanlocator.exchange.functional_collectives import FunctionalCollectives
from nanlocator.hooks import points
from nanlocator.hooks.patches import Layer, Maker, Patches

Tensors = list[torch.Tensor]
Arguments = tuple[Any, ...]


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
            the first name counts. None: every one that this process uses, by the name of its mesh dimension
            or its description; what they exchange outside of ``watching`` is counted, too, as members may
            enter it at different places.
        modules: that are named as the place of what crosses in them, by these names.
        unwatched: names of groups whose members exchange activations without ProcessGroup, too.
        reads_gathered: what is gathered is scanned where it arrives, too, which costs as many reads as
            the group has members; where it is sent it always is.
        threads: for the scan of a bad tensor in host memory.
    """

    def __init__(
        self,
        groups: Iterable[tuple[str, ProcessGroup]] | None,
        modules: Iterable[tuple[str, torch.nn.Module]] = (),
        unwatched: Collection[str] = (),
        *,
        reads_gathered: bool = False,
        threads: int | None = None,
    ) -> None:
        self.watch = _C.BoundaryWatch(threads or torch.get_num_threads())
        self._follows_all = groups is None
        self._reads_gathered = reads_gathered
        self._is_scanning = False
        self._groups: dict[int, _WatchedGroup | None] = {}  # by id, which nobody else's is meanwhile
        self._stand_ins: dict[int, _WatchedGroup] = {}  # of messages
        self._unwatched: list[ProcessGroup] = []  # that were found, and are kept as the others are
        for name, group in groups or ():
            self.add_group(name, group)
            if name in unwatched:
                self.has_unseen(group)
        self._crossings = Patches(__name__)  # of the passes that are watched
        # Where a set is given: the (group, operator) of what is seen in the passes that begin from then on.
        self.exchanges: set[tuple[str, str]] | None = None
        self._is_removed = False
        self._functional: FunctionalCollectives | None = None
        self._patches = Patches(__name__)
        for name, module in modules:
            self._patches.wrap(points.MODULE_FORWARD, self._named_forward(name), of=module)
        if self._follows_all:
            self._install()
            self._functional = FunctionalCollectives(self)
            self._patches.on_removal(self._functional.remove)
            broadcasts.follow_broadcasts(self._patches, self._begin_broadcast)

    def add_group(self, name: str, group: ProcessGroup) -> "_WatchedGroup":
        """Unless it is watched already."""
        watched = self._groups.get(id(group))
        if watched is None:
            watched = self._groups[id(group)] = _WatchedGroup(name, group, self.watch)
            self._stand_ins |= _stand_ins(watched)
        return watched

    def begin_step(self) -> None:
        """Forgets the step before."""
        self.watch.begin_step()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches this process's crossings inside it."""
        if self._is_removed or self._is_scanning:
            yield
            return
        self._is_scanning = True
        if not self._follows_all:
            self._install()
        try:
            yield
        finally:
            self._is_scanning = False
            if self._functional is not None:
                self._functional.forget()
            if not self._follows_all:
                self._uninstall()

    @contextlib.contextmanager
    def transferring(self, owner: str, *, reduces_gradients: bool) -> Iterator[None]:
        """Around a framework's own collectives: weights of the module ``owner`` that are gathered, or their
        gradients that are reduced."""
        self.watch.enter_transfer(_C.ModulePath(owner), reduces_gradients)
        try:
            yield
        finally:
            self.watch.leave_transfer()

    def collect(self, iteration: int) -> tuple[list[_C.Sighting], list[_C.CrossingCoverage]]:
        """What was bad since ``begin_step``, in execution order, and how much was scanned. Waits for the
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

    def has_unseen(self, group: ProcessGroup) -> None:
        """Its members exchange something that is not seen here, too."""
        if (watched := self._watched(group)) is not None and not watched.has_unseen:
            watched.has_unseen = True
            self.watch.has_unwatched(watched.number)

    def missed_a_pass(self) -> None:
        """What crossed in a step was counted only: nothing of it was scanned."""
        for watched in self._groups.values():
            if watched is not None:
                self.has_unseen(watched.group)

    # Of collectives that do not pass through ProcessGroup's methods.

    def _begin_broadcast(
        self, group: ProcessGroup, sent: Tensors | None, received: Tensors
    ) -> Callable[[], None]:
        crossing = self.begin_collective(group, broadcasts.OPERATOR, sent, has_unseen_backward=False)
        if crossing is None:
            return lambda: None
        return functools.partial(self.end_collective, crossing, received)

    def begin_collective(
        self, group: ProcessGroup, operator: str, sent: Any, *, has_unseen_backward: bool
    ) -> int | None:
        watched = self._watched(group)
        if watched is None:
            return None
        if has_unseen_backward:
            self.has_unseen(group)
        if self._is_scanning:
            return self.watch.begin_collective(watched.number, operator, sent)
        self.watch.skip_collective(watched.number)
        return None

    def end_collective(self, crossing: int, received: Any) -> None:
        self.watch.finish(crossing, received)

    def _watched(self, group: ProcessGroup) -> "_WatchedGroup | None":
        watched = self._groups.get(id(group))
        if watched is None and self._follows_all and id(group) not in self._groups:
            return self._found(group)
        return watched

    def _watched_by_messages(self, group: ProcessGroup) -> "_WatchedGroup | None":
        return self._stand_ins.get(id(group)) or self._watched(group)

    def _found(self, group: ProcessGroup) -> "_WatchedGroup | None":
        """Under a name of its own among those of the same members, as these count together."""
        try:
            members = dist.get_process_group_ranks(group)
        except (RuntimeError, KeyError, ValueError):  # torch.distributed has not made it
            members = []
        if len(members) < 2:
            self._groups[id(group)] = None
            self._unwatched.append(group)
            return None
        name = name_of(group)
        taken = {each.name for each in self._groups.values() if each is not None and each.members == members}
        if not name or name in taken:
            name = f"{name} {group.group_name}".lstrip()
        return self.add_group(name, group)

    def _install(self) -> None:
        operators = {"send": "send", "recv": "recv"}
        makers: dict[str, Maker] = {
            "send": self._watched_send,
            "recv": self._watched_receive,
            "recv_anysource": self._lost_receive,
            "_start_coalescing": self._watched_start,
            "_end_coalescing": self._watched_end,
        }
        for name, collective in COLLECTIVES.items():
            operators[name] = collective.op
            makers[name] = functools.partial(self._watched_collective, collective)
        for name, make in makers.items():
            if self.exchanges is not None and name in operators:
                make = self._noting(operators[name], self.exchanges, make)
            self._crossings.wrap(points.PROCESS_GROUP[name], make)

    @property
    def lost(self) -> list[str]:
        """What is not seen with this torch, for a verdict's coverage."""
        functional = self._functional.lost if self._functional is not None else []
        methods = [
            point.note()
            for point in points.PROCESS_GROUP.values()
            if "exchange.boundaries" in point.needed_by and point.state() is points.State.LOST
        ]
        return [*dict.fromkeys([*methods, *self._patches.lost, *functional])]

    def _noting(self, operator: str, exchanges: set[tuple[str, str]], make: Maker) -> Maker:
        def noting(inner: Callable[..., Any]) -> Layer:
            layer = make(inner)

            def noted(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
                if (watched := self._watched_by_messages(group)) is not None:
                    exchanges.add((watched.name, operator))
                return layer(group, args, kwargs)

            return noted

        return noting

    def _uninstall(self) -> None:
        self._crossings.remove()

    def _watched_collective(self, collective: Collective, inner: Callable[..., Any]) -> Layer:
        watch, groups = self.watch, self._groups
        op, sent, received, root = collective.op, collective.sent, collective.received, collective.root
        needed = max(sent, received, root or 0)
        is_scanned_on_arrival = self._reads_gathered or not collective.is_gather

        def method(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            key = id(group)
            watched = groups[key] if key in groups else self._watched(group)
            if watched is None:
                return inner(group, *args, **kwargs)
            if not self._is_scanning:
                watch.skip_collective(watched.number)
                return inner(group, *args, **kwargs)
            if len(args) <= needed:
                # Tensors by keyword, as nobody passes them: counted like the other members do, and left
                # unfinished, so that the coverage does not claim it.
                watch.begin_collective(watched.number, op, None)
                return inner(group, *args, **kwargs)
            inputs, outputs = args[sent], args[received] if is_scanned_on_arrival else None
            if root is not None and not watched.is_root(args[root]):
                inputs = None if collective.only_root_sends else inputs
                outputs = None if collective.only_root_receives else outputs
            crossing = watch.begin_collective(watched.number, op, inputs)
            return watched.observed(inner(group, *args, **kwargs), crossing, outputs)

        return method

    def _watched_send(self, inner: Callable[..., Any]) -> Layer:
        watch = self.watch

        def send(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            tensors, to, *_ = args
            watched = self._watched_by_messages(group)
            if watched is not None and (peer := watched.peer(to)) is not None:
                if self._is_scanning:
                    watch.send(watched.number, peer, tensors)
                else:
                    watch.skip_message(watched.number, peer, is_received=False)
            return inner(group, *args, **kwargs)

        return send

    def _watched_receive(self, inner: Callable[..., Any]) -> Layer:
        watch = self.watch

        def recv(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            tensors, source, *_ = args
            watched = self._watched_by_messages(group)
            if watched is None or watched.loses_messages or (peer := watched.peer(source)) is None:
                return inner(group, *args, **kwargs)
            if not self._is_scanning:
                watch.skip_message(watched.number, peer, is_received=True)
                return inner(group, *args, **kwargs)
            crossing = watch.begin_receive(watched.number, peer)
            return watched.observed(inner(group, *args, **kwargs), crossing, tensors)

        return recv

    def _lost_receive(self, inner: Callable[..., Any]) -> Layer:
        """Whose message it was is not known: the next ones of each sender cannot be numbered any more."""

        def recv_anysource(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            if (watched := self._watched_by_messages(group)) is not None:
                watched.loses_messages = True
                self.has_unseen(group)
            return inner(group, *args, **kwargs)

        return recv_anysource

    def _watched_start(self, inner: Callable[..., Any]) -> Layer:
        def start(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            result = inner(group, *args, **kwargs)
            if self._is_scanning and (watched := self._watched_by_messages(group)) is not None:
                watched.coalesced = []
            return result

        return start

    def _watched_end(self, inner: Callable[..., Any]) -> Layer:
        def end(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            work = inner(group, *args, **kwargs)
            watched = self._watched_by_messages(group)
            if watched is None or watched.coalesced is None:
                return work
            crossings, watched.coalesced = watched.coalesced, None
            return _observed(work, crossings, self.watch)

        return end


def _stand_ins(watched: "_WatchedGroup") -> "dict[int, _WatchedGroup]":
    """Two pipeline stages of Megatron-Core send one way through the group of all ranks, so that both ways
    overlap (p2p_communication.py, _p2p_ops). Each pair of ranks sees one group per direction: these messages
    count as the pipeline group's."""
    world = dist.group.WORLD
    if watched.name != "pp" or len(watched.members) != 2 or world is None or world is watched.group:
        return {}
    return {id(world): watched.through(world)}


class _WatchedGroup:
    """A process group, and what the engine calls it."""

    def __init__(self, name: str, group: ProcessGroup, watch: _C.BoundaryWatch) -> None:
        self.name = name
        self.group = group  # keeps its id from being another's
        self.watch = watch
        self.members = dist.get_process_group_ranks(group)
        self.number = watch.add_group(name, self.members)
        self.loses_messages = False
        self.has_unseen = False
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


def _observed(work: Any, crossings: _Crossings, watch: _C.BoundaryWatch) -> Any:
    """Scans what has arrived once it has been waited for."""
    scan = functools.partial(_finish, crossings, watch)
    if work is not None:
        return FollowedWork(work, scan)
    scan()  # complete already, as far as the current stream can see
    return None


def _finish(crossings: _Crossings, watch: _C.BoundaryWatch) -> None:
    for crossing, received in crossings:
        watch.finish(crossing, received)
