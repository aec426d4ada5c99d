"""Frames of backward: the gradients that each call of a module receives from autograd, and those that it
alone contributes.

Hooks are on autograd's nodes: before the nodes of the call's outputs, and after the nodes that were created
during the call and pass a gradient to one of its inputs or weights (as in
src/watch/module_gradient_hooks.cpp). A tensor hook would see the sum over all consumers, and
``register_full_backward_hook`` wraps outputs in views. Hooks return nothing and keep no tensor, so the
results do not change.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanlocator.debugger.frames import Role, Row
from nanlocator.debugger.places import input_places, output_places
from nanlocator.debugger.scans import Scans

_ACCUMULATOR = "AccumulateGrad"  # the node of a leaf; its name in Python
_AFTER_OUTPUTS = 1 << 20  # places in a frame; no call has so many outputs


class StartedCall:
    """Positions of a running call's inputs in autograd's graph."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.edges: dict[tuple[Any, int], str] = {}  # (node, index of its output) -> "input[0]"
        self.leaves: dict[int, str] = {}  # by id of a leaf tensor; its accumulator has the tensor
        self.add_inputs(args, {})

    def add_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place in input_places(args, kwargs):
            tensor = place.value
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            if tensor.grad_fn is not None:
                self.edges.setdefault((tensor.grad_fn, tensor.output_nr), place.context)
            else:
                self.leaves.setdefault(id(tensor), place.context)


@dataclass(frozen=True, slots=True, eq=False)
class BackwardCall:
    """One call of a module, until its gradients arrive."""

    name: str
    module_class: str
    batch: int
    hooks: int  # number that will run if backward passes through the whole call


@dataclass(frozen=True, slots=True)
class _GradientPlace:
    """One of the gradients that a node receives or returns."""

    position: int  # index among them
    role: Role
    context: str
    order: int  # position in the frame


@dataclass(slots=True)
class _OpenFrame:
    hooks_to_come: int
    rows: list[tuple[int, Row]] = field(default_factory=list)

    def in_order(self) -> list[Row]:
        """Outputs' gradients first, then those of inputs and weights."""
        return [row for _, row in sorted(self.rows, key=lambda numbered: numbered[0])]


class BackwardFrames:
    """Makes the frames of backward passes and gives them to ``take(call, rows)``: each when its last gradient
    has arrived, or at the end of the pass if one never does. A bad value ends a frame at once, unless
    ``is_traced(batch)``: later gradients follow from it.

    ``take`` may raise: backward then ends with that error. It runs in autograd's hooks, on their threads; if
    the scans wait for a device and the batch is not traced, it runs at the end of the pass.
    """

    def __init__(
        self,
        scans: Scans,
        take: Callable[[BackwardCall, list[Row]], None],
        is_traced: Callable[[int], bool],
    ) -> None:
        self._scans = scans
        self._take = take
        self._is_traced = is_traced
        self._is_active = True
        self._batch: int | None = None  # batch of the latest gradient
        self._lock = threading.RLock()  # autograd has a thread per device
        self._passes: set[int] = set()  # running passes
        # By pass (reentrant checkpoints nest them), in the order in which the frames began.
        self._open: dict[int, dict[BackwardCall, _OpenFrame]] = {}

    def remove(self) -> None:
        """Hooks that are left in graphs do nothing from now on."""
        self._is_active = False
        self.forget_open()

    def forget_open(self) -> None:
        """Discards the frames of a pass that an error has ended."""
        self._passes.clear()
        self._open.clear()

    def follow(self, started: StartedCall, module: nn.Module, output: Any, name: str, batch: int) -> None:
        """Hooks the nodes of a call that has returned ``output``. ``batch`` counts outside of a backward
        pass; a forward inside one (of a checkpoint) belongs to the pass's batch."""
        taken = _taken_by(started, output)
        if not taken:
            return
        given = _given_by(started, module, list(taken))
        if is_in_backward() and self._batch is not None:
            batch = self._batch
        call = BackwardCall(name, type(module).__name__, batch, len(taken) + len(given))
        for node, places in taken.items():
            node.register_prehook(self._hook(call, places))
        for node, places in given.items():
            see = self._hook(call, places)
            node.register_hook(lambda grad_inputs, grad_outputs, see=see: see(grad_inputs))

    def _hook(self, call: BackwardCall, places: list[_GradientPlace]) -> Callable[[Any], None]:
        def see(gradients: tuple[torch.Tensor | None, ...]) -> None:
            if not self._is_active:
                return
            with self._lock:
                self._batch = call.batch
                number = self._this_pass()
                rows = [(place.order, self._row(place, gradients[place.position])) for place in places]
                self._scans.then(lambda: self._add(number, call, rows))
                if self._scans.are_many or self._is_traced(call.batch):
                    self._scans.settle()

        return see

    def _this_pass(self) -> int:
        number = torch._C._current_graph_task_id()
        if number not in self._passes:
            self._passes.add(number)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end_pass(number))
        return number

    def _row(self, place: _GradientPlace, gradient: torch.Tensor | None) -> Row:
        if gradient is None:
            return Row(place.role, place.context, None, "NoneType")
        return Row(place.role, place.context, self._scans.scan(gradient))

    def _add(self, number: int, call: BackwardCall, rows: list[tuple[int, Row]]) -> None:
        frames = self._open.setdefault(number, {})
        frame = frames.setdefault(call, _OpenFrame(call.hooks))
        frame.rows += rows
        frame.hooks_to_come -= 1
        is_reported = any(row.is_bad for _, row in rows) and not self._is_traced(call.batch)
        if frame.hooks_to_come == 0 or is_reported:
            del frames[call]
            self._take(call, frame.in_order())

    def _end_pass(self, number: int) -> None:
        with self._lock:
            self._passes.discard(number)
            self._scans.then(lambda: self._take_incomplete(number))
            self._scans.settle()

    def _take_incomplete(self, number: int) -> None:
        for call, frame in self._open.pop(number, {}).items():
            self._take(call, frame.in_order())


