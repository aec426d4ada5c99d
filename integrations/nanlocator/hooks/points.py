"""Every point of other code that nanlocator patches, one row each. Data only: a point's owner is imported
only when the point is looked up.

If a version of torch or of a framework lacks a point, no error is raised. A note in each verdict's coverage
(``Patches.lost``) says what is not seen, and ``nanlocator doctor`` prints this table for the installed
versions.
"""

import functools
import importlib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

# The versions that nanlocator's tests have run with (docs/support.md).
TESTED = {
    "torch": "2.6 to 2.15",
    "megatron-core": "0.12 to 0.20",
    "deepspeed": "0.19.8",
    "transformers": "4.57.6 to 5.23.0",
}
_DISTRIBUTIONS = {"megatron": "megatron-core"}  # of top-level packages with another name


class State(Enum):
    """The state of a point in this environment."""

    HOLDS = "in place"
    LOST = "lost"
    NOT_DUE = "for other versions"  # another point serves the installed version
    NOT_INSTALLED = "not installed"
    PER_OBJECT = "checked only in use"  # an attribute of objects; the place of its class is not known


@dataclass(frozen=True)
class Point:
    """An attribute that nanlocator replaces.

    Attributes:
        owner: the module that has it, and after a colon the class or object in that module.
        attribute: its name.
        needed_by: the modules of nanlocator that subscribe to it, from the outermost to the innermost.
        lost: the data that is missing without it, worded for a verdict's coverage.
        since: the first version of the owner's package that needs it; "" means the oldest.
        until: the last such version, for example "2.12"; "" means the newest.
        on_objects: replaced on single objects; ``owner`` is their class.
        is_hot: called for every module or collective; see ``patches.Maker``.
        is_traced: torch.compile traces through it.
        is_optional: only some versions have it, and the others need no replacement for it.
    """

    owner: str
    attribute: str
    needed_by: tuple[str, ...]
    lost: str
    since: str = ""
    until: str = ""
    on_objects: bool = False
    is_hot: bool = False
    is_traced: bool = False
    is_optional: bool = False

    @property
    def place(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.attribute}"

    @property
    def package(self) -> str:
        """The distribution that has it; "" for Python's standard library."""
        name = self.owner.partition(":")[0].partition(".")[0]
        return "" if name == "sys" or " " in name else _DISTRIBUTIONS.get(name, name)

    @property
    def is_operator(self) -> bool:
        """Whether code calls it through torch.ops, where compilers must find an operator."""
        return self.owner.startswith("torch:ops.")

    def find_owner(self) -> Any:
        """Imports the owner. None if that fails."""
        module, _, path = self.owner.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in filter(None, path.split(".")):
                found = getattr(found, name)
        except Exception:  # importing a package with a broken library can raise anything
            return None
        return found

    def is_due(self) -> bool:
        """Whether the installed version needs it."""
        if self.is_optional:
            return False
        version = numbers_of(version_of(self.package))
        if not version:
            return True
        is_new_enough = not self.since or version >= numbers_of(self.since)
        until = numbers_of(self.until)
        return is_new_enough and (not until or version[: len(until)] <= until)

    def note(self) -> str:
        """The note in a verdict's coverage if the point is due and missing."""
        return f"{self.lost} (this {self.package or 'Python'} has no {self.place})"

    def state(self) -> State:
        """The state in this environment. Imports the owner if its package is installed."""
        if not version_of(self.package) and self.package:
            return State.NOT_INSTALLED
        owner = self.find_owner()
        if owner is not None and hasattr(owner, self.attribute):
            return State.HOLDS
        if not self.is_due():
            return State.NOT_DUE
        return State.PER_OBJECT if self.on_objects else State.LOST


