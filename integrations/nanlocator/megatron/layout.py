"""This rank's coordinates, parameter names and parameter ids in a Megatron-Core model.

Source, Megatron-Core 0.16.1: parallel_state.py, optimizer/__init__.py (_get_param_groups),
optimizer/optimizer.py, optimizer/distrib_optimizer.py, distributed/param_and_grad_buffer.py.
"""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_layer import TransformerLayer

from nanlocator import _C
from nanlocator.calls.modules import local_part
from nanlocator.engine.this_rank import device_description, dtype_name
from nanlocator.megatron.data_parallel import DataParallelChunk, Range, whole_parameter

Parameter = torch.nn.Parameter

_EXCHANGING = (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    BaseMoELayer,
    Router,
    TransformerLayer,
    LanguageModule,
)
_TRANSFORMER_ENGINE = ("transformer_engine.", "megatron.core.extensions.")

# A batch may leave these, or most of their rows, without gradient: a finite gradient proves nothing.
_MAY_BE_UNTOUCHED = re.compile(r"word_embeddings|\.experts\.|\.router\.")
_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)(?=\.)")
_LOCAL_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


def rank_coordinates(device: torch.device) -> _C.RankCoordinates:
    c = _C.RankCoordinates()
    c.rank, c.world_size = dist.get_rank(), dist.get_world_size()
    ps = parallel_state
    c.tp = _C.AxisCoordinate(ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size())
    c.pp = _C.AxisCoordinate(
        ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size()
    )
    c.dp = _C.AxisCoordinate(ps.get_data_parallel_rank(), ps.get_data_parallel_world_size())
    c.cp = _C.AxisCoordinate(ps.get_context_parallel_rank(), ps.get_context_parallel_world_size())
    c.ep = _C.AxisCoordinate(ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size())
    c.host = socket.gethostname()
    c.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    c.device = device_description(device)
    return c


@dataclass(frozen=True)
class NamedParameter:
    parameter: Parameter
    name: str  # with global layer and expert numbers
    raw_name: str
    chunk: int


def named_parameters(
    chunks: list[torch.nn.Module], data_parallel: list[DataParallelChunk]
) -> list[NamedParameter]:
    """Trainable parameters of this rank, in the order in which Megatron fills its groups."""
    result = []
    for chunk_index, chunk in enumerate(chunks):
        layer_numbers, first_expert = _numbers(chunk)
        for raw_name, parameter in data_parallel[chunk_index].parameters:
            name = _global_name(raw_name, layer_numbers, first_expert)
            result.append(NamedParameter(parameter, name, raw_name, chunk_index))
    return result


def _numbers(chunk: torch.nn.Module) -> tuple[dict[str, int], int]:
    """Global number (from 0) of each layer by its path, and of this rank's first expert."""
    modules = dict(chunk.named_modules())
    layer_numbers = {
        name: module.layer_number - 1  # counted from 1 over all stages and chunks
        for name, module in modules.items()
        if isinstance(module, TransformerLayer)
    }
    experts_per_rank = next(
        (module.num_local_experts for module in modules.values() if hasattr(module, "num_local_experts")), 0
    )
    return layer_numbers, parallel_state.get_expert_model_parallel_rank() * experts_per_rank


def _global_name(raw_name: str, layer_numbers: dict[str, int], first_expert: int) -> str:
    def layer(match: re.Match[str]) -> str:
        local = match.group(1) + match.group(2)
        return f"{match.group(1)}{layer_numbers.get(local, match.group(2))}"

    def expert(match: re.Match[str]) -> str:
        return f"{match.group(1)}{int(match.group(2)) + first_expert}"

    name = _LOCAL_EXPERT.sub(expert, _LAYER.sub(layer, raw_name))
    return re.sub(r"^(module\.)+", "", name)


def module_names(chunk: torch.nn.Module) -> Callable[[str], str]:
    """Maps a path of ``chunk.named_modules()`` or ``named_buffers()`` to its name with global numbers."""
    layer_numbers, first_expert = _numbers(chunk)

    def name_of(path: str) -> str:
        return _global_name(path + ".", layer_numbers, first_expert).removesuffix(".")

    return name_of