def _taken_by(started: StartedCall, output: Any) -> dict[Any, list[_GradientPlace]]:
    """The nodes that made the outputs, and which of their received gradients are the outputs'."""
    taken: dict[Any, list[_GradientPlace]] = {}
    for order, place in enumerate(output_places(output)):
        tensor = place.value
        if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is None:
            continue
        edge = (tensor.grad_fn, tensor.output_nr)
        # The call did not compute this output: an input passed through, or a cached value.
        if edge not in started.edges and _was_made_during(started, edge[0]):
            seen = _GradientPlace(edge[1], Role.GRAD_OUTPUT, f"grad_{place.context}", order)
            taken.setdefault(edge[0], []).append(seen)
    return taken


def _given_by(
    started: StartedCall, module: nn.Module, from_nodes: list[Any]
) -> dict[Any, list[_GradientPlace]]:
    """The call's nodes that pass a gradient to one of its inputs or weights, and which gradient that is. If
    several pass one to the same input, each is labelled with its name."""
    weights = {id(p): name for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    if not weights and not started.leaves and not started.edges:
        return {}
    contexts = [*started.edges.values(), *started.leaves.values(), *weights.values()]
    found = list(_edges_out(started, weights, from_nodes))
    given: dict[Any, list[_GradientPlace]] = {}
    for node, position, role, context in found:
        is_only_one = [c for *_, c in found].count(context) == 1
        text = f"grad_{context}" if is_only_one else f"grad_{context} of {node.name()}"
        place = _GradientPlace(position, role, text, _AFTER_OUTPUTS + contexts.index(context))
        given.setdefault(node, []).append(place)
    return given


def _edges_out(
    started: StartedCall, weights: dict[int, str], from_nodes: list[Any]
) -> Iterator[tuple[Any, int, Role, str]]:
    """(node, index of its gradient, the input or weight), through the nodes that were created in the call."""
    waiting, seen = list(from_nodes), set(from_nodes)
    while waiting:
        node = waiting.pop()
        for position, edge in enumerate(node.next_functions):
            next_node = edge[0]
            if next_node is None:
                continue
            if edge in started.edges:
                yield node, position, Role.GRAD_INPUT, started.edges[edge]
            elif next_node.name().endswith(_ACCUMULATOR):
                leaf = id(next_node.variable)
                if leaf in weights:
                    yield node, position, Role.GRAD_WEIGHT, weights[leaf]
                elif leaf in started.leaves:
                    yield node, position, Role.GRAD_INPUT, started.leaves[leaf]
            elif next_node not in seen and _was_made_during(started, next_node):
                seen.add(next_node)
                waiting.append(next_node)


def _was_made_during(started: StartedCall, node: Any) -> bool:
    return node._sequence_nr() >= started.first_node


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
