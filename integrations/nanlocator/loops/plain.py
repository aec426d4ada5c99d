"""The adapter of plain PyTorch: gradients are ``parameter.grad``, and one model computes them.

``LocatingOptimizer`` and the Trainer callback of ``nanlocator.transformers`` use it."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.calls.modules import (
    ModuleHooks,
    ModuleObserver,
    local_part,
    shown,
    shown_module,
    tensor_attributes,
)
from nanlocator.engine.connection import RankConnection, connect
from nanlocator.engine.driver import (
    Adapter,
    Driver,
    LossScale,
    Named,
    OptimizerTensors,
    Pass,
    Views,
    state_numbers,
    state_tensors,
)
from nanlocator.engine.this_rank import device_description, dtype_name, is_distributed
from nanlocator.exchange.boundaries import Boundaries
from nanlocator.sharding import fsdp1, fsdp2
from nanlocator.sharding.ddp import LocalGradients
from nanlocator.sharding.own_gradients import LocalScans, OwnGradients
from nanlocator.sharding.pipelining import Pipeline, group_of, is_known
from nanlocator.sharding.shards import Part, coordinates_of, whole_part
from nanlocator.state.rerun import ScalerState


class PlainAdapter(Adapter):
    """Args:
        optimizers: their ``param_groups`` are the parameters, in their order. They are not kept alive.
        models: give the parameters' names, the modules and the buffers; each has its own name, "" for a
            single one.
        trains_copies: the optimizers hold float32 copies of the models' parameters, which the program keeps
            equal: gradients and weights are the models' own then.

    Attributes:
        tensors: the optimizers' parameters.
        parts: by parameter id; several may be in one tensor, a flat parameter of FSDP1.
        own_gradients: one per framework that reduces some gradients; belongs to the driver.
        not_covered: unknown shards and rank coordinates.
        has_replicas: other ranks execute the same code on other data.
        pipeline_group: the ranks that have the model's other stages.
    """

    why_no_pass = "step() was called without a closure"

    def __init__(
        self,
        optimizers: list[Optimizer],
        models: dict[str, torch.nn.Module],
        *,
        trains_copies: bool = False,
    ) -> None:
        super().__init__()
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._trains_copies = trains_copies
        self._models = models
        self.models = models.values()
        self.own_gradients: list[OwnGradients] = []
        self.not_covered: list[str] = []
        self.pipeline_group = group_of(models.values())
        self.left_out: set[torch.Tensor] = set()  # parameters whose gradients belong to another step
        self.kept_gradients: dict[
            int, torch.Tensor
        ] = {}  # by the parameter's id: scanned in place of its own
        self.has_own_state = False  # the program has registered further state of its passes
        self.written_by_program: Callable[[], list[torch.Tensor]] = list  # parameters, before the step
        self.loaded_last: Callable[[], list[torch.Tensor]] = list  # parameters
        self.has_changed_weights = False  # the weights differ from those that the step used
        kept = {t: p for each in models.values() for t, p in fsdp2.whole_and_sharded(each)}
        self._names = {kept.get(p, p): n for n, p in self._named("named_parameters")}
        self._are_in_place = False  # whether `check_parameters` has run
        # (parameter's id, first element): its version when the first step began, already bad
        self._bad_at_start: dict[tuple[int, int], int] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that live, the latest last."""
        return [each for reference in self._optimizers if (each := reference()) is not None]

    def use(self, optimizer: Optimizer) -> None:
        """``optimizer`` is the latest from now on."""
        if self._optimizers[-1]() is not optimizer:
            others = [each for each in self.optimizers if each is not optimizer]
            self._optimizers = [weakref.ref(each) for each in (*others, optimizer)]

    def parameter_map(self) -> _C.ParameterMap:
        """From the concatenated groups as they are now; position = parameter id."""
        groups = [list(group["params"]) for each in self.optimizers for group in each.param_groups]
        if self._trains_copies:
            groups = [[p for p in self._names if p.requires_grad]]
        self.tensors: list[torch.Tensor] = list(dict.fromkeys(p for group in groups for p in group))
        if self.tensors and self._names and self._names.keys().isdisjoint(self.tensors):
            raise _C.UsageError(
                "the optimizer holds none of the model's parameters: it was created for another model, or "
                "before they were replaced (by fully_shard, to_empty, load_state_dict(assign=True) ...). "
                "Shard and load the model first, then create the optimizer"
            )
        fallback = {p: f"group{g}.{i}" for g, group in enumerate(groups) for i, p in enumerate(group)}
        self.not_covered.clear()
        by_fsdp2 = self._parts_by_tensor("fully_shard", fsdp2.parts_of)
        self._were_in_flat_parameters = self._in_flat_parameters()
        by_fsdp1 = self._parts_by_tensor("FullyShardedDataParallel", fsdp1.parts_of)
        self.parts = [
            part for p in self.tensors for part in by_fsdp2.get(p) or by_fsdp1.get(p) or [whole_part(p)]
        ]
        self._ids = frozenset(map(id, self.tensors))
        self._are_whole = len(self.parts) == len(self.tensors) and all(map(_is_whole, self.parts))
        numbers: dict[torch.Tensor, list[int]] = {}
        for index, part in enumerate(self.parts):
            numbers.setdefault(part.tensor, []).append(index)
        self.by_fsdp2 = {p: numbers[p][0] for p in self.tensors if p in by_fsdp2}
        self.by_fsdp1 = {p: numbers[p] for p in self.tensors if p in by_fsdp1}
        self.by_others = {numbers[p][0]: p for p in self.tensors if p not in by_fsdp2 and p not in by_fsdp1}
        coordinates = self._coordinates()
        infos = []
        for index, part in enumerate(self.parts):
            info = _C.ParameterInfo()
            info.id = index
            info.raw_name = part.name or self._names.get(part.tensor, fallback[part.tensor])
            info.name = info.raw_name if len(self._models) > 1 else shown(info.raw_name)
            info.dtype = dtype_name(part.tensor.dtype)
            info.is_tp_duplicate = coordinates.tp.size > 1 and not part.is_tp_sharded
            part.describe(info)
            infos.append(info)
        self.parameters = [(i.name, p.view(p.tensor)) for i, p in zip(infos, self.parts, strict=True)]
        self.buffers.follow(self.names_of_modules())
        self.has_replicas = coordinates.dp.size * coordinates.cp.size > 1
        self.gradient_phase = "grad_reduced" if self.has_replicas else "grad_local"
        return _C.ParameterMap(coordinates, infos)

    def used_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters whose gradients an update uses."""
        return self.tensors if self._trains_copies else parameters_of(optimizer)

    def names_of_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((shown_module(path), module) for path, module in self._named("named_modules"))

    def _parts_by_tensor(
        self, framework: str, parts_of: Callable[[torch.nn.Module], Iterable[Part]]
    ) -> dict[torch.Tensor, list[Part]]:
        parts: dict[torch.Tensor, list[Part]] = {}
        try:
            for model, module in self._models.items():
                for part in parts_of(module):
                    if part.name is not None:
                        part.name = _below(model, part.name)
                    parts.setdefault(part.tensor, []).append(part)
        except AttributeError as error:  # private attributes, which a release of torch may rename
            self.not_covered.append(f"where the shards of {framework} lie (unknown for this torch: {error})")
            return {}
        return parts

    def _coordinates(self) -> _C.RankCoordinates:
        if is_distributed():
            coordinates, unknown = coordinates_of(self.tensors, self.pipeline_group)
            self.not_covered += [unknown] if unknown else []
        else:
            coordinates = _C.data_parallel_coordinates(0, 1)
        if self.tensors:
            coordinates.device = device_description(self.tensors[0].device)
        return coordinates

    def gradients(self) -> Views:
        if self.kept_gradients:
            kept = [(i, p) for i, p in enumerate(self.parts) if id(p.tensor) in self.kept_gradients]
            return [i for i, _ in kept], [p.view(self.kept_gradients[id(p.tensor)]) for _, p in kept]
        if self._are_whole and not self.left_out:
            return _C.gradients_of(self.tensors)
        found = [
            (i, part.view(part.tensor.grad))
            for i, part in enumerate(self.parts)
            if part.tensor.grad is not None and part.tensor not in self.left_out
        ]
        return [i for i, _ in found], [gradient for _, gradient in found]

    def held_among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the optimizers hold."""
        return [each for each in tensors if id(each) in self._ids]  # to hash a tensor is a call

    def weights(self) -> Views:
        return ([], []) if self.has_changed_weights else self.weights_now()

    def weights_now(self) -> Views:
        return list(range(len(self.parts))), [part.view(part.tensor) for part in self.parts]

    def optimizer_state(self, ids: list[int]) -> OptimizerTensors:
        latest = {p: each for each in self.optimizers for p in self.used_by(each)}
        found = [(i, self.parts[i], latest.get(self.parts[i].tensor)) for i in ids]
        used = [(i, part, optimizer) for i, part, optimizer in found if optimizer is not None]
        tensors = [
            (i, name, part.view(value), part.begin)
            for i, part, optimizer in used
            for name, value in state_tensors(optimizer, part.tensor)
        ]
        numbers = [
            (i, name, value, 0)
            for i, part, optimizer in used
            for name, value in state_numbers(optimizer, part.tensor)
        ]
        starts = [
            part.tensor
            for part in (self.parts[i] for i in ids)
            if self._bad_at_start.get((id(part.tensor), part.begin)) == local_part(part.tensor)._version
        ]
        writers = {
            "written_by_program": set(self.written_by_program()),
            "loaded_last": set(self.loaded_last()),
            "bad_at_start": set(starts),
        }
        marks = [
            (i, name, torch.ones(()), 0)
            for name, written in writers.items()
            for i in ids
            if self.parts[i].tensor in written
        ]
        return tensors + numbers + marks

    def look_at_start(self) -> None:
        """When the first step begins: which weights are bad already. Waits for the device."""
        for part in self.parts:
            stats = _C.scan_one(part.view(part.tensor))
            if stats is not None and not stats.is_finite:
                self._bad_at_start[id(part.tensor), part.begin] = local_part(part.tensor)._version

    def skips_bad_updates(self) -> bool:
        """A loss scaler that has seen an overflow, or will, leaves out the update."""
        return self.loss_scale is not None and self.loss_scale() is not None

    def check_parameters(self) -> None:
        """Before the first step: checks that the models still have the optimizers' parameters, unchanged.

        Raises:
            nanlocator.UsageError: if parameters were replaced or sharded.
        """
        if self._are_in_place:
            return
        self._are_in_place = True
        held = held_parameters(self.models)
        ours = set(self.tensors)
        lost = [name for p, name in self._names.items() if p in ours and p not in held]
        if lost:
            raise _C.UsageError(
                f"the parameter {shown(lost[0])} was replaced (by fully_shard, to_empty, "
                "load_state_dict(assign=True) ...) after the model and its optimizer were passed to "
                "nanlocator: the optimizer updates a tensor that the model no longer uses. Shard and load "
                "the model first, then create the optimizer, then call nanlocator"
            )
        # With use_orig_params an optimizer may hold them in spite of that.
        late = self._in_flat_parameters() & ours - self._were_in_flat_parameters
        names = [name for p, name in self._names.items() if p in late]
        if names:
            raise _C.UsageError(
                f"the parameter {shown(names[0])} was sharded (by FullyShardedDataParallel) after the model "
                "and its optimizer were passed to nanlocator: its gradients are no longer whole. Shard the "
                "model first, then create the optimizer, then call nanlocator"
            )

    def _in_flat_parameters(self) -> set[torch.Tensor]:
        return {p for model in self.models for p in fsdp1.sharded_parameters(model)}

    def parameters_now(self) -> Named:
        """FSDP2 may replace a shard's tensor (reset_sharded_param), as torch before 2.10 does in the first
        forward if ranks have shards of different sizes. FSDP1 puts whole weights into its tensors while a
        step runs, so for them this returns the views from when the map was made."""
        return [
            (name, part.view(part.tensor) if part.tensor in self.by_fsdp2 else tensor)
            for (name, tensor), part in zip(self.parameters, self.parts, strict=True)
        ]

    def model_tensors(self) -> tuple[Named, Named]:
        attributes = [
            (_below(model, name), tensor)
            for model, module in self._models.items()
            for name, tensor in tensor_attributes(module)
        ]
        return _local(self._named("named_parameters")), _local([*self._named("named_buffers"), *attributes])

    def module_hooks(self, watch: ModuleObserver | None) -> list[ModuleHooks]:
        return [
            ModuleHooks(model, watch, functools.partial(_below, name) if name else None)
            for name, model in self._models.items()
        ]

    def _named(self, kind: str) -> Iterator[tuple[str, Any]]:
        for model, module in self._models.items():
            for name, each in getattr(module, kind)():
                yield _below(model, name), each


