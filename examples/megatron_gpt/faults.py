"""Planted faults: each really computes or writes a NaN or Inf at one known place of a training step.

A fault is attached to a Trainer on every rank and acts on one of them. It appends its effect, with exact
coordinates, to `trainer.planted`; tests compare verdicts with that record. Import this module before
nanlocator is installed (received data is corrupted below everything that scans it) and attach faults
afterwards (they wrap the instances that exist then, so that the value is there before nanlocator scans).

A step may be executed more than once, by Megatron's rerun state machine or by nanlocator. `repeats` is the
number of passes in which a fault acts: corrupted memory and transfers once, computations in all.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import context_attention
import torch
import torch.distributed as dist
from gpt_training import Trainer, local_tensor
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.transformer.moe.moe_layer import MoELayer
from passes import Passes

FAULTS: dict[str, type[Fault]] = {}


def make_fault(name: str, **options) -> Fault:
    """`make_fault("bad_weight", rank=3, element=7)`. Raises ValueError, which lists valid names or fields."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}; expected one of {', '.join(FAULTS)}")
    fields = {field.name for field in dataclasses.fields(FAULTS[name])}
    unknown = set(options) - fields
    if unknown:
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}, only {', '.join(sorted(fields))}")
    return FAULTS[name](**options)


def attach(faults: list[Fault], trainer: Trainer) -> None:
    """Attaches all. If one cannot be attached, every rank raises the same ValueError instead of waiting."""
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
    """Common to all faults: the global rank on which they act and the iteration (from 1)."""

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
        """Called if `concerns`. Raises ValueError if the fault does not fit this model or rank."""
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

    def _record_parameter(self, trainer: Trainer, name: str, element: int, **facts) -> None:
        parameter = trainer.parameters[name]
        shape, chunk = list(parameter.shape), trainer.chunk_of[name]
        self._record(trainer, parameter=name, chunk=chunk, shape=shape, element=element, **facts)


@dataclasses.dataclass
class _InPass(Fault):
    """Acts within forward-backward, in the first `repeats` passes over its iteration."""

    name = ""  # abstract: not in the registry

    repeats: int | None = 1  # None: in every pass

    def __post_init__(self) -> None:
        self._reached = Passes()

    def _pass_to_act_in(self, trainer: Trainer, place: object = None) -> int | None:
        """Call this whenever the fault's place is reached, once per pass. Returns the number of this pass
        (from 1) if the fault acts now, otherwise None. A fault with several places counts each of them."""
        if trainer.iteration != self.iteration:
            return None
        self._reached[place] += 1
        number = self._reached[place]
        return number if self.repeats is None or number <= self.repeats else None


def _element(parameter: torch.Tensor, element: int) -> int:
    if not 0 <= element < parameter.numel():
        raise ValueError(f"element {element} of a tensor with {parameter.numel()} elements")
    return element


def overwrite(tensor: torch.Tensor, element: int, value: float) -> None:
    """Writes over one element of a contiguous CPU tensor behind PyTorch's back: no operator runs, no version
    counter changes, as with broken memory or a broken link."""
    if not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor can be overwritten in memory")
    bits = {
        torch.float32: lambda: struct.pack("<f", value),
        torch.float16: lambda: struct.pack("<e", value),
        torch.bfloat16: lambda: struct.pack("<f", value)[2:],
    }[tensor.dtype]()
    ctypes.memmove(tensor.data_ptr() + _element(tensor, element) * len(bits), bits, len(bits))


# ---- the wire ----------------------------------------------------------------------------------------


class _Wire:
    """Data that this process receives. While it is set, `spoil` is called with the tensor of each transfer
    when the transfer is complete, before any waiting code sees it."""

    spoil: Callable[[torch.Tensor], None] | None = None

    @classmethod
    @contextlib.contextmanager
    def spoiled_by(cls, spoil: Callable[[torch.Tensor], None]) -> Iterator[None]:
        cls.spoil = spoil
        try:
            yield
        finally:
            cls.spoil = None