def exchanging_modules(chunk: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Names and modules whose own forward or backward may exchange tensors with other ranks; also the layers
    and the model, whose names serve for exchanges outside of those."""
    name_of = module_names(chunk)
    attentions = [module for module in chunk.modules() if isinstance(module, Attention)]
    is_context_parallel = parallel_state.get_context_parallel_world_size() > 1
    core_attentions = {id(module.core_attention) for module in attentions if is_context_parallel}
    return [
        (name_of(path), module)
        for path, module in chunk.named_modules()
        if isinstance(module, _EXCHANGING)
        or id(module) in core_attentions
        or type(module).__module__.startswith(_TRANSFORMER_ENGINE)
    ]


def parameter_infos(
    chunks: list[torch.nn.Module],
    data_parallel: list[DataParallelChunk],
    optimizers: list[MegatronOptimizer],
    named: list[NamedParameter],
) -> list[_C.ParameterInfo]:
    """One ParameterInfo per parameter, ids included, in the order of ``named``."""
    buckets = _bucket_positions(data_parallel)
    ids = _parameter_ids(optimizers, named)
    shards = shard_ranges(data_parallel, optimizers, named)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    pp_size = parallel_state.get_pipeline_model_parallel_world_size()
    names_of: dict[Parameter, int] = {}
    for chunk in chunks:
        for _, parameter in chunk.named_parameters(remove_duplicate=False):
            p = whole_parameter(parameter)
            names_of[p] = names_of.get(p, 0) + 1
    shared = {p for p, count in names_of.items() if count > 1}
    infos = []
    for entry in named:
        p, info = entry.parameter, _C.ParameterInfo()
        info.id = ids[p]
        info.name, info.raw_name, info.chunk = entry.name, entry.raw_name, entry.chunk
        info.shape, info.dtype = list(p.shape), dtype_name(p.dtype)
        layer = _LAYER.match(entry.name)
        info.layer = int(layer.group(2)) if layer else None
        if p in buckets:
            info.bucket, info.bucket_offset = buckets[p]
        info.shard = shards.get(p)
        info.shard_group = data_parallel[entry.chunk].ranks_that_gather(p)
        info.is_expert = not getattr(p, "allreduce", True)
        # layers.py, param_is_not_tensor_parallel_duplicate: the norm leaves these out on tp_rank > 0.
        info.is_tp_duplicate = tp_size > 1 and not getattr(p, "tensor_model_parallel", False)
        # language_module.py, setup_embeddings_and_output_layer.
        info.is_tied = pp_size > 1 and getattr(p, "shared_embedding", False)
        info.is_shared = p in shared
        info.may_be_untouched = bool(_MAY_BE_UNTOUCHED.search(entry.name))
        infos.append(info)
    return infos


def _bucket_positions(data_parallel: list[DataParallelChunk]) -> dict[Parameter, tuple[int, int]]:
    """Parameter -> (bucket number on this rank, first element in the bucket)."""
    positions: dict[Parameter, tuple[int, int]] = {}
    for chunk in data_parallel:
        first = 1 + max((number for number, _ in positions.values()), default=-1)
        of_chunk = chunk.bucket_positions()
        positions |= {p: (first + number, element) for p, (number, element) in of_chunk.items()}
    return positions


def shard_ranges(
    data_parallel: list[DataParallelChunk],
    optimizers: list[MegatronOptimizer],
    named: list[NamedParameter],
) -> dict[Parameter, Range]:
    """The flat elements of each parameter whose reduced gradient this rank owns; (0, 0) for none.

    Empty if nothing is sharded: every rank then owns everything.
    """
    kept = {entry.parameter: data_parallel[entry.chunk].kept(entry.parameter) for entry in named}
    if kept and None not in kept.values():
        return {p: own for p, own in kept.items() if own is not None}
    if not all(isinstance(o, DistributedOptimizer) for o in optimizers):
        return {}
    ranges = {entry.parameter: (0, 0) for entry in named}
    for optimizer in optimizers:
        for p in getattr(optimizer, "model_param_gbuf_map", {}):  # owned parameters only
            owned = optimizer._get_model_param_range_map(p)["param"]
            ranges[p] = (owned.start, owned.end)
    return ranges


def _parameter_ids(optimizers: list[MegatronOptimizer], named: list[NamedParameter]) -> dict[Parameter, int]:
    """Position in the concatenated groups from before the optimizers replaced or sharded them.

    Within a group Megatron keeps the order of ``named_parameters``. A parameter's group is found in the
    optimizer. A distributed optimizer has only this rank's parameters, so the ranks gather the groups.
    Collective.
    """
    group_of: dict[str, tuple[int, int]] = {}
    name_of = {entry.parameter: entry.name for entry in named}
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(_model_parameters_of_groups(optimizer)):
            group_of.update({name_of[p]: (number, group_number) for p in group})
    if any(isinstance(o, DistributedOptimizer) for o in optimizers):
        everyone: list[dict[str, tuple[int, int]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, group_of)
        for theirs in everyone:
            group_of = {**(theirs or {}), **group_of}
    unknown = (len(optimizers), 0)  # belongs to no optimizer: after all others
    ordered = sorted(named, key=lambda entry: group_of.get(entry.name, unknown))  # stable
    return {entry.parameter: index for index, entry in enumerate(ordered)}


def _model_parameters_of_groups(optimizer: MegatronOptimizer) -> list[list[Parameter]]:
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if _updates_shards_of_fsdp(optimizer):
        return [[whole_parameter(p) for p in group["params"]] for group in optimizer.param_groups]
    if isinstance(optimizer, DistributedOptimizer):
        groups = zip(optimizer.model_float16_groups, optimizer.model_fp32_groups, strict=True)
        return [[*half, *full] for half, full in groups]
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = zip(optimizer.float16_groups, optimizer.fp32_from_fp32_groups, strict=True)
        return [[*half, *full] for half, full in groups]
    return [group["params"] for group in optimizer.param_groups]


def _updates_shards_of_fsdp(optimizer: MegatronOptimizer) -> bool:
    return getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False)


def updated_tensors(
    optimizer: MegatronOptimizer, shards: dict[Parameter, Range]
) -> list[tuple[Parameter, torch.Tensor, int]]:
    """The tensors that the optimizer updates: (model parameter, its fp32 copy or itself or a shard of one of
    them, the shard's first element within the flattened parameter). Shards of Megatron-FSDP are DTensors."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if _updates_shards_of_fsdp(optimizer):
        return [
            (whole_parameter(p), p, shards[whole_parameter(p)][0])
            for group in optimizer.param_groups
            for p in group["params"]
            if p.to_local().numel()
        ]
    if isinstance(optimizer, DistributedOptimizer):
        pairs = _zip_groups(
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_float16_groups, optimizer.shard_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
        return [
            (model, main, optimizer._get_model_param_range_map(model)["param"].start) for model, main in pairs
        ]
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = _zip_groups(
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        )
        return [(model, main, 0) for model, main in pairs]
    return [(p, p, 0) for group in optimizer.param_groups for p in group["params"]]


def optimizer_gradients(
    optimizer: MegatronOptimizer, shards: dict[Parameter, Range]
) -> list[tuple[Parameter, torch.Tensor, int]]:
    """The gradients for the norm and the clip, after ``prepare_grads``: (model parameter, gradient, first
    element of the gradient within the flattened parameter)."""
    return [
        (model, local_part(gradient), begin)
        for model, main, begin in updated_tensors(optimizer, shards)
        if (gradient := _gradient(main)) is not None
    ]


def _zip_groups(*kinds: tuple[list[Any], list[Any]]) -> list[tuple[Parameter, torch.Tensor]]:
    """Pairs of the parameters that this rank updates, wholly or in part."""
    return [
        (model, main)
        for models, mains in kinds
        for model_group, main_group in zip(models, mains, strict=True)
        for model, main in zip(model_group, main_group, strict=True)
        if main is not None
    ]


def _gradient(main: torch.Tensor) -> torch.Tensor | None:
    """``decoupled_grad`` with the precision-aware optimizer, else ``grad`` (clip_grads.py)."""
    decoupled = getattr(main, "decoupled_grad", None)
    return decoupled if decoupled is not None else main.grad
