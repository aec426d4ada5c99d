"""Checks the arguments of ``install``, and reports once what a configuration hides from it."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.utils import get_model_config

from nanlocator import _C
from nanlocator.megatron import supported
from nanlocator.megatron.data_parallel import is_sharded


def check_call(chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Raises UsageError if ``install`` cannot work with these arguments."""
    if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
        raise _C.UsageError(
            "nanlocator.megatron.install: torch.distributed and megatron.core.parallel_state must be "
            "initialised first; call it after get_megatron_optimizer"
        )
    for index, chunk in enumerate(chunks):
        if not hasattr(chunk, "bucket_groups") and not is_sharded(chunk):
            raise _C.UsageError(
                f"model chunk {index} is a {type(chunk).__name__} without gradient buckets; pass the "
                "chunks wrapped in megatron.core.distributed.DistributedDataParallel or "
                "FullyShardedDataParallel"
            )
    is_of_one_chunk = len(chunks) == 1 and is_sharded(chunks[0]) and isinstance(optimizer, MegatronOptimizer)
    if not isinstance(optimizer, ChainedOptimizer) and not is_of_one_chunk:
        raise _C.UsageError(
            f"nanlocator.megatron.install expects what get_megatron_optimizer returns (a ChainedOptimizer), "
            f"not a {type(optimizer).__name__}"
        )
    if _captures_whole_iteration(get_model_config(chunks[0])):
        raise _C.UsageError(
            "cuda_graph_scope 'full_iteration' runs forward-backward from one CUDA graph, whose replays "
            "call no hooks: nothing in it can be watched, and no step can be re-run. To look for a NaN, run "
            "without it: omit --cuda-graph-scope full_iteration (graphs of layers may stay), or set "
            "cuda_graph_impl to 'none'"
        )


def _captures_whole_iteration(config: Any) -> bool:
    """Megatron-Core 0.16.1, full_cuda_graph.py. Before it became an enum, the scope was a string."""
    scopes = getattr(config, "cuda_graph_scope", None) or []
    if not isinstance(scopes, list):
        scopes = str(getattr(scopes, "name", scopes)).split(",")
    return uses_cuda_graphs(config) and any(
        getattr(scope, "name", scope) == "full_iteration" for scope in scopes
    )


def uses_cuda_graphs(config: Any) -> bool:
    impl = getattr(config, "cuda_graph_impl", "none")
    return impl not in (None, "none") or bool(getattr(config, "enable_cuda_graph", False))


def unwatched_groups(chunks: list[torch.nn.Module]) -> dict[str, str]:
    """Groups, by their names in ledgers, whose members exchange activations in this configuration without
    ProcessGroup, each with a readable name of the mechanism."""
    config = get_model_config(chunks[0])
    groups = {}
    if getattr(config, "tp_comm_overlap", False):
        groups["tp"] = "tensor-parallel exchanges through userbuffers (tp_comm_overlap)"
    if getattr(config, "symmetric_ar_type", None) is not None:
        groups["tp"] = "tensor-parallel all-reduces in symmetric memory (symmetric_ar_type)"
    if getattr(config, "moe_token_dispatcher_type", None) == "flex":
        text = "token exchanges by DeepEP or HybridEP (moe_token_dispatcher_type flex)"
        groups |= {"ep": text, "tp_ep": text}
    return groups


def not_covered(chunks: list[Any], optimizer: MegatronOptimizer, options: _C.LocatorOptions) -> list[str]:
    """Phrases for run.json and the log about this configuration."""
    config, ddp = get_model_config(chunks[0]), chunks[0].ddp_config
    modules = {type(module).__module__.split(".")[0] for chunk in chunks for module in chunk.modules()}

    def has(name: str, *nothing: Any) -> bool:
        return getattr(config, name, None) not in (None, False, 0, "none", [], *nothing)

    is_model_parallel = (
        parallel_state.get_tensor_model_parallel_world_size() > 1
        or parallel_state.get_pipeline_model_parallel_world_size() > 1
    )
    cases = {
        "operator, module and microbatch of a fault (level grads without a re-run sees only gradients)": (
            options.level == "grads" and options.rerun == "never"
        ),
        "the rank within a data-parallel replica of a fault that happens once (needs level boundaries)": (
            options.level == "grads" and is_model_parallel
        ),
        f"what hooks in the wrong place miss (Megatron-Core {supported.unknown_version()} was not tested)": (
            supported.unknown_version() is not None
        ),
        "places inside TransformerEngine's kernels (a re-run names the kernel and its arguments)": (
            "transformer_engine" in modules
        ),
        "operators inside functions that Megatron compiles with bias_activation_fusion or "
        "bias_dropout_fusion (a re-run would see them)": (
            (has("bias_activation_fusion") or has("bias_dropout_fusion")) and options.rerun == "never"
        ),
        "values inside CUDA graphs": uses_cuda_graphs(config),
        "scales of fp8 and fp4": has("fp8") or has("fp4"),
        "whether data gathered in quantised form (bytes) was finite": (
            (has("fp8") or has("fp4")) and getattr(config, "sequence_parallel", False)
        ),
        "fp8 weights that cannot be dequantised in the remaining memory": (
            has("fp8_param") or getattr(ddp, "fp8_param_gather", False)
        ),
        **dict.fromkeys(unwatched_groups(chunks).values(), True),
        "microbatches, because overlap_moe_expert_parallel_comm has its own schedule": has(
            "overlap_moe_expert_parallel_comm"
        ),
        "layer-wise optimizers (not tested)": "LayerWise" in type(optimizer).__name__,
        "parameters before overlap_param_gather gathers them": (
            options.check_params and ddp.overlap_param_gather and not is_sharded(chunks[0])
        ),
    }
    return [phrase for phrase, applies in cases.items() if applies]


def current_iteration() -> int | None:
    """The iteration in Megatron's log, counted from 1; None in other training loops, whose steps the engine
    counts."""
    current = getattr(_arguments(), "curr_iteration", None)
    return None if current is None else current + 1


def checkpoint_dir() -> str | None:
    """Megatron's ``--save``; None in other training loops."""
    return getattr(_arguments(), "save", None)


def loaded_checkpoint() -> str | None:
    """The folder from which Megatron has loaded this run; None if it began anew, or in other training
    loops."""
    folder, iteration = getattr(_arguments(), "load", None), getattr(_arguments(), "iteration", 0)
    return os.path.abspath(os.path.join(folder, f"iter_{iteration:07d}")) if folder and iteration else None


def _arguments() -> Any:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