class _SpoiledTransfer(dist.Work):
    """A running transfer whose tensor is spoiled when its wait() returns."""

    def __init__(self, work: dist.Work, spoil: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._spoil: Callable[[], None] | None = spoil

    def wait(self, *args) -> bool:
        done = self._work.wait(*args)
        if self._spoil is not None:
            self._spoil()
            self._spoil = None
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _tap_the_wire() -> None:
    """Wraps the methods of ProcessGroup, where torch.distributed's functions end and nanlocator scans."""

    def tap(name: str, received: Callable[[tuple], torch.Tensor]) -> None:
        inner = getattr(dist.ProcessGroup, name, None)
        if inner is None:  # the name of another version
            return

        @functools.wraps(inner)
        def method(group, *args, **kwargs):
            work = inner(group, *args, **kwargs)
            if _Wire.spoil is None:
                return work
            return _SpoiledTransfer(work, functools.partial(_Wire.spoil, received(args)))

        setattr(dist.ProcessGroup, name, method)

    tap("recv", lambda args: args[0][0])
    tap("allreduce", lambda args: args[0][0])
    tap("_reduce_scatter_base", lambda args: args[0])
    tap("_allgather_base", lambda args: args[0])
    tap("reduce_scatter_single", lambda args: args[0])  # from torch 2.13 on
    tap("all_gather_single", lambda args: args[0])
    tap("alltoall_base", lambda args: args[0])
    tap("all_to_all_single", lambda args: args[0])  # from torch 2.13 on


_tap_the_wire()


# ---- gradients ---------------------------------------------------------------------------------------


Gradients = dict[str, torch.Tensor]  # by the name of the parameter


def before_gradient_reduction(trainer: Trainer, action: Callable[[Gradients], None]) -> None:
    """Calls `action` with the gradients of a bucket group on this rank when the last of them is complete,
    just before the group's data-parallel collective, once for each time the collective is launched.

    One place serves all configurations: start_grad_sync is called from finish_grad_sync (no overlap; first
    iteration) or from the hook of the group's last gradient (overlap), always through the instance. A
    function set on the instance therefore runs before wrappers that a tool put on the class or the instance.
    """
    if trainer.config.megatron_fsdp:
        return _before_sharded_reduction(trainer, action)
    name_of = {parameter: name for name, parameter in trainer.parameters.items()}
    for group in trainer.bucket_groups():
        inner = group.start_grad_sync

        def start(*args, group=group, inner=inner, **kwargs):
            # Megatron's own guard: in the first iteration the collective may be on its way already.
            is_first_batch = getattr(group, "is_first_batch", False)  # from Megatron-Core 0.16 on
            if not (is_first_batch and group.grad_reduce_handle is not None):
                action({name_of[parameter]: parameter.main_grad for parameter in group.params})
            return inner(*args, **kwargs)

        group.start_grad_sync = start


def _before_sharded_reduction(trainer: Trainer, action: Callable[[Gradients], None]) -> None:
    """For Megatron-FSDP: before gradients are sharded, once for each microbatch, with its gradients."""
    name_of = {parameter.orig_param: name for name, parameter in trainer.parameters.items()}
    for chunk in trainer.model_chunks:
        pipeline, groups = chunk.module.grad_reduce_pipeline, chunk.param_and_grad_buffer.parameter_groups
        inner = pipeline._bucket_group_gradient_reduce

        def reduce(buckets, *args, inner=inner, groups=groups, **kwargs):
            action({name_of[p]: p.get_main_grad() for bucket in buckets for p in groups[bucket].params})
            return inner(buckets, *args, **kwargs)

        pipeline._bucket_group_gradient_reduce = reduce


def after_gradient_reduction(trainer: Trainer, action: Callable[[Gradients], None]) -> None:
    """Calls `action` with this rank's gradients after waiting for their collective; with Megatron-FSDP, with
    its shards of them."""
    if trainer.config.megatron_fsdp:
        return _after_sharded_reduction(trainer, action)
    name_of = {parameter: name for name, parameter in trainer.parameters.items()}
    for group in trainer.bucket_groups():
        inner = group.finish_grad_sync

        def finish(*args, group=group, inner=inner, **kwargs):
            result = inner(*args, **kwargs)
            action({name_of[parameter]: parameter.main_grad for parameter in group.params})
            return result

        group.finish_grad_sync = finish


def _after_sharded_reduction(trainer: Trainer, action: Callable[[Gradients], None]) -> None:
    for chunk in trainer.model_chunks:
        inner = chunk.module.attach_grad_to_optimizer_state

        def attach(chunk=chunk, inner=inner):
            shards = {}
            for name, parameter in trainer.parameters.items():
                for group in chunk.param_and_grad_buffer.parameter_groups:
                    item = group.main_grad_buffer.param_idx.get(parameter.orig_param)
                    if item is not None:
                        shards[name] = group.main_grad_buffer.get_item(item, only_shard=True)
            action(shards)
            return inner()

        chunk.module.attach_grad_to_optimizer_state = attach


@dataclasses.dataclass
class MainGradElement(_InPass):
    name = "main_grad_element"
    description = "one element of param.main_grad is overwritten just before the data-parallel reduction"

    parameter: str = "decoder.layers.0.mlp.linear_fc1.weight"
    element: int = 17
    value: float = math.nan

    def attach(self, trainer: Trainer) -> None:
        parameter = self._parameter(trainer, self.parameter)
        element = _element(parameter, self.element)

        def plant(gradients: Gradients) -> None:
            if self.parameter not in gradients:
                return
            if number := self._pass_to_act_in(trainer):
                overwrite(gradients[self.parameter], element, self.value)
                self._record_parameter(
                    trainer,
                    self.parameter,
                    element,
                    phase="grad_local",
                    pass_number=number,
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
class _OnOwner(Fault):
    """Acts on the rank whose optimizer updates `element` of `parameter`: `rank` or, if gradients are sharded,
    the data-parallel peer of it that owns the element, in the same replica of the shards as `rank`."""

    name = ""  # abstract: not in the registry

    parameter: str = "decoder.layers.0.mlp.linear_fc1.weight"
    element: int = 5

    def concerns(self, trainer: Trainer) -> bool:
        own, named = trainer.coordinates, trainer.coordinates_of(self.rank)
        return all(own[axis] == named[axis] for axis in ("tp", "pp"))

    def attach(self, trainer: Trainer) -> None:
        if self.rank != dist.get_rank() and self.parameter not in trainer.parameters:
            return  # an expert that this peer does not have
        parameter = self._parameter(trainer, self.parameter)
        element = _element(parameter, self.element)
        if trainer.config.use_distributed_optimizer:
            start, end = trainer.owned_range(parameter)
            acts = start <= element < end and trainer.shares_shards_with(self.rank)
        else:
            acts = self.rank == dist.get_rank()
        if acts:
            self._plant(trainer, parameter)

    def _plant(self, trainer: Trainer, parameter: torch.nn.Parameter) -> None:
        raise NotImplementedError


@dataclasses.dataclass
class AfterReduction(_OnOwner, _InPass):
    name = "after_reduction"
    description = "one element of the reduced gradient on one rank, as a faulty collective would leave it"

    value: float = math.nan

    def _plant(self, trainer: Trainer, parameter: torch.nn.Parameter) -> None:
        start = trainer.owned_range(parameter)[0] if trainer.config.megatron_fsdp else 0

        def plant(gradients: Gradients) -> None:
            if self.parameter not in gradients:
                return
            if number := self._pass_to_act_in(trainer):
                overwrite(gradients[self.parameter], self.element - start, self.value)
                self._record_parameter(
                    trainer,
                    self.parameter,
                    self.element,
                    phase="grad_reduced",
                    pass_number=number,
                    value=str(self.value),
                )

        after_gradient_reduction(trainer, plant)


# ---- operators ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _InRegion(_InPass):
    """On the output of an operator inside a tensor-parallel region of one layer, for one microbatch.

    If layers are recomputed, a pass reaches the place twice; `only_in` restricts the fault to one of them.
    """

    name = ""  # abstract: not in the registry

    repeats: int | None = None
    layer: int = 1
    microbatch: int = 1
    # mlp: between linear_fc1 and linear_fc2; attention: the core attention's output; expert: as mlp, in one
    # expert of a layer of experts; mtp: as mlp, in the first layer of multi-token prediction
    region: str = "mlp"
    expert: int | None = None  # global number, for region expert
    element: int = 3  # in this rank's output of the operator; wraps around if an expert gets few tokens
    only_in: str | None = None  # forward or recompute

    def attach(self, trainer: Trainer) -> None:
        if self.only_in not in (None, "forward", "recompute"):
            raise ValueError(f"{self.name}: only_in is {self.only_in!r}, expected forward or recompute")
        holder, attribute, module = self._place(trainer)
        inner = getattr(holder, attribute)

        def computed(*args, **kwargs):
            output = inner(*args, **kwargs)
            if trainer.microbatch != self.microbatch or output.numel() == 0:
                return output
            where = "recompute" if trainer.direction == "backward" else "forward"
            number = self._pass_to_act_in(trainer, where)
            if number is None or self.only_in not in (None, where):
                return output
            element = self.element % output.numel()
            self._record(
                trainer,
                phase=self.phase,
                pass_number=number,
                is_recomputed=where == "recompute",
                microbatch=trainer.microbatch,
                chunk=trainer.chunk,
                module=module,
                shape=list(output.shape),
                element=element,
                **self.facts(),
            )
            return self.spoil(output, element)

        setattr(holder, attribute, computed)

    def _place(self, trainer: Trainer) -> tuple[torch.nn.Module, str, str]:
        """The owner and name of the function whose output is spoiled, and the module's name."""
        if self.region == "mtp":
            mtp = trainer.model_chunks[-1].get_submodule("module.mtp.layers.0")
            # The second name is Megatron-Core's from 0.17 on.
            name = "transformer_layer" if hasattr(mtp, "transformer_layer") else "mtp_model_layer"
            return getattr(mtp, name).mlp, "activation_func", f"mtp.layers.0.{name}.mlp"
        layer, name = trainer.layer(self.layer), f"decoder.layers.{self.layer}"
        if layer is None:
            raise ValueError(f"{self.name}: this rank does not hold layer {self.layer}")
        if self.region == "attention":
            return layer.self_attention.core_attention, "forward", f"{name}.self_attention.core_attention"
        if self.region == "mlp" and not isinstance(layer.mlp, MoELayer):
            return layer.mlp, "activation_func", f"{name}.mlp"
        if self.region == "expert" and trainer.expert(self.layer, self.expert) is not None:
            module = f"{name}.mlp.experts.local_experts.{self.expert}"
            return trainer.expert(self.layer, self.expert), "activation_func", module
        raise ValueError(
            f"{self.name}: no region {self.region!r} (expert {self.expert}) in layer {self.layer} of this "
            "rank; regions are attention, mlp or expert, and mtp"
        )

    def facts(self) -> dict:
        """Facts to record beside the place."""
        raise NotImplementedError

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        raise NotImplementedError


@dataclasses.dataclass
class _OfAKind(_InRegion):
    """Several faults of one class: `operators` maps each kind to the operator that it is born in."""

    name = ""  # abstract: not in the registry
    operators: ClassVar[dict[str, str]]

    kind: str = ""

    def attach(self, trainer: Trainer) -> None:
        if self.kind not in self.operators:
            raise ValueError(f"{self.name}: kind {self.kind!r}, expected {', '.join(self.operators)}")
        super().attach(trainer)

    def facts(self) -> dict:
        return {"kind": self.kind, "operator": self.operators[self.kind]}


@dataclasses.dataclass
class ForwardOperator(_OfAKind):
    name = "forward_operator"
    description = (
        "an operator in forward, kind: log (of a negative number), log_zero, softmax (of a fully masked "
        "row), exp (overflow)"
    )
    phase: ClassVar[str] = "forward"
    operators: ClassVar[dict[str, str]] = {
        "log": "aten::log",
        "log_zero": "aten::log",
        "softmax": "aten::_softmax",
        "exp": "aten::exp",
    }

    kind: str = "log"

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        if self.kind == "softmax":
            scores = torch.zeros_like(output)
            width = scores.shape[-1]
            scores.view(-1, width)[element // width] = -math.inf
            return output * (torch.softmax(scores, dim=-1) * width)
        if self.kind == "exp":
            exponent = torch.zeros_like(output)
            exponent.view(-1)[element] = 100.0  # e^100 is above the largest number of fp32, bf16 and fp16
            return output * torch.exp(exponent)
        argument = torch.full_like(output, math.e)
        argument.view(-1)[element] = -1.0 if self.kind == "log" else 0.0
        return output * torch.log(argument)


@dataclasses.dataclass
class BackwardOperator(_OfAKind):
    name = "backward_operator"
    description = (
        "a value born in backward, kind: sqrt (its derivative at an exact zero, 0/0), function (0/0 in the "
        "backward of a custom autograd Function), opaque_function (the same, outside the dispatcher)"
    )
    phase: ClassVar[str] = "backward"
    operators: ClassVar[dict[str, str]] = {
        "sqrt": "aten::sqrt",
        "function": "aten::div",
        "opaque_function": "PlantedFunctionBackward",
    }

    kind: str = "sqrt"

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        if self.kind != "sqrt":
            return PlantedFunction.apply(output, element, self.kind == "opaque_function")
        # sqrt(x - x.detach()) is 0 and harmless in forward. Times 0, so that the derivative is 0 / (2 * 0).
        picked = torch.zeros_like(output)
        picked.view(-1)[element] = 1.0
        difference = (output - output.detach()) + (1.0 - picked)  # exactly 0 at `element`, 1 elsewhere
        return output + torch.sqrt(difference) * 0.0


class PlantedFunction(torch.autograd.Function):
    """The identity, with a NaN in one element of its gradient."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, element: int, is_opaque: bool) -> torch.Tensor:
        ctx.element, ctx.is_opaque = element, is_opaque
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        if ctx.is_opaque:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            overwrite(gradient, ctx.element, math.nan)
            return gradient, None, None
        count = torch.ones_like(gradient, memory_format=torch.contiguous_format)
        count.view(-1)[ctx.element] = 0.0
        return gradient * (count / count), None, None


@dataclasses.dataclass
class ActivationElement(_InRegion):
    name = "activation_element"
    description = (
        "one element of an operator's output is overwritten in memory, once, inside a tensor-parallel "
        "region: the following all-reduce spreads it to innocent ranks"
    )
    phase: ClassVar[str] = "forward"

    repeats: int | None = 1
    value: float = math.nan

    def facts(self) -> dict:
        return {"value": str(self.value)}

    def spoil(self, output: torch.Tensor, element: int) -> torch.Tensor:
        overwrite(output, element, self.value)
        return output


# ---- transfers ---------------------------------------------------------------------------------------


def _check_direction(fault: PipelineReceive | Exchange | ContextParallelTransfer) -> None:
    if fault.direction not in ("forward", "backward"):
        raise ValueError(f"{fault.name}: direction {fault.direction!r}, expected forward or backward")


@dataclasses.dataclass
class PipelineReceive(_InPass):
    name = "pipeline_receive"
    description = (
        "one element of what a pipeline stage received (direction forward: activations of the stage before, "
        "backward: gradients of the stage after) is overwritten when the transfer is complete"
    )

    direction: str = "forward"
    microbatch: int = 1
    chunk: int = 0
    element: int = 3
    value: float = math.nan

    def attach(self, trainer: Trainer) -> None:
        _check_direction(self)
        expected = trainer.received_microbatches(self.direction)
        if trainer.config.pp == 1 or (self.microbatch, self.chunk) not in expected:
            raise ValueError(
                f"{self.name}: this rank receives no microbatch {self.microbatch} for chunk {self.chunk} "
                f"in {self.direction}"
            )
        argument = "tensor_recv_prev" if self.direction == "forward" else "tensor_recv_next"
        turn = expected.index((self.microbatch, self.chunk))
        received = 0

        def communicate(inner, **tensors):
            nonlocal received
            target = tensors[argument]
            if target is None or trainer.iteration != self.iteration:
                return inner(**tensors)
            received += 1
            if (received - 1) % len(expected) != turn or not (number := self._pass_to_act_in(trainer)):
                return inner(**tensors)

            def spoil(tensor: torch.Tensor) -> None:
                if tensor is target:  # one call may receive from both neighbours
                    overwrite(tensor, self.element, self.value)
                    self._record(
                        trainer,
                        phase=self.direction,
                        pass_number=number,
                        microbatch=self.microbatch,
                        chunk=self.chunk,
                        role="received",
                        shape=list(tensor.shape),
                        element=self.element,
                        value=str(self.value),
                    )

            with _Wire.spoiled_by(spoil):
                return inner(**tensors)

        for name in ("_p2p_ops", "_batched_p2p_ops"):  # both of P2PCommunicator._communicate
            inner = getattr(p2p_communication, name)
            setattr(p2p_communication, name, functools.partial(communicate, inner))


@dataclasses.dataclass
class TensorParallelReduction(_InPass):
    name = "tensor_parallel_reduction"
    description = (
        "one element of the result of a row-parallel layer's all-reduce (reduce-scatter with sequence "
        "parallelism) is overwritten on one rank when the collective is complete"
    )

    layer: int = 1
    microbatch: int = 1
    region: str = "mlp"  # mlp: linear_fc2; attention: linear_proj
    element: int = 3
    value: float = math.nan

    modules: ClassVar[dict[str, str]] = {"mlp": "mlp.linear_fc2", "attention": "self_attention.linear_proj"}

    def attach(self, trainer: Trainer) -> None:
        layer = trainer.layer(self.layer)
        if layer is None or trainer.config.tp == 1 or isinstance(layer.mlp, MoELayer):
            raise ValueError(f"{self.name}: no dense layer {self.layer} with tensor parallelism on this rank")
        if self.region not in self.modules:
            raise ValueError(f"{self.name}: region {self.region!r}, expected mlp or attention")
        name = self.modules[self.region]
        module = layer.get_submodule(name)
        inner = module.forward

        def forward(*args, **kwargs):
            if trainer.microbatch != self.microbatch or trainer.direction != "forward":
                return inner(*args, **kwargs)
            number = self._pass_to_act_in(trainer)
            if number is None:
                return inner(*args, **kwargs)

            def spoil(tensor: torch.Tensor) -> None:
                overwrite(tensor, self.element, self.value)
                self._record(
                    trainer,
                    phase="forward",
                    pass_number=number,
                    microbatch=self.microbatch,
                    chunk=trainer.chunk,
                    module=f"decoder.layers.{self.layer}.{name}",
                    shape=list(tensor.shape),
                    element=self.element,
                    value=str(self.value),
                )

            with _Wire.spoiled_by(spoil):
                return inner(*args, **kwargs)

        module.forward = forward


@dataclasses.dataclass
class TensorParallelGather(TensorParallelReduction):
    name = "tensor_parallel_gather"
    description = (
        "one element of what a column-parallel layer gathers under sequence parallelism is overwritten on "
        "one rank when the collective is complete"
    )

    modules: ClassVar[dict[str, str]] = {"mlp": "mlp.linear_fc1", "attention": "self_attention.linear_qkv"}

    def attach(self, trainer: Trainer) -> None:
        if not trainer.config.sequence_parallel:
            raise ValueError(f"{self.name}: nothing is gathered without sequence parallelism")
        super().attach(trainer)


@dataclasses.dataclass
class Exchange(_InPass):
    name = "exchange"
    description = (
        "one element of what a collective gives to one member, in forward or backward of one microbatch, is "
        "overwritten when the collective is complete; `turn`: the collective's number in that direction, "
        "those on integers left out"
    )

    repeats: int | None = None
    direction: str = "forward"
    microbatch: int = 1
    turn: int = 0
    element: int = 3
    value: float = math.nan

    def attach(self, trainer: Trainer) -> None:
        _check_direction(self)
        step = f"{self.direction}_step"
        inner = getattr(schedules, step)

        @functools.wraps(inner)
        def computed(*args, **kwargs):
            if trainer.iteration != self.iteration:
                return inner(*args, **kwargs)
            reached = itertools.count()

            def spoil(tensor: torch.Tensor) -> None:
                if trainer.microbatch != self.microbatch or not tensor.is_floating_point():
                    return
                if next(reached) != self.turn or not (number := self._pass_to_act_in(trainer)):
                    return
                overwrite(tensor, self.element, self.value)
                self._record(
                    trainer,
                    phase=self.direction,
                    pass_number=number,
                    microbatch=self.microbatch,
                    chunk=trainer.chunk,
                    shape=list(tensor.shape),
                    element=self.element,
                    value=str(self.value),
                )

            with _Wire.spoiled_by(spoil):
                return inner(*args, **kwargs)

        setattr(schedules, step, computed)


@dataclasses.dataclass
class OverflowingSum(_InPass):
    name = "overflowing_sum"
    description = (
        "one element of what each tensor-parallel rank of a replica gives to a row-parallel layer's sum is "
        "finite, and so large that the sum overflows"
    )

    repeats: int | None = None
    layer: int = 1
    microbatch: int = 1
    element: int = 3

    def concerns(self, trainer: Trainer) -> bool:
        own, named = trainer.coordinates, trainer.coordinates_of(self.rank)
        return all(own[axis] == named[axis] for axis in ("pp", "dp", "cp"))

    def attach(self, trainer: Trainer) -> None:
        layer = trainer.layer(self.layer)
        if layer is None or trainer.config.tp == 1 or isinstance(layer.mlp, MoELayer):
            raise ValueError(f"{self.name}: no dense layer {self.layer} with tensor parallelism on this rank")
        linear = layer.mlp.linear_fc2
        inner = linear._forward_impl

        def forward(*args, **kwargs):
            part = inner(*args, **kwargs)
            if trainer.microbatch != self.microbatch or trainer.direction != "forward":
                return part
            if not (number := self._pass_to_act_in(trainer)):
                return part
            large = torch.zeros_like(part)
            large.view(-1)[self.element] = 0.75 * torch.finfo(part.dtype).max
            part = part + large
            self._record(
                trainer,
                phase="forward",
                pass_number=number,
                microbatch=self.microbatch,
                chunk=trainer.chunk,
                module=f"decoder.layers.{self.layer}.mlp.linear_fc2",
                shape=list(part.shape),
                element=self.element,
                is_finite=bool(part.isfinite().all()),
            )
            return part

        linear._forward_impl = forward


@dataclasses.dataclass
class ContextParallelTransfer(_InPass):
    name = "context_parallel_transfer"
    description = (
        "one element of what the core attention receives from the other context-parallel ranks (direction "
        "forward: their tokens, backward: gradients of its own) is overwritten when the transfer is complete"
    )

    direction: str = "forward"
    layer: int = 1
    microbatch: int = 1
    element: int = 3
    value: float = math.nan

    exchanges: ClassVar[tuple[str, ...]] = ("all_gather", "reduce_scatter", "all_to_all", "pass_on")

    def attach(self, trainer: Trainer) -> None:
        config = trainer.config
        if config.cp == 1 or config.vp or config.recompute:
            raise ValueError(f"{self.name}: needs cp > 1, without vp and recompute")
        _check_direction(self)
        layers = [number for number in range(config.layers) if trainer.layer(number) is not None]
        if self.layer not in layers:
            raise ValueError(f"{self.name}: this rank does not hold layer {self.layer}")
        per_layer = {"all_gather": 1, "a2a": 2, "p2p": config.cp - 1}[config.cp_comm_type]
        order = layers if self.direction == "forward" else layers[::-1]
        turn, count = order.index(self.layer) * per_layer, len(layers) * per_layer
        reached = 0

        def exchange(inner, *args):
            nonlocal reached
            here = (trainer.iteration, trainer.microbatch, trainer.direction)
            if here != (self.iteration, self.microbatch, self.direction):
                return inner(*args)
            reached += 1
            if (reached - 1) % count != turn or not (number := self._pass_to_act_in(trainer)):
                return inner(*args)

            def spoil(tensor: torch.Tensor) -> None:
                overwrite(tensor, self.element, self.value)
                self._record(
                    trainer,
                    phase=self.direction,
                    pass_number=number,
                    microbatch=self.microbatch,
                    chunk=trainer.chunk,
                    module=f"decoder.layers.{self.layer}.self_attention.core_attention",
                    exchange=inner.__name__,
                    shape=list(tensor.shape),
                    element=self.element,
                    value=str(self.value),
                )

            with _Wire.spoiled_by(spoil):
                return inner(*args)

        for name in self.exchanges:
            inner = getattr(context_attention, name)
            setattr(context_attention, name, functools.wraps(inner)(functools.partial(exchange, inner)))


# ---- experts -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class ExpertWithoutTokens(_InPass):
    name = "expert_without_tokens"
    description = "no router sends a token of one microbatch to one expert: healthy, so no finding is allowed"

    repeats: int | None = None
    layer: int = 1
    microbatch: int = 1
    expert: int = 0  # global number

    def concerns(self, trainer: Trainer) -> bool:
        return trainer.layer(self.layer) is not None

    def attach(self, trainer: Trainer) -> None:
        mlp = trainer.layer(self.layer).mlp
        if not isinstance(mlp, MoELayer) or self.expert >= mlp.config.num_moe_experts:
            raise ValueError(f"{self.name}: layer {self.layer} has no expert {self.expert}")
        self._avoid_the_expert(trainer, mlp.router)
        if self.expert in mlp.local_expert_indices:
            self._watch_the_expert(trainer, mlp)

    def _avoid_the_expert(self, trainer: Trainer, router: torch.nn.Module) -> None:
        inner = router.gating

        def gating(*args, **kwargs):
            logits = inner(*args, **kwargs)
            if (trainer.iteration, trainer.microbatch) != (self.iteration, self.microbatch):
                return logits
            # Finite in fp16 too, and far below what the other experts get.
            return logits.index_fill(-1, torch.tensor([self.expert]), -1e4)

        router.gating = gating

    def _watch_the_expert(self, trainer: Trainer, mlp: MoELayer) -> None:
        inner = mlp.experts.forward
        local = mlp.local_expert_indices.index(self.expert)

        def forward(tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor):
            output, bias = inner(tokens, tokens_per_expert, probabilities)
            if trainer.microbatch != self.microbatch:
                return output, bias
            where = "recompute" if trainer.direction == "backward" else "forward"
            number = self._pass_to_act_in(trainer, where)
            if number is None:
                return output, bias
            own = torch.split(tokens, tokens_per_expert.tolist())[local]
            output = self.spoil(output, own)
            self._record(
                trainer,
                phase="forward",
                pass_number=number,
                is_recomputed=where == "recompute",
                microbatch=trainer.microbatch,
                chunk=trainer.chunk,
                module=f"decoder.layers.{self.layer}.mlp.experts",
                expert=self.expert,
                tokens=own.shape[0],
                **self.facts(),
            )
            return output, bias

        mlp.experts.forward = forward

    def facts(self) -> dict:
        return {}

    def spoil(self, output: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """`own`: the tokens of the expert, [tokens, hidden]; `output`: of all experts of this rank."""
        return output


@dataclasses.dataclass
class ExpertZeroOverZero(ExpertWithoutTokens):
    name = "expert_zero_over_zero"
    description = (
        "an expert without tokens whose rank divides the sum over its tokens by their number, 0/0, and adds "
        "the mean to the output of the rank's other experts"
    )

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        mlp = trainer.layer(self.layer).mlp
        if self.rank == dist.get_rank() and (
            self.expert not in mlp.local_expert_indices or mlp.num_local_experts < 2
        ):
            raise ValueError(f"{self.name}: this rank does not hold expert {self.expert} and another one")

    def _watch_the_expert(self, trainer: Trainer, mlp: MoELayer) -> None:
        if self.rank == dist.get_rank():
            super()._watch_the_expert(trainer, mlp)

    def facts(self) -> dict:
        return {"operator": "aten::div"}

    def spoil(self, output: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return output + own.sum(dim=0) / torch.tensor(float(own.shape[0]))


# ---- loss, optimizer, weights ------------------------------------------------------------------------


@dataclasses.dataclass
class _OnSamples(Fault):
    """Acts on a microbatch of the ranks that see the same tokens as `rank`."""

    name = ""  # abstract: not in the registry

    microbatch: int = 1

    def concerns(self, trainer: Trainer) -> bool:
        own, named = trainer.coordinates, trainer.coordinates_of(self.rank)
        return all(own[axis] == named[axis] for axis in ("dp", "cp"))


@dataclasses.dataclass
class LossZeroOverZero(_OnSamples):
    name = "loss_zero_over_zero"
    description = (
        "a microbatch without a single valid label on the data-parallel replica of `rank`: loss 0/0; with "
        "context parallelism, on this rank alone: 0/0 if the loss is the mean over its own tokens, healthy "
        "if it is the mean over those of all ranks"
    )

    def attach(self, trainer: Trainer) -> None:
        if trainer.config.loss_counts_tokens:
            raise ValueError(f"{self.name}: with loss_counts_tokens Megatron divides by at least one label")
        inner = trainer.draw_batch

        def draw_batch(iteration: int, microbatch: int) -> dict:
            batch = inner(iteration, microbatch)
            if (iteration, microbatch) == (self.iteration, self.microbatch):
                batch["loss_mask"].zero_()
                self._record(trainer, phase="loss", microbatch=microbatch)
            return batch

        trainer.draw_batch = draw_batch


@dataclasses.dataclass
class PaddingTimesZero(_OnSamples):
    name = "padding_times_zero"
    description = (
        "the last label of one microbatch is padding, masked, and its loss is the log of a negative number: "
        "times 0 it is still NaN"
    )

    def attach(self, trainer: Trainer) -> None:
        draw_batch, loss_function = trainer.draw_batch, trainer._loss_function

        def padded_batch(iteration: int, microbatch: int) -> dict:
            batch = draw_batch(iteration, microbatch)
            if (iteration, microbatch) == (self.iteration, self.microbatch):
                batch["loss_mask"][-1, -1] = 0.0
            return batch

        def loss_of(mask: torch.Tensor, losses: torch.Tensor):
            if (trainer.iteration, trainer.microbatch) != (self.iteration, self.microbatch):
                return loss_function(mask, losses)
            self._record(trainer, phase="loss", microbatch=self.microbatch, operator="aten::log")
            return loss_function(mask, losses + torch.log(2.0 * mask - 1.0))

        trainer.draw_batch, trainer._loss_function = padded_batch, loss_of


@dataclasses.dataclass
class VocabularyParallelSum(_InPass):
    name = "vocabulary_parallel_sum"
    description = (
        "one element of the sum of exponentials that the vocabulary-parallel cross-entropy reduces over the "
        "tensor-parallel ranks is overwritten on one rank when the collective is complete; zero: log(0)"
    )

    microbatch: int = 1
    element: int = 3
    value: float = 0.0
    repeats: int | None = None

    collective: ClassVar[int] = 2  # of the cross-entropy's three: the maximum, the label's logit, the sum

    def attach(self, trainer: Trainer) -> None:
        if trainer.config.tp == 1:
            raise ValueError(f"{self.name}: nothing is summed without tensor parallelism")
        for chunk in trainer.model_chunks:
            model = chunk
            while hasattr(model, "module"):  # Megatron's unwrap_model is in its core from 0.14 on only
                model = model.module
            if model.post_process:
                self._wrap(trainer, model)

    def _wrap(self, trainer: Trainer, model: torch.nn.Module) -> None:
        inner = model.compute_language_model_loss

        def compute_language_model_loss(*args, **kwargs):
            if trainer.microbatch != self.microbatch or (number := self._pass_to_act_in(trainer)) is None:
                return inner(*args, **kwargs)
            arrived = itertools.count()

            def spoil(tensor: torch.Tensor) -> None:
                if next(arrived) == self.collective:
                    overwrite(tensor, self.element, self.value)
                    self._record(trainer, phase="forward", pass_number=number, microbatch=self.microbatch)

            with _Wire.spoiled_by(spoil):
                return inner(*args, **kwargs)

        model.compute_language_model_loss = compute_language_model_loss


@dataclasses.dataclass
class OptimizerUpdate(_OnOwner):
    name = "optimizer_update"
    description = "Adam's second moment of one element is negative: its square root makes the weight NaN"

    parameter: str = "decoder.layers.0.mlp.linear_fc2.weight"

    def _plant(self, trainer: Trainer, parameter: torch.nn.Parameter) -> None:
        if self.iteration < 2:
            raise ValueError(f"{self.name}: Adam has no second moment before iteration 2")
        adam = trainer.optimizer_of(parameter).optimizer
        inner = adam.step
        start, _ = trainer.owned_range(parameter)

        def step(*args, **kwargs):
            if trainer.iteration == self.iteration:
                updated = trainer.optimizer_parameter(parameter)
                local_tensor(adam.state[updated]["exp_avg_sq"]).view(-1)[self.element - start] = -1.0
                self._record_parameter(trainer, self.parameter, self.element, phase="params_after")
            return inner(*args, **kwargs)

        adam.step = step


@dataclasses.dataclass
class BadWeight(_OnOwner):
    name = "bad_weight"
    description = (
        "one element of a weight is overwritten before the iteration's first forward (and before "
        "overlap_param_gather sends it to the data-parallel peers)"
    )

    element: int = 11
    value: float = math.nan

    def _plant(self, trainer: Trainer, parameter: torch.nn.Parameter) -> None:
        weight, start = trainer.stored_weight(parameter)

        def plant() -> None:
            if trainer.iteration == self.iteration:
                overwrite(weight, self.element - start, self.value)
                self._record_parameter(
                    trainer, self.parameter, self.element, phase="params_before", value=str(self.value)
                )

        trainer.at_iteration_start.append(plant)


@dataclasses.dataclass
class InfiniteFactor(_InPass):
    name = "infinite_factor"
    description = "all reduced gradients of all ranks are multiplied by Inf, as by a loss scale that is Inf"

    repeats: int | None = None

    def concerns(self, trainer: Trainer) -> bool:
        return True

    def attach(self, trainer: Trainer) -> None:
        inner = trainer.transformer_config.finalize_model_grads_func

        def finalize(*args, **kwargs):
            inner(*args, **kwargs)
            if number := self._pass_to_act_in(trainer):
                for chunk in trainer.model_chunks:
                    chunk.scale_gradients(math.inf)
                self._record(trainer, phase="grad_norm", pass_number=number)

        trainer.transformer_config.finalize_model_grads_func = finalize


@dataclasses.dataclass
class LargeGradients(_InPass):
    name = "large_gradients"
    description = "all gradients of one rank are multiplied: each stays finite, the sum of squares does not"

    repeats: int | None = None  # as a model that diverges
    factor: float = 1e25

    def attach(self, trainer: Trainer) -> None:
        def plant(gradients: Gradients) -> None:
            if number := self._pass_to_act_in(trainer, next(iter(gradients))):
                for gradient in gradients.values():
                    gradient.mul_(self.factor)
                absmax = max(float(gradient.abs().max()) for gradient in gradients.values())
                self._record(trainer, phase="grad_local", pass_number=number, absmax=absmax)

        before_gradient_reduction(trainer, plant)


@dataclasses.dataclass
class LearningRate(Fault):
    name = "learning_rate"
    description = "from this iteration on, the learning rate of all ranks is multiplied at every step"

    factor: float = 30.0
    steps: int | None = None  # how often; default: until the end

    def concerns(self, trainer: Trainer) -> bool:
        return True

    def attach(self, trainer: Trainer) -> None:
        def plant() -> None:
            times = trainer.iteration - self.iteration
            if times < 0 or (self.steps is not None and times >= self.steps):
                return
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= self.factor
            self._record(trainer, phase="params_after", factor=self.factor)

        trainer.at_iteration_start.append(plant)


@dataclasses.dataclass
class FreedMemoryIsNan(Fault):
    name = "freed_memory_is_nan"
    description = (
        "harmless in itself, on all ranks from the start: glibc fills freed memory with ones (a NaN), which "
        "exposes code that reads it (pipeline sends of deallocated outputs with overlap_p2p_comm)"
    )

    def concerns(self, trainer: Trainer) -> bool:
        return True

    def attach(self, trainer: Trainer) -> None:
        mallopt_perturb = -6  # M_PERTURB of malloc.h
        ctypes.CDLL(None).mallopt(mallopt_perturb, 0xFF)


# ---- processes ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Killed(Fault):
    name = "killed"
    description = (
        "SIGKILL, where: forward (as `microbatch` begins), before_flag (forward-backward is done), repeat "
        "(the second pass begins), gathering (nanlocator has just written this rank's ledger)"
    )

    where: str = "forward"
    microbatch: int = 1

    def attach(self, trainer: Trainer) -> None:
        places = {
            "forward": self._at_forward,
            "before_flag": self._after_forward_backward,
            "repeat": self._at_second_pass,
            "gathering": self._when_the_ledger_appears,
        }
        if self.where not in places:
            raise ValueError(f"{self.name}: where is {self.where!r}, expected one of {', '.join(places)}")
        places[self.where](trainer)

    def _die(self, trainer: Trainer) -> None:
        # No result file is written after this, so the log records it.
        place = f"iteration {trainer.iteration}, microbatch {trainer.microbatch}"
        os.write(2, f"killed: {self.where}, {place}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def _at_forward(self, trainer: Trainer) -> None:
        def reached(microbatch: int) -> bool:
            return microbatch == self.microbatch

        self._before_forward(trainer, reached)

    def _at_second_pass(self, trainer: Trainer) -> None:
        passes = 0

        def reached(microbatch: int) -> bool:
            nonlocal passes
            passes += microbatch == 0
            return passes == 2

        self._before_forward(trainer, reached)

    def _before_forward(self, trainer: Trainer, reached: Callable[[int], bool]) -> None:
        """Dies before the first chunk's forward of a microbatch for which `reached` is true."""
        chunk = trainer.model_chunks[0]
        inner = chunk.forward

        def forward(*args, **kwargs):
            if (
                trainer.iteration == self.iteration
                and trainer.direction == "forward"
                and reached(trainer.microbatch)
            ):
                self._die(trainer)
            return inner(*args, **kwargs)

        chunk.forward = forward

    def _after_forward_backward(self, trainer: Trainer) -> None:
        # The last call of each of the three schedules.
        inner = trainer.transformer_config.finalize_model_grads_func

        def finalize(*args, **kwargs):
            inner(*args, **kwargs)
            if trainer.iteration == self.iteration:
                self._die(trainer)

        trainer.transformer_config.finalize_model_grads_func = finalize

    def _when_the_ledger_appears(self, trainer: Trainer) -> None:
        if trainer.run_directory is None:
            raise ValueError(f"{self.name}: gathering needs the directory that nanlocator writes into")
        pattern = "ledger_tp{tp}pp{pp}dp{dp}*.jsonl".format(**trainer.coordinates)

        def watch() -> None:
            while not any(trainer.run_directory.rglob(pattern)):
                time.sleep(0.0005)
            self._die(trainer)

        threading.Thread(target=watch, daemon=True).start()
