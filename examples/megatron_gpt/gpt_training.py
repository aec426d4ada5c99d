"""A small GPT trained by real Megatron-Core on CPU and gloo, for tests and the demonstration.

In: a `TrainingConfig` and an initialised torch.distributed (gloo, 1 to 8 ranks). Out: a record per step and
fingerprints of everything that training changes, so that two runs can be compared bit for bit. The loop is
train_step of Megatron-LM's megatron/training/training.py without its command-line arguments; the data are
the bytes of Python's own standard library.
Everything is deterministic in `seed`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import pathlib
import random
import re
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import cpu_platform
import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

cpu_platform.install()

from context_attention import ContextParallelAttention  # noqa: E402
from megatron.core import parallel_state, rerun_state_machine, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_schedule_table  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

VOCABULARY = 256  # bytes
DATA_BYTES = 2_000_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RECOMPUTE = {
    None: {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@dataclasses.dataclass
class TrainingConfig:
    """Model and training. The data-parallel size follows from the number of processes."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None  # model chunks per pipeline stage (interleaved schedule)
    cp: int = 1  # context-parallel ranks: each holds a part of every sequence
    cp_comm_type: str = "all_gather"  # how attention gets the other ranks' tokens: all_gather, a2a or p2p
    rope: bool = False  # rotary position embedding instead of a learned absolute one
    sequence_parallel: bool = False
    num_experts: int | None = None  # of all ranks; None: dense layers. tp then needs sequence_parallel
    ep: int = 1  # expert-parallel ranks
    etp: int | None = None  # tensor-parallel ranks of an expert; None: tp
    token_dispatcher: str = "alltoall"  # or allgather
    router_topk: int = 2
    aux_loss_coeff: float = 0.01  # of the load-balancing loss; 0: none
    expert_bias: bool = False  # sigmoid scores and a bias per expert, updated every step without a gradient
    layers: int = 4
    mtp_layers: int | None = None  # of multi-token prediction, on the last stage
    hidden: int = 128
    heads: int = 4
    sequence: int = 64
    micro_batch: int = 2
    num_microbatches: int = 4
    precision: str = "fp32"  # fp32, bf16 or fp16 (dynamic loss scale)
    initial_loss_scale: float = 65536.0
    tied_embeddings: bool = False
    dropout: float = 0.0
    bias_fusions: bool = False  # of bias and gelu, and of bias, dropout and addition
    recompute: str | None = None  # full (each layer again in backward) or selective (the core attention)
    # The interleaved schedule computes while it sends and receives: megatron.training's default.
    overlap_p2p_comm: bool = False
    # Megatron's default is True; on gloo, overlapped sends that are still in flight then read freed memory.
    deallocate_pipeline_outputs: bool = False
    # With cp > 1 the mean that a loss function of two values returns is over the labels of all
    # context-parallel ranks, as pretrain_gpt.py's was; True: over this rank's own, which may all be masked.
    loss_of_own_tokens: bool = False
    # The loss function returns (sum, valid labels, report), as pretrain_gpt.py's, instead of (mean, report).
    loss_counts_tokens: bool = False
    calculate_per_token_loss: bool = False  # gradients are divided by the labels of the whole step
    use_distributed_optimizer: bool = False
    # Megatron-FSDP instead of DistributedDataParallel, and what it shards: optim, optim_grads or
    # optim_grads_params (a unit is a transformer layer). Needs use_distributed_optimizer.
    megatron_fsdp: str | None = None
    # Replicas of the shards: with 2 of 4 data-parallel ranks each pair keeps the whole.
    distributed_optimizer_instances: int = 1
    outer_dp_sharding_strategy: str = "no_shard"  # "optim": Megatron-FSDP shards the state over the replicas
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True  # Megatron's default for bf16; False: buffers in the parameters' dtype
    bucket_size: int | None = None  # elements; small values give small models several buckets
    check_for_nan_in_grad: bool = False  # Megatron's own check, one norm per bucket
    check_for_nan_in_loss: bool = False  # the check of pretrain_gpt.py's loss function
    rerun_state_machine: str = "disabled"  # or validate_results: Megatron repeats a step that a check rejects
    log_num_zeros: bool = False
    lr: float = 1e-3
    clip_grad: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise ValueError(f"precision is {self.precision!r}, expected one of {', '.join(_DTYPES)}")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("overlap_param_gather needs use_distributed_optimizer")
        if self.overlap_p2p_comm and not self.vp:
            raise ValueError("overlap_p2p_comm needs vp")
        if self.recompute not in _RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}, expected None, full or selective")
        if self.calculate_per_token_loss and not self.loss_counts_tokens:
            raise ValueError("calculate_per_token_loss needs loss_counts_tokens")
        if self.sequence % (2 * self.cp):
            raise ValueError(f"sequence {self.sequence} does not divide into 2 * cp = {2 * self.cp} chunks")
        if self.num_experts is None and (self.ep > 1 or self.expert_bias):
            raise ValueError("ep and expert_bias need num_experts")
        if self.num_experts is not None and self.num_experts % self.ep:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.ep} ranks")
        if self.num_experts is not None and self.token_dispatcher == "alltoall" and self.expert_tp > 1:
            raise ValueError(
                "alltoall with tensor-parallel experts gathers unequal sizes, gloo cannot: etp=1"
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp


@dataclasses.dataclass
class StepRecord:
    """One optimizer step as reported by Megatron, the same on every rank except for the fingerprints."""

    iteration: int  # counted from 1
    loss: float  # mean over microbatches and data-parallel ranks
    grad_norm: float | None  # None: the step was skipped before the norm (loss scale overflow)
    successful: bool
    zeros: float | None
    loss_scale: float
    # Load balancing and multi-token prediction, summed over this rank's layers and microbatches.
    aux_loss: float | None
    gradients_sha256: str  # of this rank's main_grad bits, after the reduction, before the optimizer
    weights_sha256: str  # of this rank's parameters after the step
    seconds: float


@functools.cache
def standard_library_bytes() -> torch.Tensor:
    """uint8 [DATA_BYTES]: the top-level modules of the running Python, in the order of their names."""
    data = bytearray()
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= DATA_BYTES:
            break
    return torch.frombuffer(data, dtype=torch.uint8)[:DATA_BYTES]


class MegatronExit(RuntimeError):
    """Megatron's rerun state machine ends the training, on every rank: train_step would save a checkpoint
    here and pretrain() exit with `exit_code`."""

    def __init__(self, exit_code: int, should_checkpoint: bool) -> None:
        super().__init__(f"the rerun state machine exits with code {exit_code}")
        self.exit_code = exit_code
        self.should_checkpoint = should_checkpoint


def _with_known(function: Callable, *args, **options):
    """Calls `function` with the options that this version of Megatron-Core has."""
    known = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return function(*args, **{name: value for name, value in options.items() if takes_any or name in known})


class Trainer:
    """Builds model, gradient buckets and optimizer; trains. torch.distributed must be initialised.

    A training script passes `model_chunks` (one DistributedDataParallel per virtual pipeline chunk) and
    `optimizer` to `nanlocator.megatron.install`. `iteration` (from 1), `microbatch` (from 0), `chunk` and
    `direction` describe the current position, in recomputed forwards too: there `direction` is "backward".
    `parameters` maps global names (layer and expert numbers counted over all ranks) to this rank's
    parameters.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.iteration = 0
        self.microbatch: int | None = None
        self.chunk: int | None = None
        self.direction: str | None = None
        self.run_directory: pathlib.Path | None = None  # where nanlocator writes, for faults that watch it
        self.at_iteration_start: list[Callable[[], None]] = []
        self.planted: list[dict] = []  # effects of faults on this rank: a test's ground truth
        self.records: list[StepRecord] = []
        self._initialise_parallel_state()
        self._build_model()
        self._build_optimizer()
        self._initialise_rerun_state_machine()

    # ---- building -------------------------------------------------------------------------------------

    def _initialise_parallel_state(self) -> None:
        config = self.config
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            virtual_pipeline_model_parallel_size=config.vp,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            expert_tensor_parallel_size=config.expert_tp,
            distributed_timeout_minutes=1,
            create_gloo_process_groups=False,  # the groups are gloo already
            num_distributed_optimizer_instances=config.distributed_optimizer_instances,
        )
        self.coordinates = {
            "rank": dist.get_rank(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
        }
        assert self.coordinates == self.coordinates_of(dist.get_rank())
        # As Megatron's training does: dropout differs per pipeline stage.
        seed = config.seed + 100 * self.coordinates["pp"]
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Megatron's default order of ranks, tp-cp-ep-dp-pp, applied twice: to the dense layers, with
        ep = 1, and to the experts, with the experts' tp."""
        tp, cp = self.config.tp, self.config.cp
        dp_size = dist.get_world_size() // (tp * cp * self.config.pp)
        return {
            "rank": rank,
            "tp": rank % tp,
            "cp": rank // tp % cp,
            "dp": rank // (tp * cp) % dp_size,
            "pp": rank // (tp * cp * dp_size),
            "ep": rank // self.config.expert_tp % self.config.ep,
        }

    def _build_model(self) -> None:
        config = self.config
        dtype = _DTYPES[config.precision]
        self.transformer_config = _with_known(
            TransformerConfig,
            num_layers=config.layers,
            hidden_size=config.hidden,
            num_attention_heads=config.heads,
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            virtual_pipeline_model_parallel_size=config.vp,
            context_parallel_size=config.cp,
            cp_comm_type=config.cp_comm_type if config.cp > 1 else None,
            sequence_parallel=config.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            hidden_dropout=config.dropout,
            attention_dropout=config.dropout,
            attention_softmax_in_fp32=True,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,  # these need CUDA kernels
            masked_softmax_fusion=False,
            bias_dropout_fusion=config.bias_fusions,
            bias_activation_fusion=config.bias_fusions,
            persist_layer_norm=False,
            deallocate_pipeline_outputs=config.deallocate_pipeline_outputs,
            calculate_per_token_loss=config.calculate_per_token_loss,
            mtp_num_layers=config.mtp_layers,
            mtp_loss_scaling_factor=0.1,  # no default up to Megatron-Core 0.15
            # Two interleaved stages are each other's previous and next one, and gloo matches messages of a
            # pair by order: batched, an activation and a gradient change places, without an error.
            batch_p2p_comm=not (config.vp and config.pp == 2) and not config.overlap_p2p_comm,
            overlap_p2p_comm=config.overlap_p2p_comm,
            **_RECOMPUTE[config.recompute],
            **self._expert_options(),
        )
        ddp_config = _with_known(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=config.grad_reduce_in_fp32,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            use_distributed_optimizer=config.use_distributed_optimizer,
            check_for_nan_in_grad=config.check_for_nan_in_grad,
            bucket_size=config.bucket_size,
            use_megatron_fsdp=config.megatron_fsdp is not None,
            data_parallel_sharding_strategy=config.megatron_fsdp or "no_shard",
            gradient_reduce_div_fusion=False,  # a reduction of NCCL's
            num_distributed_optimizer_instances=config.distributed_optimizer_instances,
            outer_dp_sharding_strategy=config.outer_dp_sharding_strategy,
        )
        self.model_chunks = []
        for chunk in range(config.vp or 1):
            vp_stage = chunk if config.vp else None
            if config.vp:  # Megatron-Core 0.12 takes no vp_stage
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            layer = get_gpt_layer_local_spec(num_experts=config.num_experts, moe_grouped_gemm=False)
            if config.cp > 1:
                layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
            model = _with_known(
                GPTModel,
                self.transformer_config,
                layer,
                vocab_size=VOCABULARY,
                max_sequence_length=config.sequence,
                pre_process=_with_known(
                    parallel_state.is_pipeline_first_stage, ignore_virtual=False, vp_stage=vp_stage
                ),
                post_process=_with_known(
                    parallel_state.is_pipeline_last_stage, ignore_virtual=False, vp_stage=vp_stage
                ),
                share_embeddings_and_output_weights=config.tied_embeddings,
                position_embedding_type="rope" if config.rope else "learned_absolute",
                mtp_block_spec=_with_known(  # None if there is none
                    get_gpt_mtp_block_spec,
                    self.transformer_config,
                    layer,
                    use_transformer_engine=False,
                    vp_stage=vp_stage,
                ),
                vp_stage=vp_stage,
            )
            if config.precision != "fp32":
                model = Float16Module(self.transformer_config, model)
            for name, parameter in _global_parameter_names([model]):
                self._draw_weight(name, parameter)
            self.model_chunks.append(self._sharing_data(ddp_config, model, disable_bucketing=chunk > 0))
        self.parameters = dict(_global_parameter_names(self.model_chunks))
        self.chunk_of = {
            name: number
            for number, chunk in enumerate(self.model_chunks)
            for name, _ in _global_parameter_names([chunk])
        }

    def _sharing_data(self, ddp_config, model: torch.nn.Module, disable_bucketing: bool) -> torch.nn.Module:
        """`model` in the wrapper that reduces its gradients over the data-parallel ranks."""
        if self.config.megatron_fsdp is None:
            wrap, options = DistributedDataParallel, {}
        else:
            from megatron.core.distributed import FullyShardedDataParallel  # from 0.14 on

            wrap, options = FullyShardedDataParallel, {"device": torch.device("cpu")}
        return wrap(
            self.transformer_config, ddp_config, model, disable_bucketing=disable_bucketing, **options
        )

    def _expert_options(self) -> dict:
        """Fields of TransformerConfig. The experts are a SequentialMLP: one local MLP after another."""
        config = self.config
        if config.num_experts is None:
            return {}
        return {
            "num_moe_experts": config.num_experts,
            "expert_model_parallel_size": config.ep,
            "expert_tensor_parallel_size": config.expert_tp,
            "moe_token_dispatcher_type": config.token_dispatcher,
            "moe_router_topk": config.router_topk,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": config.aux_loss_coeff,
            "moe_router_enable_expert_bias": config.expert_bias,
            "moe_router_score_function": "sigmoid" if config.expert_bias else "softmax",
            "add_bias_linear": False,  # Megatron refuses biases in experts that are tensor-parallel
        }

    @torch.no_grad()
    def _draw_weight(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Megatron's distributions, but drawn per name: every layout of ranks starts from the same model,
        and trains it to the same losses up to rounding."""
        if parameter.dim() == 1:
            return  # norms start at one, biases at zero
        if self.config.tied_embeddings and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        std = self.transformer_config.init_method_std
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= (2 * self.config.layers) ** 0.5
        shape = list(parameter.shape)
        parts, part = 1, 0
        if getattr(parameter, "tensor_model_parallel", False):
            parts, part = self.config.tp, self.coordinates["tp"]
            if ".experts." in name:
                parts, part = self.config.expert_tp, parallel_state.get_expert_tensor_parallel_rank()
        dimension = parameter.partition_dim if parts > 1 else 0
        shape[dimension] *= parts
        seed = (zlib.crc32(name.encode()) << 20) + self.config.seed
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
        parameter.copy_(whole.chunk(parts, dimension)[part])

    def _build_optimizer(self) -> None:
        config = self.config
        self.optimizer = _with_known(
            get_megatron_optimizer,
            _with_known(
                OptimizerConfig,
                optimizer="adam",
                lr=config.lr,
                clip_grad=config.clip_grad,
                bf16=config.precision == "bf16",
                fp16=config.precision == "fp16",
                params_dtype=_DTYPES[config.precision],
                initial_loss_scale=config.initial_loss_scale,
                use_distributed_optimizer=config.use_distributed_optimizer,
                overlap_param_gather=config.overlap_param_gather,
                log_num_zeros_in_grad=config.log_num_zeros,
            ),
            self.model_chunks,
            use_gloo_process_groups=False,
        )
        # With Megatron-FSDP and a single chunk nothing is chained.
        self.optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        # megatron.training sets these between building and training.
        self.transformer_config.finalize_model_grads_func = finalize_model_grads
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        if config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model_chunks]
            self.transformer_config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync

    def _initialise_rerun_state_machine(self) -> None:
        # As megatron/training/initialize.py does: the machine itself saves the other random states.
        tracker = tensor_parallel.get_cuda_rng_tracker()
        rerun_state_machine.destroy_rerun_state_machine()
        rerun_state_machine.initialize_rerun_state_machine(
            state_save_func=lambda: {"rng_tracker_states": tracker.get_states()},
            state_restore_func=lambda saved: tracker.set_states(dict(saved["rng_tracker_states"])),
            mode=rerun_state_machine.RerunMode(self.config.rerun_state_machine),
        )

    # ---- training -------------------------------------------------------------------------------------

    def draw_batch(self, iteration: int, microbatch: int) -> dict:
        """One microbatch of this data-parallel rank: this context-parallel rank's tokens of its sequences.
        A function of its arguments, not of the global RNG."""
        config = self.config
        data = standard_library_bytes()
        seed = config.seed
        for number in (iteration, microbatch, self.coordinates["dp"]):
            seed = (seed * 1_000_003 + number) % 2**62
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - config.sequence - 1, (config.micro_batch,), generator=generator)
        samples = torch.stack([data[start : start + config.sequence + 1] for start in starts.tolist()]).long()
        positions = torch.arange(config.sequence)
        batch = {
            "tokens": samples[:, :-1].contiguous(),
            "labels": samples[:, 1:].contiguous(),
            "loss_mask": torch.ones(config.micro_batch, config.sequence),
            "position_ids": positions.expand(config.micro_batch, -1),
            "attention_mask": (positions[:, None] < positions[None, :])[None, None],  # True: hidden
        }
        # From 0.18 on it uses the group of all ranks if none is given.
        group = parallel_state.get_context_parallel_group()
        own = _with_known(get_batch_on_this_cp_rank, batch, cp_group=group, is_hybrid_cp=False)
        return {"microbatch": microbatch, **own}

    def _data_iterator(self) -> Iterator[dict]:
        batches = (self.draw_batch(self.iteration, k) for k in range(self.config.num_microbatches))
        if self.config.rerun_state_machine == "disabled":
            return batches
        return rerun_state_machine.RerunDataIterator(batches)

    def forward_step(self, data_iterator: Iterator[dict], model: torch.nn.Module):
        """Megatron's forward_step_func: output of one chunk for one microbatch, and the loss function."""
        batch = next(data_iterator)
        chunk = self.model_chunks.index(model)
        self._enter("forward", batch["microbatch"], chunk)
        output = model(
            batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
        )
        # In the schedules a microbatch's backward comes later than the next one's forward. It begins with the
        # gradient of this output, before any layer is recomputed.
        output.register_hook(lambda _: self._enter("backward", batch["microbatch"], chunk))
        return output, functools.partial(self._loss_function, batch["loss_mask"])

    def _enter(self, direction: str | None, microbatch: int | None, chunk: int | None) -> None:
        self.direction, self.microbatch, self.chunk = direction, microbatch, chunk

    def _loss_function(self, mask: torch.Tensor, losses: torch.Tensor):
        """The loss, which the schedule divides, and {"loss": [sum, weight]}, a copy, because the schedule
        divides in place."""
        loss = (losses.float() * mask).sum()
        if self.config.loss_counts_tokens:
            self._validate_loss(loss)
            tokens = mask.sum().to(torch.int)
            return loss, tokens, {"loss": torch.stack([loss.detach(), tokens.float()])}
        tokens = mask.sum()
        if self.config.cp > 1 and not self.config.loss_of_own_tokens:
            # As pretrain_gpt.py up to Megatron-Core 0.11: the sum's gradient stays this rank's own, and the
            # schedule multiplies by cp because the gradients are averaged over these ranks, too.
            total = torch.stack([loss, tokens])
            dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
            loss = mean = total[0] / total[1]
        else:
            mean = loss / tokens
            loss = mean / self.config.cp
        self._validate_loss(loss)
        return loss, {"loss": torch.stack([mean.detach(), torch.ones_like(mean)])}

    def _validate_loss(self, loss: torch.Tensor) -> None:
        """As the loss function of pretrain_gpt.py: raises here where the rerun state machine is disabled."""
        if not self.config.check_for_nan_in_loss:
            return
        for kind, is_rejected in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            rerun_state_machine.get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_rejected,
                message=f"found {kind} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )

    def train(
        self,
        steps: int,
        on_step: Callable[[StepRecord], None] | None = None,
        undo: Iterable[int] = (),
    ) -> list[StepRecord]:
        """Trains `steps` further iterations.

        `undo`: iterations after which weights, buffers, optimizer and loss scale are restored to what they
        were before: many faults can then be planted one after another, each into a healthy model.

        Raises MegatronExit, on every rank, where Megatron's rerun state machine ends the training.
        """
        undo = set(undo)
        for _ in range(steps):
            started = time.perf_counter()
            self.iteration += 1
            snapshot = _Snapshot(self) if self.iteration in undo else None
            for callback in self.at_iteration_start:
                callback()
            losses = self._forward_backward()
            gradients = _sha256(self._reduced_gradient(parameter) for parameter in self.parameters.values())
            loss_scale = float(self.optimizer.get_loss_scale())
            successful, grad_norm, zeros = self.optimizer.step()
            loss = self._mean_loss(losses)
            if snapshot is not None:
                snapshot.restore()
            record = StepRecord(
                iteration=self.iteration,
                loss=loss,
                grad_norm=None if grad_norm is None else float(grad_norm),
                successful=bool(successful),
                zeros=None if zeros is None else float(zeros),
                loss_scale=loss_scale,
                aux_loss=self._take_aux_loss(),
                gradients_sha256=gradients,
                weights_sha256=_sha256(self.parameters.values()),
                seconds=time.perf_counter() - started,
            )
            self.records.append(record)
            if on_step is not None:
                on_step(record)
        return self.records

    def _forward_backward(self) -> list[dict]:
        """The first half of megatron.training's train_step: gradients are complete when it returns."""
        machine = rerun_state_machine.get_rerun_state_machine()
        iterators = [self._data_iterator() for _ in self.model_chunks]
        data_iterator = iterators if self.config.vp else iterators[0]
        while machine.should_run_forward_backward(data_iterator):
            for chunk in self.model_chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=self.forward_step,
                data_iterator=data_iterator,
                model=self.model_chunks,
                num_microbatches=self.config.num_microbatches,
                seq_length=self.config.sequence,
                micro_batch_size=self.config.micro_batch,
                forward_only=False,
            )
            self._enter(None, None, None)
        should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
        if should_exit:
            raise MegatronExit(exit_code, should_checkpoint)
        return losses

    @staticmethod
    def _reduced_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return parameter.main_grad
        return torch.empty(0) if parameter.grad is None else parameter.grad  # this rank has no shard of it

    def _mean_loss(self, losses: Sequence[dict]) -> float:
        # Only the last pipeline stage has losses; the sum over all ranks brings their mean to everyone.
        total = torch.zeros(2, dtype=torch.float64)
        for entry in losses:
            total += entry["loss"].double()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def _take_aux_loss(self) -> float | None:
        """Reads the trackers that layers add to in every forward, and empties them, as Megatron's log does.
        Forwarding a microbatch twice would count it twice."""
        if self.config.num_experts is None and self.config.mtp_layers is None:
            return None
        # Megatron-Core 0.12 has it in parallel_state.
        holder = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
        tracker = holder.get_moe_layer_wise_logging_tracker()
        total = sum(float(entry["values"].sum()) for entry in tracker.values())
        moe_utils.clear_aux_losses_tracker()
        if "values" in MTPLossLoggingHelper.tracker:
            total += float(MTPLossLoggingHelper.tracker["values"].sum())
            MTPLossLoggingHelper.clean_loss_in_tracker()
        return total

    # ---- for faults and tests ----------------------------------------------------------------------------

    def layer(self, number: int) -> TransformerLayer | None:
        """Layer `number` (from 0, over all stages), or None if this rank does not hold it."""
        for chunk in self.model_chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer) and module.layer_number == number + 1:
                    return module
        return None

    def expert(self, layer: int, expert: int) -> torch.nn.Module | None:
        """The MLP of expert `expert` (from 0, over all ranks) of a layer, or None if not on this rank."""
        mlp = getattr(self.layer(layer), "mlp", None)
        if not isinstance(mlp, MoELayer) or expert not in mlp.local_expert_indices:
            return None
        return mlp.experts.local_experts[mlp.local_expert_indices.index(expert)]

    def received_microbatches(self, direction: str) -> list[tuple[int, int]]:
        """(microbatch, chunk) of the pipeline transfers that this rank receives in one forward-backward, in
        the order in which it posts them: the order in which the schedule will use them."""
        config = self.config
        stage, chunks = self.coordinates["pp"], config.vp or 1
        table = get_schedule_table(config.num_microbatches, chunks, config.pp)
        if direction == "backward":
            table = [(microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
        # The first stage's first chunk begins with the data, the last stage's last one with the loss.
        edge = (0, 0) if direction == "forward" else (config.pp - 1, chunks - 1)
        return [(microbatch, chunk) for microbatch, chunk in table if (stage, chunk) != edge]

    def bucket_groups(self) -> list:
        """The bucket groups of dense and of expert parameters, which have separate data-parallel groups."""
        return [
            group
            for chunk in self.model_chunks
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        ]

    def optimizer_of(self, parameter: torch.nn.Parameter):
        """The one of the chained Megatron optimizers (dense, expert) that updates `parameter`, or None where
        another data-parallel rank does."""
        for optimizer in self.optimizers:
            if optimizer.is_stub_optimizer:
                continue
            if self.config.megatron_fsdp:
                if any(_is_updated_by(parameter, updated) for updated in _adam_parameters(optimizer)):
                    return optimizer
            elif self.config.use_distributed_optimizer:
                if parameter in optimizer.model_param_group_index_map:
                    return optimizer
            elif any(_is_updated_by(parameter, updated) for updated in _adam_parameters(optimizer)):
                return optimizer
        return None

    def shares_shards_with(self, rank: int) -> bool:
        """Whether both are among the data-parallel ranks that keep one replica of the optimizer's state."""
        size = parallel_state.get_data_parallel_world_size() // self.config.distributed_optimizer_instances
        return self.coordinates["dp"] // size == self.coordinates_of(rank)["dp"] // size

    def owned_range(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Elements [start, end) of the flattened parameter that this rank's optimizer updates."""
        optimizer = self.optimizer_of(parameter)
        if optimizer is None:
            return 0, 0
        if not self.config.use_distributed_optimizer:
            return 0, parameter.numel()
        if self.config.megatron_fsdp:
            group, item = self._sharded_group_of(parameter)
            return group.main_grad_buffer._get_item_slice_in_shard(item)
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        return owned.start, owned.end

    def stored_weight(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int]:
        """The tensor that forward uses or, if weights are sharded, gathers on this rank; and the index of its
        first element in the flattened parameter."""
        if not self.config.megatron_fsdp:
            return parameter.data, 0
        group, item = self._sharded_group_of(parameter)
        shard = group.model_weight_buffer.get_item(item, only_shard=True)
        return shard, group.model_weight_buffer._get_item_slice_in_shard(item)[0]

    def _sharded_group_of(self, parameter: torch.nn.Parameter):
        """The group of Megatron-FSDP's buffers that holds `parameter`, and its number there."""
        for chunk in self.model_chunks:
            for group in chunk.param_and_grad_buffer.parameter_groups:
                item = group.main_grad_buffer.param_idx.get(parameter.orig_param)
                if item is not None:
                    return group, item
        raise KeyError("the parameter belongs to no group")

    def optimizer_parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The tensor that Adam updates for `parameter`: itself, its fp32 copy, or this rank's shard."""
        if self.config.megatron_fsdp:
            return parameter
        if self.config.use_distributed_optimizer:
            optimizer = self.optimizer_of(parameter)
            group, order = optimizer.model_param_group_index_map[parameter]
            return optimizer.optimizer.param_groups[group]["params"][order]
        return parameter if self.config.precision == "fp32" else parameter.main_param

    def finish(self) -> None:
        """Waits for parameters that are still being gathered. All ranks together."""
        for chunk in self.model_chunks:
            if self.config.megatron_fsdp:
                chunk.stop_communication()
            elif chunk.use_forward_hook:
                chunk.disable_forward_pre_hook()
                chunk.enable_forward_pre_hook()

    def buffers(self) -> list[torch.Tensor]:
        """The model's buffers; DistributedDataParallel calls its gradient buckets `buffers`."""
        return [buffer for chunk in self.model_chunks for buffer in chunk.module.buffers()]

    def fingerprints(self) -> dict[str, str]:
        """sha256 of everything that this rank's training changes: weights, buffers (expert bias), optimizer
        state, random states."""
        states: list[torch.Tensor] = []
        for optimizer in self.optimizers:
            for tensor in _adam_parameters(optimizer):
                states.append(tensor)
                states += [s for _, s in sorted(optimizer.optimizer.state[tensor].items())]
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        numpy_state = numpy.random.get_state()
        return {
            "weights": _sha256(self.parameters.values()),
            "buffers": _sha256(self.buffers()),
            "optimizer": _sha256(states),
            "rng_torch": _sha256([torch.get_rng_state()]),
            "rng_tracker": _sha256(tracker[name] for name in sorted(tracker)),
            "rng_python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
            "rng_numpy": hashlib.sha256(
                numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()
            ).hexdigest(),
        }

    def non_finite_parameters(self) -> dict[str, int]:
        """Names of this rank's parameters that are not finite, with the number of their bad elements."""
        counts = {
            name: int((~torch.isfinite(local_tensor(parameter.detach()))).sum())
            for name, parameter in self.parameters.items()
        }
        return {name: count for name, count in counts.items() if count}


class _Snapshot:
    """Saves weights, buffers, Adam's state and the loss scale before a step, and restores them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        moved = [*trainer.parameters.values(), *trainer.buffers()]
        if trainer.config.megatron_fsdp:  # the gathered weights beside their shards
            moved = trainer.buffers() + [
                buffer.data
                for chunk in trainer.model_chunks
                for group in chunk.param_and_grad_buffer.parameter_groups
                for buffer in (group.model_weight_buffer, group.main_weight_buffer)
                if buffer is not None
            ]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in moved]
        self._adam = []
        self._scalers = []
        for optimizer in trainer.optimizers:
            for parameter in _adam_parameters(optimizer):
                states = optimizer.optimizer.state
                saved = _cloned(states.get(parameter, {}))
                self._adam.append((parameter, parameter.detach().clone(), states, saved))
            scaler = getattr(optimizer, "grad_scaler", None)
            if scaler is not None:
                self._scalers.append((scaler, _cloned(scaler.state_dict())))

    @torch.no_grad()
    def restore(self) -> None:
        if self._trainer.config.megatron_fsdp:
            for chunk in self._trainer.model_chunks:
                chunk.stop_communication()  # gathering for the next forward
        for tensor, copy in self._tensors:
            tensor.copy_(copy)
        for parameter, copy, states, saved in self._adam:
            parameter.copy_(copy)
            if not saved:
                states.pop(parameter, None)  # this was Adam's first step
            for key, value in saved.items():
                states[parameter][key].copy_(value)
        for scaler, saved in self._scalers:
            scaler.load_state_dict(saved)


def _cloned(state: dict) -> dict:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}


def _adam_parameters(optimizer) -> list[torch.Tensor]:
    if optimizer.is_stub_optimizer:
        return []
    return [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]


def _is_updated_by(parameter: torch.nn.Parameter, updated: torch.Tensor) -> bool:
    return updated is parameter or updated is getattr(parameter, "main_param", None)


def _global_parameter_names(model_chunks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in model_chunks:
        layers = {
            name: module for name, module in chunk.named_modules() if isinstance(module, TransformerLayer)
        }
        for name, parameter in chunk.named_parameters():
            for path, layer in layers.items():
                if name.startswith(path + "."):
                    inside = _with_global_expert_number(name[len(path) :], layer.mlp)
                    name = re.sub(r"\d+$", str(layer.layer_number - 1), path) + inside
                    break
            yield re.sub(r"^(module\.)+", "", name), parameter


def _with_global_expert_number(name: str, mlp: torch.nn.Module) -> str:
    if not isinstance(mlp, MoELayer):
        return name
    return re.sub(
        r"(?<=\.local_experts\.)\d+", lambda local: str(mlp.local_expert_indices[int(local[0])]), name
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = local_tensor(tensor.detach())
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
        digest.update(tensor.view(torch.uint8).numpy())
    return digest.hexdigest()