class PlainDriver(Driver):
    """Also follows each rank's own gradients, if a known framework reduces them over the ranks."""

    adapter: PlainAdapter

    def __init__(
        self, adapter: PlainAdapter, options: _C.LocatorOptions, connection: RankConnection | None
    ) -> None:
        super().__init__(adapter, options, connection)
        self._pipeline: Pipeline | None = None
        self._has_begun = False
        if options.level == "boundaries" and connection is not None:
            self.follow_boundaries(Boundaries(None, reads_gathered=True))
        self._follow_reduction()

    def pipeline_of(self, schedule: Any) -> Pipeline | None:
        """The pipeline of the schedule that drives this rank's stages, one at a time; None if it is
        unknown."""
        if not is_known(schedule):
            unknown = f"steps of a {type(schedule).__name__} (this torch executes them in an unknown way)"
            self.locator.add_not_covered([unknown])
            return None
        if self._pipeline is None or self._pipeline.schedule is not schedule:
            self._leave_pipeline()
            self._pipeline = Pipeline(schedule, self.boundaries)
            self._engine.watch(self._pipeline.boundaries.watch)
            if self.adapter.pipeline_group is not self._pipeline.group:  # this rank's place has changed
                self.adapter.pipeline_group = self._pipeline.group
                self.take_parameters_again()
        return self._pipeline

    def _leave_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.remove()
        self._pipeline = None

    def _follow_reduction(self) -> None:
        adapter, locator = self.adapter, self.locator
        scans = self._scans = LocalScans(self, lambda uncovered: locator.add_not_covered([uncovered]))
        for each in adapter.not_covered:
            scans.say_uncovered(each)
        if adapter.gradient_phase == "grad_local":  # no rank to reduce with
            return
        own = adapter.own_gradients
        if adapter.by_fsdp2:
            own.append(fsdp2.WholeGradients(adapter.by_fsdp2, scans))
        if adapter.by_fsdp1:
            own.append(fsdp1.WholeGradients(adapter.by_fsdp1, adapter.models, scans))
        if adapter.by_others:
            own.append(LocalGradients(adapter.by_others, scans))

    def _leave_reduction(self) -> None:
        while self.adapter.own_gradients:
            self.adapter.own_gradients.pop().remove()

    def _begin_gradients(self) -> None:
        for each in self.adapter.own_gradients:
            each.begin_step()

    def take_parameters_again(self) -> None:
        super().take_parameters_again()
        self._leave_reduction()
        self._follow_reduction()

    def begin_pass(self, step_pass: Pass, iteration: int | None = None) -> None:
        self.adapter.check_parameters()
        if not self._has_begun:
            self._has_begun = True
            self.adapter.look_at_start()
        self._begin_gradients()
        super().begin_pass(step_pass, iteration)

    def scan_and_agree(self) -> _C.Decision:
        self.adapter.check_parameters()
        if self.boundaries is not None and not self.is_in_pass:
            self.boundaries.missed_a_pass()
            self._scans.say_uncovered("what ranks exchange, because step() is called without a closure")
        return super().scan_and_agree()

    def forget_gradients(self) -> None:
        self._begin_gradients()
        self._engine.forget_gradients()

    def end_step(self) -> _C.Decision:
        self._begin_gradients()
        return super().end_step()

    def remove(self) -> None:
        super().remove()
        self._leave_reduction()
        self._leave_pipeline()


