"""Planted faults: each really computes or writes a NaN or Inf at one known place of a training step.

A fault is attached to a Trainer on every rank and acts on one of them. What it did, with exact coordinates,
is appended to `trainer.planted`: that record is what tests compare a verdict with. Attach faults after
nanlocator is installed: they wrap the instances that are in place then, so that the value is there before
nanlocator looks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
import torch.distributed as dist
from gpt_training import Trainer

FAULTS: dict[str, type[Fault]] = {}


def make_fault(name: str, **options) -> Fault:
    """`make_fault("bad_weight", rank=3, element=7)`. Raises ValueError with the names or fields there are."""
    if name not in FAULTS:
        raise ValueError(f"no fault is called {name!r}; there are: {', '.join(FAULTS)}")
    fields = {field.name for field in dataclasses.fields(FAULTS[name])}
    unknown = set(options) - fields
    if unknown:
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}; it has: {', '.join(sorted(fields))}")
    return FAULTS[name](**options)


def attach(faults: list[Fault], trainer: Trainer) -> None:
    """Attaches all; where one cannot be, every rank raises the same ValueError instead of waiting for it."""
    problem = ""
    try:
        for fault in faults:
            if fault.concerns(trainer):
                fault.attach(trainer)
    except ValueError as error:
        problem = f"rank {dist.get_rank()}: {error}"
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))


@dataclasses.dataclass
class Fault:
    """What all faults have: the global rank they act on and the iteration (from 1)."""

    rank: int = 0
    iteration: int = 3

    name: ClassVar[str]
    description: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if cls.name:
            FAULTS[cls.name] = cls

    def concerns(self, trainer: Trainer) -> bool:
        return self.rank == dist.get_rank()

    def attach(self, trainer: Trainer) -> None:
        """Called where `concerns`. Raises ValueError where the fault does not fit this model or rank."""
        raise NotImplementedError

    def _record(self, trainer: Trainer, **facts) -> None:
        trainer.planted.append(
            {"fault": self.name, "iteration": trainer.iteration, **trainer.coordinates, **facts}
        )

    def _parameter(self, trainer: Trainer, name: str) -> torch.nn.Parameter:
        if name not in trainer.parameters:
            raise ValueError(
                f"{self.name}: no parameter {name!r} here; this rank has {', '.join(trainer.parameters)}"
            )
        return trainer.parameters[name]


def _element(parameter: torch.Tensor, element: int) -> int:
    if not 0 <= element < parameter.numel():
        raise ValueError(f"element {element} of a tensor with {parameter.numel()} elements")
    return element


def before_gradient_reduction(trainer: Trainer, action) -> None:
    """Calls `action(group)` on this rank when the last gradient of a bucket group is complete, just before
    the group's data-parallel collective, once for each time the collective is launched.

    One place serves all configurations: start_grad_sync is called from finish_grad_sync (no overlap; first
    iteration) or from the hook of the group's last gradient (overlap), always through the instance. A
    function set on the instance therefore runs before whatever a tool put on the class or the instance.
    """
    for group in trainer.bucket_groups():
        inner = group.start_grad_sync

        def start(*args, group=group, inner=inner, **kwargs):
            # Megatron's own guard: in the first iteration the collective may be on its way already.
            if not (group.is_first_batch and group.grad_reduce_handle is not None):
                action(group)
            return inner(*args, **kwargs)

        group.start_grad_sync = start


def after_gradient_reduction(trainer: Trainer, action) -> None:
    """Calls `action(group)` on this rank when the group's collective has ended and been waited for."""
    for group in trainer.bucket_groups():
        inner = group.finish_grad_sync

        def finish(*args, group=group, inner=inner, **kwargs):
            result = inner(*args, **kwargs)
            action(group)
            return result

        group.finish_grad_sync = finish


