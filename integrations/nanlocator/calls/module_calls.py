"""Keeps one call of each wanted module during an extra pass of a bad step, for its origins' bundles."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks, running_module
from nanlocator.calls.pickled_modules import pickled


class ModuleCalls:
    """Keeps, for each module named in ``wanted``, the pass's first call with a bad output or a bad gradient
    of an input; if there is none, the first call. Keeps the arguments from before the call, the outputs, and
    the gradients that belong to this call alone, in host memory.

    Does not change the computation. Scans values, so it waits for the device. Until a module's bad call is
    known, its later calls hold their arguments and outputs by reference.
    """

    def __init__(self, wanted: set[str]) -> None:
        self._wanted = wanted
        self._modules: dict[str, _Module] = {}

    def during(self, model: nn.Module, forward_backward: Callable[[], Any]) -> None:
        """Runs ``forward_backward`` and keeps the calls."""
        with ModuleHooks(model, self):
            forward_backward()

    def of(self, name: str) -> _C.ModuleCall | None:
        module = self._modules.get(name)
        return module.kept_call(name) if module is not None else None

    # A ModuleObserver's methods.

    def enter(self, path: _C.ModulePath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call | None":
        name = str(path)
        running = running_module()
        if name not in self._wanted or running is None:
            return None
        module = self._modules.setdefault(name, _Module())
        return None if module.has_bad_call else module.begin(running, args, kwargs)

    def leave(self, call: "_Call | None", output: Any) -> None:
        if call is not None:
            call.finish(output)

    def abandon(self, call: "_Call | None") -> None:
        if call is not None:
            call.drop()


class KeptModuleCalls:
    """The ModuleCalls of the latest pass that kept calls."""

    def __init__(self) -> None:
        self._latest = ModuleCalls(set())

    def begin(self, wanted: list[str]) -> ModuleCalls:
        self._latest = ModuleCalls(set(wanted))
        return self._latest

    def of(self, name: str) -> _C.ModuleCall | None:
        return self._latest.of(name)

    def forget(self) -> None:
        self.begin([])


class _Module:
    """The calls of one module: the kept call, and later calls that may still turn bad."""

    def __init__(self) -> None:
        self.has_bad_call = False
        self._kept: _Call | None = None
        self._pending: list[_Call] = []
        self._problem = ""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call | None":
        try:
            call = _Call(self, module, args, kwargs)
        except RuntimeError as error:  # no memory for the copies
            self._problem = str(error).partition("\n")[0]
            return None
        if self._kept is None:
            self._kept = call
        return call

    def is_kept(self, call: "_Call") -> bool:
        return call is self._kept

    def may_turn_bad(self, call: "_Call") -> None:
        self._pending.append(call)

    def is_bad(self, call: "_Call") -> None:
        """Keeps only this call."""
        self.has_bad_call = True
        pending, self._pending = self._pending, []
        for other in (self._kept, *pending):
            if other is not None and other is not call:
                other.forget()
        self._kept = call

    def give_up(self, call: "_Call", error: RuntimeError) -> None:
        self._problem = str(error).partition("\n")[0]
        self.drop(call)

    def drop(self, call: "_Call") -> None:
        call.forget()
        if self._kept is call:
            self._kept = None

    def kept_call(self, name: str) -> _C.ModuleCall | None:
        if self._kept is not None:
            return self._kept.as_module_call(name)
        return _C.ModuleCall.left_out(name, self._problem) if self._problem else None


class _Call:
    def __init__(
        self, calls: _Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._calls = calls
        self._module = module
        self._first_node = torch._C._autograd._get_sequence_nr()
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        self._input_edges = [get_gradient_edge(t) for t in inputs] if torch.is_grad_enabled() else []
        self._arguments = _Values((args, kwargs))
        self._arguments.copy()  # now, because the module may write them in place
        self._outputs = _Values(None)
        self._grad_outputs: list[_Values] = []
        self._grad_inputs: list[_Values] = [_Values(None) for _ in inputs]
        self._is_forgotten = False

    def finish(self, output: Any) -> None:
        if self._is_forgotten:  # an inner call of the same name replaced it: FSDP1's wrapper has its module's
            return
        self._outputs = _Values(output)
        differentiable = [t for t in tensors_in(output) if t.requires_grad]
        if any(map(_is_bad, tensors_in(output))):
            self._calls.is_bad(self)
        elif not self._calls.is_kept(self):
            if not differentiable or not self._arguments.refer():
                return self.forget()
            self._calls.may_turn_bad(self)
        if self._calls.is_kept(self):
            self._keep(self._arguments)
            self._keep(self._outputs)
        self._grad_outputs = [_Values(None) for _ in differentiable]
        for index, tensor in enumerate(differentiable):
            tensor.register_hook(self._see_grad_output(index))
        for node, position, index in self._edges_to_inputs(differentiable):
            node.register_hook(self._see_grad_input(position, index))

    def drop(self) -> None:
        """An error has ended it."""
        self._calls.drop(self)

    def forget(self) -> None:
        """Drops all references to values."""
        self._is_forgotten = True
        self._arguments = self._outputs = _Values(None)
        self._grad_outputs, self._grad_inputs = [], []

    def _keep(self, values: "_Values") -> None:
        try:
            values.keep()
        except RuntimeError as error:  # no memory for the copies
            self._calls.give_up(self, error)

    def _see_grad_output(self, index: int) -> Callable[[torch.Tensor], None]:
        def see(gradient: torch.Tensor) -> None:
            if self._is_forgotten:
                return
            self._grad_outputs[index] = _Values(gradient.detach())
            if self._calls.is_kept(self):
                self._keep(self._grad_outputs[index])

        return see

    def _see_grad_input(self, position: int, index: int) -> Callable[..., None]:
        def see(grad_inputs: tuple[torch.Tensor | None, ...], _: Any) -> None:
            contribution = grad_inputs[position]
            if self._is_forgotten or contribution is None:
                return
            if not self._calls.has_bad_call and _is_bad(contribution):
                self._calls.is_bad(self)
                for values in (self._arguments, self._outputs, *self._grad_outputs, *self._grad_inputs):
                    self._keep(values)
            if self._is_forgotten:
                return
            before = self._grad_inputs[index].now
            contribution = contribution.detach()
            if before is not None:
                contribution = contribution.to(before.device) + before
            self._grad_inputs[index] = _Values(contribution)
            if self._calls.is_kept(self):
                self._keep(self._grad_inputs[index])

        return see

    def _edges_to_inputs(self, outputs: list[torch.Tensor]) -> Iterator[tuple[Any, int, int]]:
        """(node, index among its inputs' gradients, index of the call's input) for each node that this call
        made and that passes its gradient to an input of the call."""
        targets = {_key(edge): index for index, edge in enumerate(self._input_edges)}
        waiting = [t.grad_fn for t in outputs if _key(get_gradient_edge(t)) not in targets]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node._sequence_nr() < self._first_node:
                continue
            seen.add(node)
            for position, (next_node, output_nr) in enumerate(node.next_functions):
                index = targets.get((next_node, output_nr))
                if index is not None:
                    yield node, position, index
                else:
                    waiting.append(next_node)

    def as_module_call(self, name: str) -> _C.ModuleCall:
        args, kwargs = self._arguments.now
        grad_outputs = tuple(values.now for values in self._grad_outputs)
        grad_inputs = tuple(values.now for values in self._grad_inputs)
        call = module_call(
            name,
            self._module,
            args,
            kwargs,
            self._outputs.now,
            grad_outputs if any(g is not None for g in grad_outputs) else (),
            grad_inputs if any(g is not None for g in grad_inputs) else (),
        )
        for values in (self._arguments, self._outputs, *self._grad_outputs, *self._grad_inputs):
            for copy, device in values.came_from:
                call.note_device(copy, device)
        return call


class _Values:
    """Values of a call, with tensors by reference or copied to host memory. Objects that are neither tensors
    nor plain containers stay unchanged."""

    def __init__(self, value: Any) -> None:
        self._live = value
        self._versions = {id(tensor): _version(tensor) for tensor in tensors_in(value)}
        self._copies: Any = None
        self._is_copied = False
        self.came_from: list[tuple[torch.Tensor, str]] = []  # copies of tensors that were on a device

    @property
    def now(self) -> Any:
        return self._copies if self._is_copied else self._live

    def copy(self) -> None:
        """Copies the tensors. Tensors that were written to since they were seen become None."""
        if not self._is_copied:
            self._copies = self._copied(self._live)
            self._is_copied = True

    def keep(self) -> None:
        """Copies the tensors and drops the originals."""
        self.copy()
        self._live, self._versions = None, {}

    def refer(self) -> bool:
        """Drops the copies; false if an original has been written to since."""
        if any(self._versions[id(tensor)] != _version(tensor) for tensor in tensors_in(self._live)):
            return False
        self._copies, self._is_copied, self.came_from = None, False, []
        return True

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if self._versions[id(value)] != _version(value):
                return None
            is_on_host = value.device.type == "cpu"
            copy = value.detach().clone() if is_on_host else value.detach().cpu()
            if not is_on_host:
                self.came_from.append((copy, str(value.device)))
            return copy.requires_grad_(value.requires_grad)
        if isinstance(value, dict) and type(value) is dict:
            return {key: self._copied(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(item) for item in value)
        return value


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_bad(tensor: torch.Tensor) -> bool:
    stats = _C.scan_one(tensor)
    return stats is not None and not stats.is_finite


def _key(edge: GradientEdge) -> tuple[Any, int]:
    return (edge.node, edge.output_nr)


def module_call(
    name: str,
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    outputs: Any,
    grad_outputs: tuple[torch.Tensor | None, ...] = (),
    grad_inputs: tuple[torch.Tensor | None, ...] = (),
) -> _C.ModuleCall:
    """The call of ``module`` in its form for a bundle: tensors by reference, the module as a pickle without
    its tensors."""
    weights = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    content, problem = pickled(module, weights | buffers)
    return _C.ModuleCall(
        name,
        f"{type(module).__module__}.{type(module).__qualname__}",
        module.training,
        tuple(arguments),
        keywords,
        outputs,
        {key: weight.detach() for key, weight in weights.items()}
        | {key: _kept_buffer(buffer) for key, buffer in buffers.items()},
        grad_outputs,
        grad_inputs,
        content,
        problem,
    )


def _kept_buffer(buffer: torch.Tensor) -> torch.Tensor:
    """A copy, because passes change buffers before the bundle is written. A device's buffer is copied to the
    host anyway."""
    return buffer.detach().clone() if buffer.device.type == "cpu" else buffer.detach()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