class PlainPass(Pass):
    """A pass whose gradients may have existed before it began."""

    def __init__(self, adapter: PlainAdapter) -> None:
        self._adapter = adapter
        self._had_gradient, _ = _C.gradients_of(adapter.tensors)

    def clear_gradients(self) -> None:
        had = set(self._had_gradient)
        for number, parameter in enumerate(self._adapter.tensors):
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad) if number in had else None
        for model in self._adapter.models:
            fsdp2.forget_unreduced(model)
        for each in self._adapter.own_gradients:
            each.begin_step()


def plain_driver(
    adapter: PlainAdapter,
    options: _C.LocatorOptions,
    grad_scaler: GradScaler | None,
    loss_scale: Callable[[GradScaler], LossScale | None],
) -> PlainDriver:
    """``loss_scale`` is called with an enabled scaler."""
    if grad_scaler is not None and grad_scaler.is_enabled():
        adapter.loss_scale = functools.partial(loss_scale, grad_scaler)
    driver = PlainDriver(adapter, options, connect(options))
    if grad_scaler is not None:
        driver.add_state("the loss scaler", ScalerState(grad_scaler))
    return driver


def scale_in_gradients(scaler: GradScaler) -> LossScale:
    """For gradients that the scaler has not unscaled. Dividing by a scale of 1 or more makes no Inf of a
    finite value; if the scale is below 1, it is not the cause of an overflow."""
    scale = scaler.get_scale()
    return scale, scale >= 1.0, True


