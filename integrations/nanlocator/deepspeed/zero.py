"""The places of gradients, weights and masters in ZeRO's optimizers.

Source, DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/bf16_optimizer.py.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime import bf16_optimizer

from nanlocator import _C
from nanlocator.deepspeed.layout import Layout, Part, Piece, Replicated


class Stage1And2(Layout):
    """DeepSpeedZeroOptimizer. Each rank has whole weights, and a partition of the flat masters."""

    reduction = "reduce_ipg_grads"

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        super().__init__(engine, optimizer.bit16_groups)
        self.norms = [(optimizer, "scaled_global_norm")]
        for group, parameters in enumerate(optimizer.params_in_partition):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
            for parameter in parameters:
                key = optimizer.get_param_id(parameter)
                begin = int(optimizer.grad_start_offset[group][rank][key])
                at = int(optimizer.grad_partition_insertion_offset[group][rank][key])
                count = min(parameter.numel() - begin, int(optimizer.partition_size[group]) - at)
                self.pieces.append(Piece(self.ids[parameter], group, begin, at, count))

    def about_to_be_reduced(self, comm_dtype: Any = None) -> list[Part]:
        buckets = self.optimizer.ipg_buckets
        chosen = buckets.values() if comm_dtype is None else [buckets[comm_dtype]]
        groups = self.optimizer.bit16_groups
        return [
            (self.ids[groups[group][index]], gradient)
            for bucket in chosen
            for (group, index, _), gradient in zip(bucket.params, bucket.grads, strict=True)
        ]

    def reduced(self) -> list[Part]:
        if self.optimizer.cpu_offload:
            flat = [master.grad for master in self.masters()]
            return [(p.id, p.of(g)) for p in self.pieces if (g := flat[p.group]) is not None]
        of_group: dict[int, Iterator[torch.Tensor]] = {}
        parts = []
        for piece in self.pieces:  # one after the other, as in get_flat_partition; padding between them
            if piece.group not in of_group:
                found = self.optimizer.averaged_gradients.get(piece.group) or []
                of_group[piece.group] = (g for g in found if not getattr(g, "_zero_padding", False))
            gradient = next(of_group[piece.group], None)
            if gradient is not None:
                parts.append((piece.id, gradient))
        return parts

    def masters(self) -> list[torch.Tensor]:
        return self.optimizer.single_partition_of_fp32_groups

    def skips_bad_updates(self) -> bool:
        if self.optimizer.check_grad_overflow:
            return True
        return self.optimizer.compute_grad_norm and self.optimizer.dtype != torch.bfloat16

    def clear_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in held:
                held[group] = None
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.previous_reduced_grads.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()


class Stage3(Layout):
    """DeepSpeedZeroOptimizer_Stage3. Weights are partitioned, too: `ds_tensor` is this rank's part; small
    weights are also kept whole."""

    reduction = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
    gathers_weights = True
    parameters: list[Any]  # with DeepSpeed's attributes ds_...

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        super().__init__(engine, optimizer.fp16_groups)
        self.norms = [(optimizer, "_get_norm_groups")]
        for parameter in self.parameters:
            group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            begin, count = self._own_elements(parameter)
            if count > 0:
                self.pieces.append(Piece(self.ids[parameter], group, begin, at, count))
        counts = [(p, self._own_elements(p)[1]) for p in engine.module.parameters()]  # frozen ones as well
        self._padded = [(p, count) for p, count in counts if count < p.ds_tensor.ds_numel]

    def _own_elements(self, parameter: Any) -> tuple[int, int]:
        """The first element of the whole parameter in this rank's part, and the number of elements in it: all
        parts are as long as the first (partition_parameters.py, _partition_param)."""
        size = parameter.ds_tensor.ds_numel
        begin = self.optimizer._get_param_partition_rank(parameter) * size
        return begin, max(min(size, parameter.ds_numel - begin), 0)

    def about_to_be_reduced(self, comm_dtype: torch.dtype) -> list[Part]:
        return [(self.ids[p], p.grad) for p in self.optimizer.ipg_buckets[comm_dtype].params]

    def reduced(self) -> list[Part]:
        if self.optimizer.offload_optimizer:
            flat = [master.grad for master in self.masters()]
            return [(p.id, p.of(g)) for p in self.pieces if (g := flat[p.group]) is not None]
        gradients = {
            self.ids[parameter]: gradient
            for group, found in self.optimizer.averaged_gradients.items()
            for parameter, gradient in zip(self.optimizer.fp16_groups[group], found or [], strict=False)
        }
        return [
            (piece.id, gradients[piece.id].view(-1).narrow(0, 0, piece.count))
            for piece in self.pieces
            if piece.id in gradients
        ]

    def weights(self) -> list[Part]:
        parts = [
            (piece.id, self.parameters[piece.id].ds_tensor.detach().narrow(0, 0, piece.count))
            for piece in self.pieces
        ]
        whole = [(i, p.detach()) for i, p in enumerate(self.parameters) if p.numel() == p.ds_numel]
        return parts + whole

    def clear_padding_of_weights(self) -> None:
        for parameter, count in self._padded:
            parameter.ds_tensor.detach()[count:].zero_()

    def named_by_id(self) -> list[Part]:
        return [(i, p.ds_tensor) for i, p in enumerate(self.parameters)] + super().named_by_id()

    def masters(self) -> list[torch.Tensor]:
        return self.optimizer.fp32_partitioned_groups_flat

    def clear_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)  # and micro_step_id
        for bucket in optimizer.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        for key in optimizer.params_already_reduced:
            optimizer.params_already_reduced[key] = False
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
        else:
            optimizer.averaged_gradients = {}
        optimizer._offload_boundary_param_ids = set()


class Bf16Stage1(Layout):
    """BF16_Optimizer: ZeRO-1 with fp32 accumulation of bf16 gradients. Every rank has all sums and updates
    its partition."""

    reduction = "buffered_allreduce_fallback"

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        super().__init__(engine, optimizer.bf16_groups)
        self.reducer = engine
        self.norms = [(bf16_optimizer, "get_global_norm_of_tensors")]
        for group, parameters in enumerate(optimizer.bf16_groups):
            size = optimizer.fp32_groups_flat_partition[group].numel()
            first = dist.get_rank(group=optimizer.real_dp_process_group[group]) * size
            start = 0
            for parameter in parameters:
                begin, end = max(first - start, 0), min(first + size - start, parameter.numel())
                if begin < end:
                    at = start + begin - first
                    self.pieces.append(Piece(self.ids[parameter], group, begin, at, end - begin))
                start += parameter.numel()

    def about_to_be_reduced(self, *_: Any, **__: Any) -> list[Part]:
        return self.reduced()

    def reduced(self) -> list[Part]:
        optimizer = self.optimizer
        return [
            (self.ids[parameter], gradient.view(-1))
            for group, parameters in enumerate(optimizer.bf16_groups)
            for parameter, gradient, is_there in zip(
                parameters,
                optimizer.fp32_groups_gradients[group],
                optimizer.fp32_groups_has_gradients[group],
                strict=True,
            )
            if is_there
        ]

    def masters(self) -> list[torch.Tensor]:
        return self.optimizer.fp32_groups_flat_partition

    def clear_gradients(self) -> None:
        self.optimizer.clear_hp_grads()
        self.optimizer.clear_lp_grads()


_LAYOUTS = {
    "DeepSpeedZeroOptimizer": Stage1And2,
    "DeepSpeedZeroOptimizer_Stage3": Stage3,
    "BF16_Optimizer": Bf16Stage1,
    "FP16_UnfusedOptimizer": Replicated,
}


def layout_of(engine: Any) -> Layout:
    """Raises UsageError for an optimizer whose gradient storage is unknown."""
    optimizer = engine.optimizer
    kind = _LAYOUTS.get(type(optimizer).__name__)
    if kind is None and isinstance(optimizer, torch.optim.Optimizer):
        kind = Replicated
    if kind is None:
        raise _C.UsageError(
            f"nanlocator.deepspeed.install does not know where a {type(optimizer).__name__} keeps gradients; "
            "it supports ZeRO stages 0 to 3 with torch's, DeepSpeed's and client optimizers"
        )
    try:
        return kind(engine)
    except AttributeError as error:
        raise _C.UsageError(
            f"DeepSpeed {deepspeed.__version__} keeps gradients in an unknown way ({error}); "
            "install DeepSpeed 0.19"
        ) from error