@functools.cache
def version_of(package: str) -> str:
    """A distribution's version; "" if it is not installed. An imported module's ``__version__`` comes first,
    because sources on PYTHONPATH have no metadata."""
    names = {distribution: name for name, distribution in _DISTRIBUTIONS.items()}
    module = sys.modules.get("megatron.core" if package == "megatron-core" else names.get(package, package))
    if version := getattr(module, "__version__", ""):
        return str(version)
    try:
        return importlib.metadata.version(package) if package else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def numbers_of(version: str) -> tuple[int, ...]:
    """(2, 11, 0) of "2.11.0a0+cu129"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


TABLE: list[Point] = []


def _row(owner: str, attribute: str, needed_by: str, lost: str, **rest: Any) -> Point:
    point = Point(owner, attribute, tuple(needed_by.split()), lost, **rest)
    TABLE.append(point)
    return point


# --- torch: modules, autograd, optimizers ------------------------------------------------------------

# `attach` is outermost: it waits for a model, and once it has attached, the call begins again and passes the
# recorder. The recorder is next, so that it keeps the call as the program made it; then the modules' names.
MODULE_CALL = _row(
    "torch.nn:Module",
    "__call__",
    "attach loops.recorder calls.modules",
    "module calls, so no step is recorded and no module is named",
    is_hot=True,
    is_traced=True,
)
FUNCTIONAL_CALL = _row(
    "torch.nn.utils:stateless",
    "_functional_call",
    "attach loops.recorder",
    "weights that torch.func.functional_call puts into a module, so a re-run uses the module's own",
    is_traced=True,
)
MODULE_FORWARD = _row(
    "torch.nn:Module",
    "forward",
    "exchange.boundaries debugger.autocast",
    "the modules in which ranks exchange data",
    on_objects=True,
)
MODULE_ZERO_GRAD = _row(
    "torch.nn:Module", "zero_grad", "loops.watch", "gradients that a model's zero_grad discards unused"
)
RUN_BACKWARD = _row(
    "torch.autograd",
    "_engine_run_backward",
    "attach loops.recorder",
    "backward passes, so gradients are scanned when an optimizer steps, and the step cannot be re-run",
)
REGISTER_HOOK = _row(
    "torch:Tensor",
    "register_hook",
    "loops.recorder",
    "hooks that the program registers on tensors between modules, so a re-run goes without them",
)
FUNCTION_APPLY = _row(
    "torch.autograd:Function",
    "apply",
    "loops.recorder",
    "arguments of custom autograd functions outside modules",
    since="2.15",
)
OPTIMIZER_INIT = _row("torch.optim:Optimizer", "__init__", "attach", "optimizers of an unedited script")
OPTIMIZER_STEP = _row(
    "torch.optim:Optimizer",
    "step",
    "attach loops.watch deepspeed.locator transformers.trainer",
    "optimizer steps",
    on_objects=True,
)
OPTIMIZER_ZERO_GRAD = _row(
    "torch.optim:Optimizer",
    "zero_grad",
    "loops.watch",
    "gradients that an optimizer's zero_grad discards unused",
    on_objects=True,
)
OPTIMIZER_ADD_GROUP = _row(
    "torch.optim:Optimizer",
    "add_param_group",
    "loops.watch",
    "parameters added to an optimizer later",
    on_objects=True,
)
SCALE = _row("torch.amp.grad_scaler:GradScaler", "scale", "loops.watch", "losses before scaling")
JOIN = _row(
    "torch.distributed.algorithms.join:Join",
    "__enter__",
    "attach loops.watch",
    "programs whose ranks make different numbers of steps, which may hang",
)
SCALER_STEP = _row(
    "torch.amp.grad_scaler:GradScaler",
    "step",
    "loops.watch",
    "steps whose update a GradScaler leaves out, so later steps are numbered too low",
)
UNSCALE = _row(
    "torch.amp.grad_scaler:GradScaler",
    "unscale_",
    "loops.watch",
    "gradients before GradScaler unscales them",
)
SHARDED_SCALE = _row(
    "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler",
    "scale",
    "loops.watch",
    "losses before scaling, under FSDP1",
)
SHARDED_UNSCALE = _row(
    "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler",
    "unscale_",
    "loops.watch",
    "gradients before ShardedGradScaler unscales them",
)
# A closure's scan comes before a watch's scan, which covers other parameters.
TOTAL_NORM = _row(
    "torch.nn.utils.clip_grad", "_get_total_norm", "loops.watch", "gradients before their norm is taken"
)
CLIP = _row(
    "torch.nn.utils.clip_grad",
    "_clip_grads_with_norm_",
    "loops.optimizer loops.watch",
    "gradients before they are clipped",
)
LOADER_INDICES = _row(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "_next_index",
    "loops.loaded_batches",
    "the indices of a batch's samples in their dataset",
)
LOADER_NEXT = _row(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "__next__",
    "loops.loaded_batches",
    "the indices of a batch's samples in their dataset",
)
EXIT = _row("sys", "exit", "loops.watch", "a bad step that ends in sys.exit")
GRAPH_REPLAY = _row(
    "torch.cuda:CUDAGraph", "replay", "state.cuda_graphs", "CUDA graphs that the program itself replays"
)
STREAM_SANITIZER = _row(
    "torch.cuda._sanitizer:EventHandler",
    "_handle_kernel_launch",
    "exchange.stream_sanitizer",
    "memory that two streams use without waiting for each other",
    on_objects=True,
)
CHECKPOINT_EARLY_STOP = _row(
    "torch.utils.checkpoint",
    "_enable_checkpoint_early_stop",
    "exchange.stream_sanitizer",
    "memory that two streams use without waiting for each other, under activation checkpointing",
)

# --- torch: what ranks send to each other ------------------------------------------------------------

# `exchange.transfers` shows a transfer to the operator trace. It is outside the subscribers that only wait
# for the transfer or scan its result.
_OF_GROUPS = "exchange.transfers loops.recorder exchange.boundaries"


def _of_groups(names: str, lost: str, needed_by: str = _OF_GROUPS, **rest: Any) -> dict[str, Point]:
    owner = "torch._C._distributed_c10d:ProcessGroup"
    return {name: _row(owner, name, needed_by, lost, is_hot=True, **rest) for name in names.split()}


_TRANSFERRED = "exchange.transfers exchange.boundaries"
PROCESS_GROUP = {
    **_of_groups(
        "allreduce allreduce_coalesced broadcast reduce allgather allgather_coalesced reduce_scatter "
        "alltoall gather scatter",
        "data exchanged by collectives of this kind",
        _TRANSFERRED,
    ),
    # From 2.13 on, torch.distributed calls other methods instead (docs/adr/0004).
    **_of_groups(
        "_allgather_base allgather_into_tensor_coalesced _reduce_scatter_base "
        "reduce_scatter_tensor_coalesced alltoall_base",
        "data exchanged by collectives of this kind",
        _TRANSFERRED,
        until="2.12",
    ),
    **_of_groups(
        "all_gather_single all_gather_single_coalesced reduce_scatter_single reduce_scatter_single_coalesced "
        "all_to_all_single gather_single",
        "data exchanged by collectives of this kind",
        _TRANSFERRED,
        since="2.13",
    ),
    **_of_groups("send", "sent messages", _TRANSFERRED),
    **_of_groups("recv", "received messages"),
    **_of_groups("recv_anysource", "messages received from any rank", "loops.recorder exchange.boundaries"),
    **_of_groups("_start_coalescing _end_coalescing", "the end of coalesced transfers", _TRANSFERRED),
    **_of_groups("barrier monitored_barrier", "barriers, which end transfers", "exchange.transfers"),
}
_FUNCTIONAL = "data exchanged by functional collectives (DTensor's)"
FUNCTIONAL = {
    f"{namespace}.{name}": _row(
        f"torch:ops.{namespace}", name, "exchange.functional_collectives", _FUNCTIONAL, **rest
    )
    for namespace, names, rest in (
        (
            "_c10d_functional",
            "all_reduce all_reduce_coalesced all_gather_into_tensor all_gather_into_tensor_coalesced "
            "reduce_scatter_tensor reduce_scatter_tensor_coalesced all_to_all_single broadcast wait_tensor",
            {},
        ),
        (
            "_c10d_functional_autograd",
            "all_gather_into_tensor reduce_scatter_tensor all_to_all_single",
            {},
        ),
        (
            "_c10d_functional_autograd",
            "all_reduce all_reduce_coalesced all_gather_into_tensor_coalesced "
            "reduce_scatter_tensor_coalesced broadcast",
            {"is_optional": True},
        ),
    )
    for name in names.split()
}
DDP_BROADCAST = _row(
    "torch.nn.parallel:DistributedDataParallel",
    "_default_broadcast_coalesced",
    "exchange.transfers exchange.boundaries",
    "buffers that DistributedDataParallel broadcasts",
)

# --- torch: sharded gradients and pipelines ----------------------------------------------------------

FSDP1_CLIP = _row(
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",
    "clip_grad_norm_",
    "loops.optimizer loops.watch",
    "gradients before FullyShardedDataParallel clips them",
)
_BEFORE_FSDP1 = "gradients before FullyShardedDataParallel reduces them"
FSDP1_REDUCE = _row("torch.distributed.fsdp._runtime_utils", "_reduce_grad", "sharding.fsdp1", _BEFORE_FSDP1)
FSDP1_REDUCE_WHOLE = _row(
    "torch.distributed.fsdp._runtime_utils", "_reduce_grad_no_shard", "sharding.fsdp1", _BEFORE_FSDP1
)
FSDP1_GATHER = _row(
    "torch.distributed.fsdp._flat_param:FlatParamHandle",
    "_all_gather_flat_param",
    "sharding.fsdp1",
    "which module's weights FullyShardedDataParallel gathers",
)
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP2_REDUCE = _row(_FSDP2, "foreach_reduce", "sharding.fsdp2", "gradients before fully_shard reduces them")
FSDP2_GATHER = _row(
    _FSDP2, "foreach_all_gather", "sharding.fsdp2", "which module's weights fully_shard gathers"
)

_PIPELINES = "torch.distributed.pipelining.schedules"
_SCHEDULED = "attach loops.optimizer loops.watch"  # `attach` is outermost for the same reason as above
SCHEDULE_STEPS = (
    _row(f"{_PIPELINES}:PipelineScheduleSingle", "step", _SCHEDULED, "steps of a pipeline schedule"),
    _row(f"{_PIPELINES}:PipelineScheduleMulti", "step", _SCHEDULED, "steps of a pipeline schedule"),
)
SCHEDULE_LOSS = _row(
    f"{_PIPELINES}:_PipelineSchedule",
    "_maybe_compute_loss",
    "sharding.pipelining",
    "losses of pipeline microbatches",
    on_objects=True,
)
STAGE = {
    name: _row(
        "torch.distributed.pipelining.stage:_PipelineStageBase",
        name,
        "sharding.pipelining",
        "microbatches of a pipeline stage, and what it receives",
        on_objects=True,
    )
    for name in (
        "_retrieve_recv_activations",
        "_retrieve_recv_grads",
        "forward_one_chunk",
        "backward_one_chunk",
        "backward_weight_one_chunk",
    )
}

# --- kernels that the dispatcher does not call -------------------------------------------------------

_KERNELS = "names and arguments of kernels of this kind"
EXTENSION_FUNCTION = _row("extension modules", "functions", "calls.kernels", _KERNELS, on_objects=True)
INDUCTOR_MODULES = _row(
    "torch._inductor.codecache:PyCodeCache", "load_by_key_path", "calls.kernels", _KERNELS
)
KERNEL_LAUNCHES = tuple(
    _row(owner, "run", "calls.kernels", _KERNELS)
    for owner in (
        "triton.runtime.jit:JITFunction",
        "triton.runtime.interpreter:InterpretedFunction",
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner",
    )
)

# --- Megatron-Core -----------------------------------------------------------------------------------

_MEGATRON = "megatron.locator"
MODULE_LOAD = _row(
    "torch.nn:Module",
    "load_state_dict",
    "loops.recorder",
    "that weights came from a checkpoint, which count as written by the program",
)
TORCH_LOAD = _row("torch", "load", "engine.checkpoint_files", "which checkpoint a script has loaded")
TORCH_SAVE = _row("torch", "save", "engine.checkpoint_files", "where a script saves its checkpoints")
SAFETENSORS_SAVE = _row(  # other modules have bound its `save_file`
    "safetensors.torch",
    "serialize_file",
    "engine.checkpoint_files",
    "where a script saves its checkpoints as safetensors",
)
DISTRIBUTED_LOAD = _row(
    "torch.distributed.checkpoint.filesystem:FileSystemReader",
    "read_data",
    "engine.checkpoint_files loops.recorder",
    "which distributed checkpoint a script has loaded",
)
DISTRIBUTED_SAVE = _row(  # on the coordinator, once all ranks have written
    "torch.distributed.checkpoint.filesystem:_FileSystemWriter",
    "finish",
    "engine.checkpoint_files",
    "where a script saves its distributed checkpoints",
)
MEGATRON_OPTIMIZER = _row(
    "megatron.core.optimizer", "get_megatron_optimizer", "megatron.scripts", "models of an unedited script"
)
MEGATRON_SETUP = _row(  # Megatron-LM, which is not a package
    "megatron.training.training",
    "setup_model_and_optimizer",
    "megatron.scripts",
    "models of an unedited script",
    on_objects=True,
)
SCHEDULES = tuple(
    _row(
        "megatron.core.pipeline_parallel.schedules",
        name,
        _MEGATRON,
        "forward and backward of this schedule, so no step is scanned as a whole or re-run",
    )
    for name in (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    )
)
FORWARD_STEP = _row(
    "megatron.core.pipeline_parallel.schedules",
    "forward_step",
    _MEGATRON,
    "forward microbatches and losses",
)
BACKWARD_STEP = _row(
    "megatron.core.pipeline_parallel.schedules", "backward_step", _MEGATRON, "backward microbatches"
)
START_GRAD_SYNC = _row(
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
    "start_grad_sync",
    _MEGATRON,
    "gradients before their data-parallel reduction",
    on_objects=True,
)
FINISH_GRAD_SYNC = _row(
    "megatron.core.distributed:DistributedDataParallel",
    "finish_grad_sync",
    _MEGATRON,
    "gradients after their data-parallel reduction",
    on_objects=True,
)
ZERO_GRAD_BUFFER = _row(
    "megatron.core.distributed:DistributedDataParallel",
    "zero_grad_buffer",
    _MEGATRON,
    "parameters before the step",
    on_objects=True,
)
_OPTIMIZER = "megatron.core.optimizer.optimizer"
PREPARE_GRADS = _row(
    f"{_OPTIMIZER}:MegatronOptimizer",
    "prepare_grads",
    _MEGATRON,
    "the gradients that are clipped",
    on_objects=True,
)
GRAD_NORM = _row(
    f"{_OPTIMIZER}:ChainedOptimizer", "get_grad_norm", _MEGATRON, "the gradient norm", on_objects=True
)
CLIP_GRAD_NORM = _row(
    f"{_OPTIMIZER}:MegatronOptimizer",
    "clip_grad_norm",
    _MEGATRON,
    "the gradient norm",
    on_objects=True,
)
READY_UPDATE = _row(
    f"{_OPTIMIZER}:MegatronOptimizer",
    "step_with_ready_grads",
    _MEGATRON,
    "the moment before the update",
    on_objects=True,
)
MEGATRON_STEP = _row(
    f"{_OPTIMIZER}:MegatronOptimizer", "step", _MEGATRON, "the end of a step", on_objects=True
)
_MEGATRON_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
_BEFORE_MEGATRON_FSDP = "gradients before Megatron-FSDP reduces them"
FSDP_BUCKET_REDUCE = _row(
    f"{_MEGATRON_FSDP}:GradReducePipeline",
    "_bucket_group_gradient_reduce",
    _MEGATRON,
    _BEFORE_MEGATRON_FSDP,
    on_objects=True,
)
FSDP_REDUCE_ALL = tuple(
    _row(f"{_MEGATRON_FSDP}:ParamAndGradBuffer", name, _MEGATRON, _BEFORE_MEGATRON_FSDP, on_objects=True)
    for name in ("reduce_scatter_gradients", "all_reduce_gradients")
)
FSDP_GATHER = _row(
    f"{_MEGATRON_FSDP}:AllGatherPipeline",
    "all_gather_params",
    _MEGATRON,
    "which module's weights Megatron-FSDP gathers",
    on_objects=True,
)
FSDP_GATHER_BUCKET = _row(
    f"{_MEGATRON_FSDP}:AllGatherPipeline",
    "async_bucket_gather",
    _MEGATRON,
    "which module's weights Megatron-FSDP gathers",
    on_objects=True,
)
VALIDATE_RESULT = _row(
    "megatron.core.rerun_state_machine:RerunStateMachine",
    "validate_result",
    "megatron.state",
    "errors of Megatron's own checks, which end one rank before all ranks have agreed",
    on_objects=True,
)
ENGINE_GRAPHS = _row(
    "megatron.core.transformer.module:GraphableMegatronModule",
    "cuda_graphs",
    "state.cuda_graphs",
    "operators of layers replayed from TransformerEngine's CUDA graphs",
    on_objects=True,
)

# --- DeepSpeed ---------------------------------------------------------------------------------------

INITIALIZE = _row("deepspeed", "initialize", "deepspeed_scripts", "engines of an unedited script")
SANITY_CHECK = _row(
    "deepspeed.runtime.engine:DeepSpeedEngine",
    "_do_optimizer_sanity_check",
    "loops.ownership",
    "a watched optimizer that is passed to DeepSpeed, where nothing would be found",
)
ENGINE = {
    name: _row("deepspeed.runtime.engine:DeepSpeedEngine", name, "deepspeed.locator", lost, on_objects=True)
    for name, lost in (
        ("backward", "the engine's backward passes"),
        ("scale", "losses before scaling"),
        ("_backward_prologue", "the start of a backward pass's bucket reductions"),
        ("_take_model_step", "the engine's steps"),
    )
}
_BEFORE_ZERO = "gradients before DeepSpeed reduces them"
ZERO_REDUCE = {
    attribute: _row(owner, attribute, "deepspeed.locator", _BEFORE_ZERO, on_objects=True)
    for owner, attribute in (
        ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer", "reduce_ipg_grads"),
        (
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
            "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        ),
        ("deepspeed.runtime.engine:DeepSpeedEngine", "buffered_allreduce_fallback"),
    )
}
ZERO_NORM = {
    attribute: _row(owner, attribute, "deepspeed.locator", "the gradient norm", on_objects=on_objects)
    for owner, attribute, on_objects in (
        ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer", "scaled_global_norm", True),
        ("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", "_get_norm_groups", True),
        ("deepspeed.runtime.bf16_optimizer", "get_global_norm_of_tensors", False),
        ("deepspeed.runtime.engine", "clip_grad_norm_", False),
        ("deepspeed.runtime.fp16.unfused_optimizer", "get_weight_norm", False),
        ("deepspeed.runtime.fp16.unfused_optimizer", "get_global_norm", False),
    )
}
ZERO_GATHER = _row(
    "deepspeed.runtime.zero.partition_parameters",
    "_dist_allgather_fn",
    "deepspeed.locator",
    "weights that ZeRO stage 3 gathers",
)

# --- transformers, Lightning -------------------------------------------------------------------------

TRAIN = _row("transformers:Trainer", "train", "transformers.trainer", "Trainers with the callback")
TRAINING_STEP = _row(
    "transformers:Trainer",
    "training_step",
    "transformers.trainer",
    "the Trainer's microbatches",
    on_objects=True,
)
DEBUGGER = {
    f"{module}.{name}": _row(
        f"transformers.{module}", name, "debugger.patch", "what --debug underflow_overflow finds"
    )
    for module, names in (
        ("trainer", "DebugUnderflowOverflow"),
        ("debug_utils", "DebugUnderflowOverflow detect_overflow get_abs_min_max"),
    )
    for name in names.split()
}
EXCEPT_HOOK = _row(
    "sys",
    "excepthook",
    "debugger.ranks engine.tracebacks",
    "another rank's finding in a rank's traceback, and tracebacks without nanlocator's frames",
)
LIGHTNING_LOG = {
    module: _row(
        f"{module}:LightningModule",
        "log",
        "state.lightning_steps",
        "re-runs, so Lightning logs their values again",
    )
    for module in ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
}