def overflow_seen(scaler: GradScaler, *, optimizer_id: int) -> LossScale | None:
    """Returns the loss scale if the scaler has found Inf in the gradients of the optimizer with this id, so
    that it will leave out the step and lower the scale. If the scale is below 1, it is not the cause of the
    overflow. Gradients are scanned unscaled."""
    state = scaler._per_optimizer_states[optimizer_id]
    if not any(found.item() for found in state["found_inf_per_device"].values()):
        return None
    scale = scaler.get_scale()
    return scale, scale >= 1.0, False


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def held_parameters(modules: Iterable[torch.nn.Module]) -> set[torch.Tensor]:
    """The parameters that an optimizer of these modules would hold, even while the modules hold
    replacements."""
    return {
        p
        for each in modules
        for p in (*each.parameters(), *fsdp2.sharded_parameters(each), *fsdp1.sharded_parameters(each))
    }


def are_in_shards(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a forward of these modules exchanges data between ranks, judging by their parameters."""
    return any(
        hasattr(p, "device_mesh") or next(fsdp1.handles_of(each), None) is not None
        for each in modules
        for p in held_parameters([each])
    )


def _is_whole(part: Part) -> bool:
    """Whether the gradient of its tensor is its own as it is."""
    return part.view is local_part and local_part(part.tensor) is part.tensor


def _below(model: str, name: str) -> str:
    """With several models, the model's name precedes the names in it."""
    if not model:
        return name
    name = shown_module(name)
    return f"{model}.{name}" if name else model


def _local(tensors: Iterable[tuple[str, torch.Tensor]]) -> Named:
    return [(shown(name), local_part(tensor)) for name, tensor in tensors]
