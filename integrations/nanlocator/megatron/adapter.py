"""The adapter of Megatron-Core: parameters, gradients, weights, and a pass of its schedule."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks, ModuleObserver, local_part, tensor_attributes
from nanlocator.engine.driver import (
    Adapter,
    LossScale,
    Named,
    OptimizerTensors,
    Pass,
    Views,
    state_numbers,
    state_tensors,
)
from nanlocator.megatron import state
from nanlocator.megatron.data_parallel import data_parallel_chunk
from nanlocator.megatron.layout import (
    module_names,
    named_parameters,
    parameter_infos,
    rank_coordinates,
    shard_ranges,
    updated_tensors,
)
from nanlocator.megatron.microbatches import Microbatches
from nanlocator.megatron.step_data import StepData

T = TypeVar("T")


class MegatronAdapter(Adapter):
    """Gradients are ``main_grad``; after the collective only this rank's shard of them counts."""

    gradient_phase = "grad_reduced"
    why_no_pass = (
        "the training loop got its schedule from Megatron (get_forward_backward_func) before nanlocator was "
        "installed"
    )
    can_trace_later_steps = False

    def __init__(self, chunks: list[Any], optimizer: MegatronOptimizer) -> None:
        super().__init__()
        self.models = self._chunks = chunks
        self._optimizer = optimizer
        # With a single chunk, Megatron-FSDP's optimizer is not a ChainedOptimizer.
        self.optimizers: list[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
        self.data_parallel = [data_parallel_chunk(chunk) for chunk in chunks]
        self.named = named_parameters(chunks, self.data_parallel)
        self._infos = parameter_infos(chunks, self.data_parallel, self.optimizers, self.named)
        self.ids = {e.parameter: info.id for e, info in zip(self.named, self._infos, strict=True)}
        self.shards = shard_ranges(self.data_parallel, self.optimizers, self.named)
        self.parameters = [(entry.name, entry.parameter) for entry in self.named]
        # If weights are gathered at each use, the shards are parameters, too.
        self.parameters += [
            (entry.name, self._weight(entry.parameter))
            for entry in self.named
            if self.data_parallel[entry.chunk].ranks_that_gather(entry.parameter)
        ]
        self.buffers.follow(self._named(torch.nn.Module.named_modules))
        if self._dynamic_scalers():
            self.loss_scale = self.loss_scale_now

    def parameter_map(self) -> _C.ParameterMap:
        device = self.named[0].parameter.device if self.named else torch.device("cpu")
        return _C.ParameterMap(rank_coordinates(device), sorted(self._infos, key=lambda info: info.id))

    def gradients(self) -> Views:
        whole = [(entry, (0, entry.parameter.numel())) for entry in self.named]
        return self._all_ids(), [
            self.data_parallel[entry.chunk].reduced_gradient(entry.parameter, kept) for entry, kept in whole
        ]

    def weights(self) -> Views:
        return self._all_ids(), [
            self.data_parallel[entry.chunk].weight(entry.parameter) for entry in self.named
        ]

    def optimizer_state(self, ids: list[int]) -> OptimizerTensors:
        found = []
        for optimizer in self.optimizers:
            for parameter, main, begin in updated_tensors(optimizer, self.shards):
                parameter_id = self.ids[parameter]
                if parameter_id not in ids:
                    continue
                tensors = state_tensors(optimizer.optimizer, main)
                own = local_part(main.detach())
                if own.untyped_storage().data_ptr() != self._weight(parameter).untyped_storage().data_ptr():
                    tensors.append(("main_param", own))
                found += [(parameter_id, name, tensor, begin) for name, tensor in tensors]
                numbers = state_numbers(optimizer.optimizer, main)
                found += [(parameter_id, name, number, 0) for name, number in numbers]
        return found

    def owned_gradients(self, chunk: int) -> tuple[list[int], list[torch.Tensor], list[int]]:
        """Ids, this rank's part of each reduced gradient of a chunk, and the first element of that part."""
        ids, tensors, offsets = [], [], []
        for p in (entry.parameter for entry in self.named if entry.chunk == chunk):
            begin, end = self.shards.get(p, (0, p.numel()))
            if begin < end or p.numel() == 0:
                ids.append(self.ids[p])
                tensors.append(self.data_parallel[chunk].reduced_gradient(p, (begin, end)))
                offsets.append(begin)
        return ids, tensors, offsets

    def clear_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def model_tensors(self) -> tuple[Named, Named]:
        state = self._named(torch.nn.Module.named_buffers) + self._named(tensor_attributes)
        return self.parameters, state

    def module_hooks(self, watch: ModuleObserver | None) -> list[ModuleHooks]:
        return [ModuleHooks(chunk, watch, name_of=module_names(chunk)) for chunk in self._chunks]

    def loss_scale_now(self) -> LossScale | None:
        """The factor in this step's gradients; None if the loss scale is not dynamic. At the smallest scale
        an overflow is no longer the scale's fault (grad_scaler.py, DynamicGradScaler)."""
        scalers = self._dynamic_scalers()
        scale = max((scaler.scale.item() for scaler in scalers), default=0.0)
        if scale <= 0:
            return None
        return scale, scale > max((scaler.min_scale.item() for scaler in scalers), default=math.inf), True

    def skips_bad_updates(self) -> bool:
        """True with any loss scaler, also a constant one (optimizer.py, MixedPrecisionOptimizer)."""
        return bool(self._scalers())

    def _scalers(self) -> list[Any]:
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in self.optimizers)
        return [scaler for scaler in scalers if scaler is not None]

    def _dynamic_scalers(self) -> list[Any]:
        return [scaler for scaler in self._scalers() if hasattr(scaler, "min_scale")]

    def _named(self, each_of: Callable[[torch.nn.Module], Iterable[tuple[str, T]]]) -> list[tuple[str, T]]:
        """With global layer and expert numbers."""
        return [(module_names(chunk)(name), each) for chunk in self._chunks for name, each in each_of(chunk)]

    def _weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        (chunk,) = {entry.chunk for entry in self.named if entry.parameter is parameter}
        return self.data_parallel[chunk].weight(parameter)

    def _all_ids(self) -> list[int]:
        return [self.ids[entry.parameter] for entry in self.named]


class MegatronPass(Pass):
    """One call of Megatron's ``forward_backward_func``, and its microbatches."""

    def __init__(
        self,
        adapter: MegatronAdapter,
        microbatches: Microbatches,
        forward_backward: Callable[..., Any],
        arguments: dict[str, Any],
    ) -> None:
        self._adapter = adapter
        self._microbatches = microbatches
        self._forward_backward = forward_backward
        self._arguments = arguments
        self.data = StepData(arguments.get("data_iterator"))
        self.result: Any = None  # of the latest execution

    def run(self, data_iterator: Any) -> None:
        self._microbatches.begin_pass()
        try:
            self.result = self._forward_backward(**{**self._arguments, "data_iterator": data_iterator})
        finally:
            self._microbatches.end_pass()

    def run_again(self) -> Named:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._adapter.naming_modules())
            stack.enter_context(state.RerunMachine.muted())
            for chunk in self._adapter.data_parallel:
                chunk.clear_padding_of_weights()
            self.run(self.data.replay())
        return self._microbatches.named_losses

    def clear_gradients(self) -> None:
        self._adapter.clear_gradients()

    def changed_data(self) -> list[str]:
        return self.data.changed()

    def microbatches(self) -> list[tuple[int, int | None, list[str]]]:
        return self.data.describe()
