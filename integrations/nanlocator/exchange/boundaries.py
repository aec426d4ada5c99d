"""Shows the crossings of process groups to the engine, each when it is sent and when it is received.

The methods of ``ProcessGroup`` are wrapped on the class while a forward-backward pass is watched. That also
covers functions that other modules bound at import (Megatron-Core 0.16.1, tensor_parallel/layers.py and
mappings.py). A call of an unwatched group costs one look-up.
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
    """The tensors that leave and enter this rank in watched passes.

        boundaries = Boundaries([("pp", group)])
        boundaries.begin_step()
        with boundaries.watching():
            forward_backward(...)
        sightings, coverage = boundaries.collect(iteration)

    Only ``collect`` waits; arguments and results are unchanged.

    Args:
        groups: the watched groups, each with its name in ledgers; if a group is listed twice, its first name
            counts. None means every group that this process uses, named by its mesh dimension or its
            description; their crossings outside ``watching`` are counted too, because members may enter it at
            different places.
        modules: modules by name; a crossing inside one gets that name as its place.
        unwatched: names of groups whose members also exchange activations without ProcessGroup.
        reads_gathered: also scans a gathered tensor on arrival, which costs as many reads as the group has
            members. The sent part is always scanned.
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
        self._times_counting = 0  # nested
        self._groups: dict[int, _WatchedGroup | None] = {}  # by id, which is unique while the group is kept
        self._stand_ins: dict[int, _WatchedGroup] = {}  # for messages
        self._unwatched: list[ProcessGroup] = []  # kept, so that their ids stay unique
        for name, group in groups or ():
            self.add_group(name, group)
            if name in unwatched:
                self.has_unseen(group)
        self._crossings = Patches(__name__)  # during watched passes
        # If it is a set, later passes add the (group, operator) of each crossing.
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
        """Watches ``group``, unless it is watched already."""
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
        """Watches this process's crossings inside the block."""
        if self._is_removed or self._is_scanning:
            yield
            return
        self._is_scanning = True
        try:
            with self.counting():
                yield
        finally:
            self._is_scanning = False
            if self._functional is not None:
                self._functional.forget()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts this process's crossings inside the block without scanning them, for the positions of a pass
        that is executed again. May be nested, also in ``watching``."""
        if self._is_removed or self._follows_all:  # these count everywhere
            yield
            return
        self._times_counting += 1
        if self._times_counting == 1:
            self._install()
        try:
            yield
        finally:
            self._times_counting -= 1
            if self._times_counting == 0:
                self._uninstall()

    @contextlib.contextmanager
    def transferring(self, owner: str, *, reduces_gradients: bool) -> Iterator[None]:
        """A context around a framework's own collectives, which gather the weights of the module ``owner`` or
        reduce their gradients."""
        self.watch.enter_transfer(_C.ModulePath(owner), reduces_gradients)
        try:
            yield
        finally:
            self.watch.leave_transfer()

    def collect(self, iteration: int) -> tuple[list[_C.Sighting], list[_C.CrossingCoverage]]:
        """The bad tensors since ``begin_step``, in execution order, and the coverage. Waits for the
        devices."""
        return self.watch.collect(iteration)

    def remove(self) -> None:
        """Stops watching. May be called twice, and inside ``watching``."""
        self._is_removed = True
        self._uninstall()
        self._patches.remove()

    def _named_forward(self, name: str) -> Callable[..., Any]:
        """Names the crossings in a module's forward and in its backward. Only modules that exchange data are
        followed: wrapping the calls of all modules costs 3 % of a small step."""
        path, watch = _C.ModulePath(name), self.watch

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = watch.enter(path)
            try:
                return original(*args, **kwargs)
            finally:
                watch.leave(call)

        return forward

    # The schedule's steps show to which microbatch and chunk the messages between them belong.

    def begin_forward(self, microbatch: int | None, chunk: int, inputs: Tensors) -> None:
        self.watch.begin_forward(microbatch, chunk, inputs)

    def end_forward(self, microbatch: int | None, chunk: int, outputs: Tensors) -> None:
        self.watch.end_forward(microbatch, chunk, outputs)

    def begin_backward(self, microbatch: int | None, chunk: int, output_grads: Tensors) -> None:
        self.watch.begin_backward(microbatch, chunk, output_grads)

    def end_backward(self, microbatch: int | None, chunk: int, input_grads: Tensors) -> None:
        self.watch.end_backward(microbatch, chunk, input_grads)

    def has_unseen(self, group: ProcessGroup) -> None:
        """Notes that the group's members also exchange tensors that are not seen here."""
        if (watched := self._watched(group)) is not None and not watched.has_unseen:
            watched.has_unseen = True
            self.watch.has_unwatched(watched.number)

    def missed_a_pass(self) -> None:
        """Notes that a pass's crossings were counted but not scanned."""
        for watched in self._groups.values():
            if watched is not None:
                self.has_unseen(watched.group)

    # Collectives that do not use ProcessGroup's methods.

    def _begin_broadcast(
        self, group: ProcessGroup, sent: Tensors | None, received: Tensors
    ) -> Callable[[], None]:
        crossing = self.begin_collective(group, broadcasts.OPERATOR, sent, has_unseen_backward=False)

        def end() -> None:
            self.was_issued(group, crossing)
            if crossing is not None:
                self.end_collective(crossing, received)

        return end

    def begin_collective(
        self, group: ProcessGroup, operator: str, sent: Any, *, has_unseen_backward: bool
    ) -> int | None:
        watched = self._watched(group)
        if watched is None:
            return None
        if has_unseen_backward:
            self.has_unseen(group)
        return self.watch.begin_collective(watched.number, operator, sent) if self._is_scanning else None

    def was_issued(self, group: ProcessGroup, crossing: int | None) -> None:
        if crossing is not None:
            self.watch.was_issued(crossing)
        elif (watched := self._watched(group)) is not None:
            self.watch.skip_collective(watched.number)

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
        """Watches a new group. Groups with the same members get different names, because crossings are
        counted by name and members."""
        try:
            members = dist.get_process_group_ranks(group)
        except (RuntimeError, KeyError, ValueError):  # torch.distributed has not created it
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
        """Notes about crossings that are not seen with this torch, for a verdict's coverage."""
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
            if not self._is_scanning or len(args) <= needed:
                # Tensors by keyword, which no known caller uses: counted as on the other members, but not
                # scanned, so that the coverage ends before it.
                work = inner(group, *args, **kwargs)
                watch.skip_collective(watched.number)
                return work
            inputs, outputs = args[sent], args[received] if is_scanned_on_arrival else None
            if root is not None and not watched.is_root(args[root]):
                inputs = None if collective.only_root_sends else inputs
                outputs = None if collective.only_root_receives else outputs
            crossing = watch.begin_collective(watched.number, op, inputs)
            work = inner(group, *args, **kwargs)
            watch.was_issued(crossing)
            return watched.observed(work, crossing, outputs)

        return method

    def _watched_send(self, inner: Callable[..., Any]) -> Layer:
        watch = self.watch

        def send(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            tensors, to, *_ = args
            watched = self._watched_by_messages(group)
            if watched is None or (peer := watched.peer(to)) is None:
                return inner(group, *args, **kwargs)
            if not self._is_scanning:
                work = inner(group, *args, **kwargs)
                watch.skip_message(watched.number, peer, is_received=False)
                return work
            crossing = watch.begin_send(watched.number, peer, tensors)
            work = inner(group, *args, **kwargs)
            watch.was_issued(crossing)
            return work

        return send

    def _watched_receive(self, inner: Callable[..., Any]) -> Layer:
        watch = self.watch

        def recv(group: ProcessGroup, args: Arguments, kwargs: Any) -> Any:
            tensors, source, *_ = args
            watched = self._watched_by_messages(group)
            if watched is None or watched.loses_messages or (peer := watched.peer(source)) is None:
                return inner(group, *args, **kwargs)
            if not self._is_scanning:
                work = inner(group, *args, **kwargs)
                watch.skip_message(watched.number, peer, is_received=True)
                return work
            crossing = watch.begin_receive(watched.number, peer)
            work = inner(group, *args, **kwargs)
            watch.was_issued(crossing)
            return watched.observed(work, crossing, tensors)

        return recv

    def _lost_receive(self, inner: Callable[..., Any]) -> Layer:
        """The sender is unknown, so later messages of every sender cannot be numbered any more."""

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
    """With two pipeline stages, Megatron-Core sends one direction through the group of all ranks, so that
    both directions overlap (p2p_communication.py, _p2p_ops). These messages count as the pipeline group's."""
    world = dist.group.WORLD
    if watched.name != "pp" or len(watched.members) != 2 or world is None or world is watched.group:
        return {}
    return {id(world): watched.through(world)}


class _WatchedGroup:
    """A process group, with its name and number in the engine."""

    def __init__(self, name: str, group: ProcessGroup, watch: _C.BoundaryWatch) -> None:
        self.name = name
        self.group = group  # kept alive, so that its id stays unique
        self.watch = watch
        self.members = dist.get_process_group_ranks(group)
        self.number = watch.add_group(name, self.members)
        self.loses_messages = False
        self.has_unseen = False
        self.coalesced: _Crossings | None = None  # between _start_coalescing and _end_coalescing
        self._peers = {dist.get_group_rank(group, rank): rank for rank in self.members}
        self._rank = group.rank()

    def through(self, group: ProcessGroup) -> "_WatchedGroup":
        """This group, for messages that are sent through ``group``."""
        other = object.__new__(_WatchedGroup)
        vars(other).update(vars(self), group=group)
        other._peers = {dist.get_group_rank(group, rank): rank for rank in self.members}
        return other

    def peer(self, rank_in_group: int) -> int | None:
        """The peer's global rank; None if it is not a member."""
        return self._peers.get(rank_in_group)

    def is_root(self, root: Any) -> bool:
        """``root``: the method's options, or the root's rank in this group."""
        return (root if isinstance(root, int) else root.rootRank) == self._rank

    def observed(self, work: Any, crossing: int, received: Any) -> Any:
        if self.coalesced is None:
            return _observed(work, [(crossing, received)], self.watch)
        # NCCL: nothing has started yet; only the work of _end_coalescing can be waited for.
        self.coalesced.append((crossing, received))
        return work


_Crossings = list[tuple[int, Any]]  # crossing, received tensors


def _observed(work: Any, crossings: _Crossings, watch: _C.BoundaryWatch) -> Any:
    """A work that scans the received tensors once the program has waited for it."""
    scan = functools.partial(_finish, crossings, watch)
    if work is not None:
        return FollowedWork(work, scan)
    scan()  # complete already, as far as the current stream can see
    return None


def _finish(crossings: _Crossings, watch: _C.BoundaryWatch) -> None:
    for crossing, received in crossings:
        watch.finish(crossing, received)
