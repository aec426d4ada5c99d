"""The adapter of plain PyTorch: gradients are ``parameter.grad``, and one model computes them.

``LocatingOptimizer`` and the Trainer callback of ``nanlocator.transformers`` use it."""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.ddp import LocalGradients
from nanlocator.driver import (
    Adapter,
    Driver,
    LossScale,
    Named,
    OptimizerTensors,
    Pass,
    Views,
    state_tensors,
)
from nanlocator.modules import ModuleHooks, local_part, tensor_attributes
from nanlocator.rerun import ScalerState
from nanlocator.session import RankConnection, device_description, dtype_name, is_distributed


class PlainAdapter(Adapter):
    """Args:
    optimizers: their ``param_groups`` are the parameters, in their order.
    models: name them, and have the modules and buffers; each under a name of its own, "" for an only one.
    """

    why_no_pass = "step() was called without a closure"

    def __init__(self, optimizers: list[Optimizer], models: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.gradient_phase = "grad_reduced" if is_distributed() else "grad_local"
        self._optimizers = optimizers
        self._models = models
        self.local_gradients: LocalGradients | None = None
        self.left_out: set[torch.Tensor] = set()  # parameters whose gradients belong to another step
        self._names = {p: n for n, p in self._named("named_parameters")}

    def parameter_map(self) -> "_C.ParameterMap":
        """Of the concatenated groups as they are now; position = parameter id."""
        groups = [list(group["params"]) for each in self._optimizers for group in each.param_groups]
        self.tensors: list[torch.nn.Parameter] = list(dict.fromkeys(p for group in groups for p in group))
        fallback = {p: f"group{g}.{i}" for g, group in enumerate(groups) for i, p in enumerate(group)}
        infos = []
        for index, parameter in enumerate(self.tensors):
            info = _C.ParameterInfo()
            info.id = index
            info.raw_name = self._names.get(parameter, fallback[parameter])
            info.name = info.raw_name if len(self._models) > 1 else _shown(info.raw_name)
            info.shape = list(parameter.shape)
            info.dtype = dtype_name(parameter.dtype)
            infos.append(info)
        self.parameters = [(i.name, local_part(p)) for i, p in zip(infos, self.tensors, strict=True)]
        self.buffers = _local(self._named("named_buffers"))
        rank, world = 0, 1
        if is_distributed():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        coordinates = _C.data_parallel_coordinates(rank, world)
        if self.tensors:
            coordinates.device = device_description(self.tensors[0].device)
        return _C.ParameterMap(coordinates, infos)

    def gradients(self) -> Views:
        found = [
            (i, local_part(p.grad))
            for i, p in enumerate(self.tensors)
            if p.grad is not None and p not in self.left_out
        ]
        return [i for i, _ in found], [gradient for _, gradient in found]

    def weights(self) -> Views:
        return list(range(len(self.tensors))), [local_part(p) for p in self.tensors]

    def optimizer_state(self, ids: list[int]) -> OptimizerTensors:
        return [
            (i, name, tensor, 0)
            for i in ids
            for optimizer in self._optimizers
            for name, tensor in state_tensors(optimizer, self.tensors[i])
        ]

    def model_tensors(self) -> tuple[Named, Named]:
        attributes = [
            (_below(model, name), tensor)
            for model, module in self._models.items()
            for name, tensor in tensor_attributes(module)
        ]
        return _local(self._named("named_parameters")), _local([*self._named("named_buffers"), *attributes])

    def module_hooks(self, watch: "_C.ModuleWatch | None") -> list[ModuleHooks]:
        return [
            ModuleHooks(model, watch, functools.partial(_below, name) if name else None)
            for name, model in self._models.items()
        ]

    def _named(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        for model, module in self._models.items():
            for name, tensor in getattr(module, kind)():
                yield _below(model, name), tensor


class PlainDriver(Driver):
    """And each rank's own gradients, where DistributedDataParallel reduces them."""

    adapter: PlainAdapter

    def __init__(
        self, adapter: PlainAdapter, options: "_C.LocatorOptions", connection: RankConnection | None
    ) -> None:
        super().__init__(adapter, options, connection)
        self._follow_reduction()

    def _follow_reduction(self) -> None:
        if not is_distributed():
            return
        locator = self.locator
        self.adapter.local_gradients = LocalGradients(
            self.adapter.tensors,
            self,
            lambda uncovered: locator.add_not_covered([uncovered]),
        )

    def _begin_gradients(self) -> None:
        if self.adapter.local_gradients is not None:
            self.adapter.local_gradients.begin_step()

    def take_parameters_again(self) -> None:
        super().take_parameters_again()
        if self.adapter.local_gradients is not None:
            self.adapter.local_gradients.remove()
        self._follow_reduction()

    def begin_pass(self, step_pass: Pass, iteration: int | None = None) -> None:
        self._begin_gradients()
        self._engine.begin_pass(step_pass, iteration)

    def forget_gradients(self) -> None:
        self._begin_gradients()
        self._engine.forget_gradients()

    def end_step(self) -> "_C.Decision":
        self._begin_gradients()
        return super().end_step()

    def remove(self) -> None:
        super().remove()
        if self.adapter.local_gradients is not None:
            self.adapter.local_gradients.remove()


class PlainPass(Pass):
    """A pass over gradients that may have been there before it began."""

    def __init__(self, adapter: PlainAdapter) -> None:
        self._adapter = adapter
        self._had_gradient = [
            p.grad is not None for p in adapter.tensors
        ]  # hashing them costs 3 times as much

    def clear_gradients(self) -> None:
        for parameter, had in zip(self._adapter.tensors, self._had_gradient, strict=True):
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad) if had else None
        if self._adapter.local_gradients is not None:
            self._adapter.local_gradients.begin_step()


def plain_driver(
    adapter: PlainAdapter,
    options: "_C.LocatorOptions",
    grad_scaler: "torch.amp.GradScaler | None",
    loss_scale: Callable[["torch.amp.GradScaler"], LossScale | None],
) -> Driver:
    """``loss_scale`` is asked of a scaler that is enabled."""
    if options.level == "boundaries":
        raise _C.UsageError(
            "level 'boundaries' watches what Megatron-Core's ranks send to each other; here use 'grads', "
            "'modules' or 'operators'"
        )
    if grad_scaler is not None and grad_scaler.is_enabled():
        adapter.loss_scale = functools.partial(loss_scale, grad_scaler)
    driver = PlainDriver(adapter, options, RankConnection() if is_distributed() else None)
    if grad_scaler is not None:
        driver.add_state("the loss scaler", ScalerState(grad_scaler))
    return driver


def scale_in_gradients(scaler: "torch.amp.GradScaler") -> LossScale:
    """It has not unscaled these gradients. Dividing by a scale of 1 or more makes no Inf of a finite value;
    below 1 they are not too large because of it."""
    scale = scaler.get_scale()
    return scale, scale >= 1.0, True


def overflow_seen(scaler: "torch.amp.GradScaler", *, optimizer_id: int) -> LossScale | None:
    """The loss scale, where the scaler has found Inf in the gradients of the optimizer with this id, will
    leave its step out and lower the scale. Below 1 the gradients are not too large because of it. Gradients
    are scanned unscaled."""
    state = scaler._per_optimizer_states[optimizer_id]
    if not any(found.item() for found in state["found_inf_per_device"].values()):
        return None
    scale = scaler.get_scale()
    return scale, scale >= 1.0, False


def _below(model: str, name: str) -> str:
    """Of several models each has its name before what is in it."""
    if not model:
        return name
    name = _shown(name) if name != "module" else ""
    return f"{model}.{name}" if name else model


def _shown(name: str) -> str:
    """Without what DistributedDataParallel puts before it."""
    return name.removeprefix("module.")


def _local(tensors: Iterable[tuple[str, torch.Tensor]]) -> Named:
    return [(_shown(name), local_part(tensor)) for name, tensor in tensors]