@dataclasses.dataclass
class MainGradElement(Fault):
    name = "main_grad_element"
    description = "one element of param.main_grad is overwritten just before the data-parallel reduction"

    parameter: str = "decoder.layers.0.mlp.linear_fc1.weight"
    element: int = 17
    value: float = math.nan

    def attach(self, trainer: Trainer) -> None:
        parameter = self._parameter(trainer, self.parameter)
        element = _element(parameter, self.element)

        def plant(group) -> None:
            if trainer.iteration == self.iteration and parameter in group.params:
                parameter.main_grad.view(-1)[element] = self.value
                self._record(
                    trainer,
                    phase="grad_local",
                    parameter=self.parameter,
                    shape=list(parameter.shape),
                    element=element,
                    value=str(self.value),
                )

        before_gradient_reduction(trainer, plant)


@dataclasses.dataclass
class TpDuplicatedLayernorm(MainGradElement):
    name = "tp_duplicated_layernorm"
    description = (
        "the gradient of a layer norm on tensor-parallel rank 1 (Megatron leaves it out of the norm: "
        "the norm stays finite, the step is called successful, the weight becomes NaN)"
    )

    rank: int = 1
    parameter: str = "decoder.layers.1.input_layernorm.weight"

    def attach(self, trainer: Trainer) -> None:
        if trainer.coordinates["tp"] == 0:
            raise ValueError(f"{self.name}: rank {self.rank} has tp rank 0, whose norm weights do count")
        super().attach(trainer)


@dataclasses.dataclass
class AfterReduction(Fault):
    name = "after_reduction"
    description = "one element of the reduced gradient on one rank, as a faulty collective would leave it"

    parameter: str = "decoder.layers.0.mlp.linear_fc1.weight"
    element: int = 5  # counted from the first element that this rank's optimizer owns
    value: float = math.nan

    def attach(self, trainer: Trainer) -> None:
        parameter = self._parameter(trainer, self.parameter)
        start, end = trainer.owned_range(parameter)
        if self.element >= end - start:
            raise ValueError(f"{self.name}: this rank owns elements [{start}, {end}) of {self.parameter}")

        def plant(group) -> None:
            if trainer.iteration == self.iteration and parameter in group.params:
                parameter.main_grad.view(-1)[start + self.element] = self.value
                self._record(
                    trainer,
                    phase="grad_reduced",
                    parameter=self.parameter,
                    shape=list(parameter.shape),
                    element=start + self.element,
                    value=str(self.value),
                )

        after_gradient_reduction(trainer, plant)


@dataclasses.dataclass
class _OperatorFault(Fault):
    """Inside a tensor-parallel region of one layer, for one microbatch."""

    name = ""  # abstract: not in the registry

    layer: int = 1
    microbatch: int = 1
    region: str = "mlp"  # mlp: between linear_fc1 and linear_fc2; attention: the core attention's output
    element: int = 3

    def attach(self, trainer: Trainer) -> None:
        layer = trainer.layer(self.layer)
        if layer is None:
            raise ValueError(f"{self.name}: this rank does not hold layer {self.layer}")
        if self.region == "mlp":
            holder, attribute, module = layer.mlp, "activation_func", "mlp"
        elif self.region == "attention":
            holder, attribute = layer.self_attention.core_attention, "forward"
            module = "self_attention.core_attention"
        else:
            raise ValueError(f"{self.name}: region {self.region!r}, expected mlp or attention")
        inner = getattr(holder, attribute)

        def computed(*args, **kwargs):
            output = inner(*args, **kwargs)
            if trainer.iteration == self.iteration and trainer.microbatch == self.microbatch:
                output = self.spoil(output, _element(output, self.element))
                self._record(
                    trainer,
                    phase=self.phase,
                    microbatch=self.microbatch,
                    module=f"decoder.layers.{self.layer}.{module}",
                    operator=self.operator,
                )
            return output

        setattr(holder, attribute, computed)

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        raise NotImplementedError


@dataclasses.dataclass
class ForwardOperator(_OperatorFault):
    name = "forward_operator"
    description = "aten::log of one negative number inside a tensor-parallel region, in forward"
    phase: ClassVar[str] = "forward"
    operator: ClassVar[str] = "aten::log"

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        argument = torch.full_like(output, math.e)
        argument.view(-1)[element] = -1.0
        return output * torch.log(argument)


