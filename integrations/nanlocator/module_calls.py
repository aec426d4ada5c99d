"""Keeps the calls of a few modules during one more pass of a bad step, for the bundles of its origins."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nanlocator import _C
from nanlocator.modules import ModuleHooks, running_module
from nanlocator.replay import module_call, tensors_in

_MOST_CALLS = 64  # of one module; a module in a loop may have thousands, and the bad one comes early


class ModuleCalls:
    """The calls of the modules named ``wanted`` in a pass: arguments as they were before the call, outputs,
    and the gradients that belong to this call alone.

    Changes nothing that is computed: clones and hooks that return nothing. Looks at values, so it waits for
    the device.
    """

    def __init__(self, wanted: set[str]) -> None:
        self._wanted = wanted
        self._calls: dict[str, list[_Call]] = {}

    def during(self, model: nn.Module, forward_backward: Callable[[], Any]) -> None:
        """Runs ``forward_backward`` and keeps the calls."""
        with ModuleHooks(model, self):
            forward_backward()

    def of(self, name: str) -> "_C.ModuleCall | None":
        """The first call of that module with something bad in its outputs or gradients, else the first."""
        calls = self._calls.get(name, [])
        bad = [call for call in calls if call.is_bad()]
        return (bad or calls)[0].as_module_call(name) if calls else None

    # What ModuleHooks calls, as it calls a _C.ModuleWatch.

    def enter(self, path: "_C.ModulePath", args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call | None":
        name = str(path)
        module = running_module()
        if name not in self._wanted or module is None or len(self._calls.get(name, [])) >= _MOST_CALLS:
            return None
        call = _Call(module, args, kwargs)
        self._calls.setdefault(name, []).append(call)
        return call

    def leave(self, call: "_Call | None", output: Any) -> None:
        if call is not None:
            call.finish(output)

    def abandon(self, call: "_Call | None") -> None:
        pass


class KeptModuleCalls:
    """The ModuleCalls of the latest pass that kept any."""

    def __init__(self) -> None:
        self._latest = ModuleCalls(set())

    def begin(self, wanted: list[str]) -> ModuleCalls:
        self._latest = ModuleCalls(set(wanted))
        return self._latest

    def of(self, name: str) -> "_C.ModuleCall | None":
        return self._latest.of(name)

    def forget(self) -> None:
        self.begin([])


class _Call:
    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._first_node = torch._C._autograd._get_sequence_nr()
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        self._input_edges = [get_gradient_edge(t) for t in inputs] if torch.is_grad_enabled() else []
        self._args, self._kwargs = _copied(args), _copied(kwargs)
        self._outputs: Any = None
        self._grad_outputs: list[torch.Tensor | None] = []
        self._grad_inputs: list[torch.Tensor | None] = [None] * len(inputs)

    def finish(self, output: Any) -> None:
        self._outputs = _copied(output)
        differentiable = [t for t in tensors_in(output) if t.requires_grad]
        self._grad_outputs = [None] * len(differentiable)
        for index, tensor in enumerate(differentiable):
            tensor.register_hook(self._keep_grad_output(index))
        for node, position, index in self._edges_to_inputs(differentiable):
            node.register_hook(self._keep_grad_input(position, index))

    def _keep_grad_output(self, index: int) -> Callable[[torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            self._grad_outputs[index] = gradient.detach().clone()

        return keep

    def _keep_grad_input(self, position: int, index: int) -> Callable[..., None]:
        def keep(grad_inputs: tuple[torch.Tensor | None, ...], _: Any) -> None:
            contribution = grad_inputs[position]
            if contribution is not None:
                before = self._grad_inputs[index]
                contribution = contribution.detach()
                self._grad_inputs[index] = contribution.clone() if before is None else before + contribution

        return keep

    def _edges_to_inputs(self, outputs: list[torch.Tensor]) -> Iterator[tuple[Any, int, int]]:
        """(node, which of its inputs' gradients, which input of the call) for the nodes that were made in
        this call and hand their gradient to one of its inputs."""
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

    def is_bad(self) -> bool:
        kept = [*tensors_in(self._outputs), *self._grad_inputs]
        return any(t is not None and t.is_floating_point() and not bool(t.isfinite().all()) for t in kept)

    def as_module_call(self, name: str) -> "_C.ModuleCall":
        return module_call(
            name,
            self._module,
            self._args,
            self._kwargs,
            self._outputs,
            tuple(self._grad_outputs) if any(g is not None for g in self._grad_outputs) else (),
            tuple(self._grad_inputs) if any(g is not None for g in self._grad_inputs) else (),
        )


def _key(edge: GradientEdge) -> tuple[Any, int]:
    return (edge.node, edge.output_nr)


def _copied(value: Any) -> Any:
    """The containers of the call with its tensors cloned; other objects as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
