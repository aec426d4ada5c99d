"""The adapter of a DeepSpeed engine: parameters, gradients, weights, and a recorded step."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks, ModuleObserver, tensor_attributes
from nanlocator.deepspeed.layout import Layout, Part
from nanlocator.engine.driver import Adapter, LossScale, Named, OptimizerTensors, Pass, Views
from nanlocator.engine.this_rank import device_description, dtype_name, is_distributed
from nanlocator.loops.recorder import StepRecorder
from nanlocator.state.switches import switches_of

_MOST_KEPT = 8  # bad gradients kept in a re-run, the first ones in backward order


class DeepSpeedAdapter(Adapter):
    """Gradients are those that the optimizer will use: reduced, and in ZeRO 1 to 3 this rank's partition."""

    gradient_phase = "grad_reduced"
    why_no_pass = "no call of the engine was recorded in it"

    def __init__(self, engine: Any, layout: Layout) -> None:
        super().__init__()
        self._engine, self._module, self._layout = engine, engine.module, layout
        self.models = [self._module]
        self._kept: list[Part] = []
        names = {p: name for name, p in self._module.named_parameters()}
        self._names = [names.get(p, f"parameter{i}") for i, p in enumerate(layout.parameters)]
        self.parameters = [(self._names[i], tensor) for i, tensor in layout.named_by_id()]
        self.buffers.follow(self._module.named_modules())
        if engine.fp16_enabled():
            self.loss_scale = self._loss_scale

    def parameter_map(self) -> _C.ParameterMap:
        shards = self._layout.shards()
        infos = []
        rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        for index, parameter in enumerate(self._layout.parameters):
            info = _C.ParameterInfo()
            info.id, info.name, info.raw_name = index, self._names[index], self._names[index]
            info.shape = list(getattr(parameter, "ds_shape", parameter.shape))
            info.dtype = dtype_name(parameter.dtype)
            if self._layout.is_partitioned():
                info.shard = shards.get(index, (0, 0))
            if self._layout.gathers_weights:
                info.shard_group = list(range(world))
            infos.append(info)
        coordinates = _C.data_parallel_coordinates(rank, world)
        coordinates.device = device_description(torch.device(self._engine.device))
        return _C.ParameterMap(coordinates, infos)

    def gradients(self) -> Views:
        """In a re-run, includes this rank's gradients that were bad before the reduction."""
        return _views(self._kept + self._layout.reduced())

    def weights(self) -> Views:
        return _views(self._layout.weights())

    def optimizer_state(self, ids: list[int]) -> OptimizerTensors:
        return list(self._layout.optimizer_state(set(ids)))

    def model_tensors(self) -> tuple[Named, Named]:
        module = self._module
        return list(module.named_parameters()), [*module.named_buffers(), *tensor_attributes(module)]

    def module_hooks(self, watch: ModuleObserver | None) -> list[ModuleHooks]:
        return [ModuleHooks(self._module, watch)]

    def keep_bad(self, parts: list[Part]) -> None:
        """In a re-run, copies bad gradients to the host before their bucket is reduced: afterwards they
        belong to another rank, or are freed."""
        for number, gradient in parts:
            if len(self._kept) >= _MOST_KEPT:
                return
            stats = _C.scan_one(gradient)
            if stats is not None and not stats.is_finite:
                self._kept.append((number, gradient.detach().to("cpu", copy=True)))

    def forget_kept(self) -> None:
        self._kept.clear()

    def skips_bad_updates(self) -> bool:
        return self._layout.skips_bad_updates()

    def _loss_scale(self) -> LossScale | None:
        """The factor in the gradients. At the smallest scale an overflow is no longer the scale's fault
        (runtime/fp16/loss_scaler.py)."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if scaler is not None:
            smallest = getattr(scaler, "min_scale", 1.0)
            return float(scaler.cur_scale), bool(scaler.dynamic) and scaler.cur_scale > smallest, True
        config = getattr(self._engine.optimizer, "loss_scale_config", None)
        if config is None:
            return None
        falls = bool(config.dynamic_loss_scale) and config.cur_scale > (config.min_loss_scale or 0)
        return float(config.cur_scale), falls, True


def _views(parts: list[Part]) -> Views:
    return [i for i, _ in parts], [tensor for _, tensor in parts]


class EngineRecorder(StepRecorder):
    """Records the engine's backwards as a whole, including the work after autograd's part. They depend on the
    engine's counter: in a step of several microbatches the last one reduces, or the one that the program
    names."""

    def __init__(self, engine: Any, *args: Any) -> None:
        super().__init__(*args)
        self._deepspeed = engine
        names = ("micro_steps", "_is_gradient_accumulation_boundary", "inside_no_sync_ctxt")
        self._switches[engine] = switches_of(engine)
        self._switches[engine].add(engine, names)

    def _has_unreduced(self) -> bool:
        """ZeRO takes gradients out of ``.grad`` as they are written."""
        state = getattr(self._deepspeed.optimizer, "_backward_hook_state", None)
        return state is not None and state.backward_seen_this_step


class EnginePass(Pass):
    """The calls of one step, from the first forward to the engine's step()."""

    def __init__(
        self,
        adapter: DeepSpeedAdapter,
        layout: Layout,
        recorder: EngineRecorder,
        scan_reduced: Callable[[], None],
    ) -> None:
        self._adapter, self._layout, self._recorder = adapter, layout, recorder
        self._scan_reduced = weakref.WeakMethod(scan_reduced)  # must not keep its owner alive
        self.problem = ""  # why the step cannot be executed again

    def run_again(self) -> Named:
        self._layout.clear_padding_of_weights()
        with self._adapter.naming_modules():
            losses = self._recorder.run_again()
        if scan_reduced := self._scan_reduced():
            scan_reduced()
        return losses

    def clear_gradients(self) -> None:
        self._adapter.forget_kept()
        self._layout.clear_gradients()

    def obstacle(self) -> str:
        return self.problem or self._recorder.problem

    def changed_data(self) -> list[str]:
        return self._recorder.changed_data()