@dataclasses.dataclass
class BackwardOperator(_OperatorFault):
    name = "backward_operator"
    description = "the derivative of a square root at an exact zero, 0/0 in the backward of aten::sqrt"
    phase: ClassVar[str] = "backward"
    operator: ClassVar[str] = "aten::sqrt"

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        # sqrt(x - x.detach()) is 0 and harmless in forward. Times 0, so that the derivative is 0 / (2 * 0).
        picked = torch.zeros_like(output)
        picked.view(-1)[element] = 1.0
        difference = (output - output.detach()) + (1.0 - picked)  # exactly 0 at `element`, 1 elsewhere
        return output + torch.sqrt(difference) * 0.0


@dataclasses.dataclass
class LossZeroOverZero(Fault):
    name = "loss_zero_over_zero"
    description = "a microbatch without a single valid label on the data-parallel replica of `rank`: loss 0/0"

    microbatch: int = 1

    def concerns(self, trainer: Trainer) -> bool:
        return trainer.coordinates_of(self.rank)["dp"] == trainer.coordinates["dp"]

    def attach(self, trainer: Trainer) -> None:
        inner = trainer.draw_batch

        def draw_batch(iteration: int, microbatch: int) -> dict:
            batch = inner(iteration, microbatch)
            if (iteration, microbatch) == (self.iteration, self.microbatch):
                batch["loss_mask"].zero_()
                self._record(trainer, phase="loss", microbatch=microbatch)
            return batch

        trainer.draw_batch = draw_batch


@dataclasses.dataclass
class OptimizerUpdate(Fault):
    name = "optimizer_update"
    description = "Adam's second moment of one element is negative: its square root makes the weight NaN"

    parameter: str = "decoder.layers.0.mlp.linear_fc2.weight"
    element: int = 2  # counted from the first element that this rank's optimizer owns

    def attach(self, trainer: Trainer) -> None:
        parameter = self._parameter(trainer, self.parameter)
        start, end = trainer.owned_range(parameter)
        if self.element >= end - start:
            raise ValueError(f"{self.name}: this rank owns elements [{start}, {end}) of {self.parameter}")
        if self.iteration < 2:
            raise ValueError(f"{self.name}: Adam has no second moment before iteration 2")
        (megatron_optimizer,) = trainer.optimizer.chained_optimizers
        adam = megatron_optimizer.optimizer
        inner = adam.step

        def step(*args, **kwargs):
            if trainer.iteration == self.iteration:
                updated = trainer.optimizer_parameter(parameter)
                adam.state[updated]["exp_avg_sq"].view(-1)[self.element] = -1.0
                self._record(
                    trainer,
                    phase="params_after",
                    parameter=self.parameter,
                    shape=list(parameter.shape),
                    element=start + self.element,
                )
            return inner(*args, **kwargs)

        adam.step = step


@dataclasses.dataclass
class BadWeight(Fault):
    name = "bad_weight"
    description = "one element of a weight is overwritten before the iteration's first forward"

    parameter: str = "decoder.layers.0.mlp.linear_fc1.weight"
    element: int = 11
    value: float = math.nan

    def attach(self, trainer: Trainer) -> None:
        parameter = self._parameter(trainer, self.parameter)
        element = _element(parameter, self.element)

        def plant() -> None:
            if trainer.iteration == self.iteration:
                parameter.data.view(-1)[element] = self.value
                self._record(
                    trainer,
                    phase="params_before",
                    parameter=self.parameter,
                    shape=list(parameter.shape),
                    element=element,
                    value=str(self.value),
                )

        trainer.at_iteration_start.append(plant)


@dataclasses.dataclass
class LargeGradients(Fault):
    name = "large_gradients"
    description = "all gradients of one rank are multiplied: each stays finite, the sum of squares does not"

    factor: float = 1e25

    def attach(self, trainer: Trainer) -> None:
        def plant(group) -> None:
            if trainer.iteration == self.iteration:
                for bucket in group.buckets:
                    bucket.grad_data.mul_(self.factor)
                self._record(trainer, phase="grad_local", absmax=_absmax(group))

        before_gradient_reduction(trainer, plant)


def _absmax(group) -> float:
    return max(float(bucket.grad_data.abs().max()) for bucket in group.buckets)
