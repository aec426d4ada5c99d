"""A small GPT trained by real Megatron-Core on CPU and gloo, for tests and the demonstration.

In: a `TrainingConfig` and an initialised torch.distributed (gloo, 1 to 8 ranks). Out: a record per step and
fingerprints of everything that training moves, so that two runs can be compared bit for bit. The loop is the
plain one of Megatron-Core's documentation; the data are the bytes of Python's own standard library.
Everything is deterministic in `seed`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
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

cpu_platform.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

VOCABULARY = 256  # bytes
DATA_BYTES = 2_000_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class TrainingConfig:
    """What is trained and how. The data-parallel size follows from the number of processes."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None  # model chunks per pipeline stage (interleaved schedule)
    sequence_parallel: bool = False
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence: int = 64
    micro_batch: int = 2
    num_microbatches: int = 4
    precision: str = "fp32"  # fp32, bf16 or fp16 (dynamic loss scale)
    initial_loss_scale: float = 65536.0
    tied_embeddings: bool = False
    dropout: float = 0.0
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True  # Megatron's default for bf16; False: buffers in the parameters' dtype
    bucket_size: int | None = None  # elements; small values give small models several buckets
    check_for_nan_in_grad: bool = False  # Megatron's own check, one norm per bucket
    log_num_zeros: bool = False
    lr: float = 1e-3
    clip_grad: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise ValueError(f"precision is {self.precision!r}, expected one of {', '.join(_DTYPES)}")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("overlap_param_gather needs use_distributed_optimizer")


@dataclasses.dataclass
class StepRecord:
    """One optimizer step as Megatron reported it, the same on every rank but for the fingerprints."""

    iteration: int  # counted from 1
    loss: float  # mean over microbatches and data-parallel ranks
    grad_norm: float | None  # None: the step was left before the norm (loss scale overflow)
    successful: bool
    zeros: float | None
    loss_scale: float
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


class Trainer:
    """Builds model, gradient buckets and optimizer; trains. torch.distributed must be initialised.

    `model_chunks` (one DistributedDataParallel per virtual pipeline chunk) and `optimizer` are what a
    training script hands to `nanlocator.megatron.install`. `iteration` (from 1) and `microbatch` (from 0)
    tell where training stands. `parameters` maps global names (layer numbers counted over all pipeline
    stages) to this rank's parameters.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.iteration = 0
        self.microbatch: int | None = None
        self.at_iteration_start: list[Callable[[], None]] = []
        self.planted: list[dict] = []  # what faults did on this rank: a test's truth
        self.records: list[StepRecord] = []
        self._initialise_parallel_state()
        self._build_model()
        self._build_optimizer()

    # ---- building -------------------------------------------------------------------------------------

    def _initialise_parallel_state(self) -> None:
        config = self.config
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            virtual_pipeline_model_parallel_size=config.vp,
            distributed_timeout_minutes=1,
            create_gloo_process_groups=False,  # the groups are gloo already
        )
        self.coordinates = {
            "rank": dist.get_rank(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
        }
        assert self.coordinates == self.coordinates_of(dist.get_rank())
        # As Megatron's training does: dropout differs per pipeline stage.
        seed = config.seed + 100 * self.coordinates["pp"]
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Megatron's default order of ranks, tp-cp-ep-dp-pp."""
        dp_size = dist.get_world_size() // (self.config.tp * self.config.pp)
        return {
            "rank": rank,
            "tp": rank % self.config.tp,
            "dp": rank // self.config.tp % dp_size,
            "pp": rank // (self.config.tp * dp_size),
        }

    def _build_model(self) -> None:
        config = self.config
        dtype = _DTYPES[config.precision]
        self.transformer_config = TransformerConfig(
            num_layers=config.layers,
            hidden_size=config.hidden,
            num_attention_heads=config.heads,
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            virtual_pipeline_model_parallel_size=config.vp,
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
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            # With True, sends that are still in flight on gloo read freed memory: NaN at step 1.
            deallocate_pipeline_outputs=False,
            # Two interleaved stages are each other's previous and next one, and gloo matches messages of a
            # pair by order: batched, an activation and a gradient change places, without an error.
            batch_p2p_comm=not (config.vp and config.pp == 2),
        )
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.grad_reduce_in_fp32,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            use_distributed_optimizer=config.use_distributed_optimizer,
            check_for_nan_in_grad=config.check_for_nan_in_grad,
            bucket_size=config.bucket_size,
        )
        self.model_chunks = []
        for chunk in range(config.vp or 1):
            vp_stage = chunk if config.vp else None
            model = GPTModel(
                self.transformer_config,
                get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=config.sequence,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=config.tied_embeddings,
                vp_stage=vp_stage,
            )
            if config.precision != "fp32":
                model = Float16Module(self.transformer_config, model)
            self.model_chunks.append(
                DistributedDataParallel(
                    self.transformer_config, ddp_config, model, disable_bucketing=chunk > 0
                )
            )
        self.parameters = dict(_global_parameter_names(self.model_chunks))
        for name, parameter in self.parameters.items():
            self._draw_weight(name, parameter)

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
        parts = self.config.tp if getattr(parameter, "tensor_model_parallel", False) else 1
        dimension = parameter.partition_dim if parts > 1 else 0
        shape[dimension] *= parts
        seed = (zlib.crc32(name.encode()) << 20) + self.config.seed
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
        parameter.copy_(whole.chunk(parts, dimension)[self.coordinates["tp"] if parts > 1 else 0])

    def _build_optimizer(self) -> None:
        config = self.config
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
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
        # What megatron.training sets between building and training.
        self.transformer_config.finalize_model_grads_func = finalize_model_grads
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        if config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model_chunks]
            self.transformer_config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync

    # ---- training -------------------------------------------------------------------------------------

    def draw_batch(self, iteration: int, microbatch: int) -> dict:
        """One microbatch of this data-parallel rank; a function of its arguments, not of the global RNG."""
        config = self.config
        data = standard_library_bytes()
        seed = config.seed
        for number in (iteration, microbatch, self.coordinates["dp"]):
            seed = (seed * 1_000_003 + number) % 2**62
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - config.sequence - 1, (config.micro_batch,), generator=generator)
        samples = torch.stack([data[start : start + config.sequence + 1] for start in starts.tolist()]).long()
        positions = torch.arange(config.sequence)
        return {
            "microbatch": microbatch,
            "tokens": samples[:, :-1].contiguous(),
            "labels": samples[:, 1:].contiguous(),
            "loss_mask": torch.ones(config.micro_batch, config.sequence),
            "position_ids": positions.expand(config.micro_batch, -1),
            "attention_mask": (positions[:, None] < positions[None, :])[None, None],  # True: hidden
        }

    def _data_iterator(self) -> Iterator[dict]:
        return (self.draw_batch(self.iteration, k) for k in range(self.config.num_microbatches))

    def forward_step(self, data_iterator: Iterator[dict], model: torch.nn.Module):
        """Megatron's forward_step_func: output of one chunk for one microbatch, and the loss function."""
        batch = next(data_iterator)
        self.microbatch = batch["microbatch"]
        output = model(
            batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
        )

        def loss_function(losses: torch.Tensor):
            mask = batch["loss_mask"]
            loss = (losses.float() * mask).sum() / mask.sum()
            # A copy: the schedule divides the loss by the number of microbatches in place.
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function

    def train(
        self,
        steps: int,
        on_step: Callable[[StepRecord], None] | None = None,
        undo: Iterable[int] = (),
    ) -> list[StepRecord]:
        """Trains `steps` further iterations.

        `undo`: iterations after which weights, optimizer and loss scale are put back to what they were
        before: many faults can then be planted one after another, each into a healthy model.
        """
        undo = set(undo)
        forward_backward = get_forward_backward_func()
        for _ in range(steps):
            started = time.perf_counter()
            self.iteration += 1
            snapshot = _Snapshot(self) if self.iteration in undo else None
            for callback in self.at_iteration_start:
                callback()
            for chunk in self.model_chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            data_iterators = [self._data_iterator() for _ in self.model_chunks]
            losses = forward_backward(
                forward_step_func=self.forward_step,
                data_iterator=data_iterators if self.config.vp else data_iterators[0],
                model=self.model_chunks,
                num_microbatches=self.config.num_microbatches,
                seq_length=self.config.sequence,
                micro_batch_size=self.config.micro_batch,
                forward_only=False,
            )
            self.microbatch = None
            gradients = _sha256(parameter.main_grad for parameter in self.parameters.values())
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
                gradients_sha256=gradients,
                weights_sha256=_sha256(self.parameters.values()),
                seconds=time.perf_counter() - started,
            )
            self.records.append(record)
            if on_step is not None:
                on_step(record)
        return self.records

    def _mean_loss(self, losses: Sequence[dict]) -> float:
        # Only the last pipeline stage has losses; the sum over all ranks brings their mean to everyone.
        total = torch.zeros(2, dtype=torch.float64)
        for entry in losses:
            total += torch.tensor([entry["loss"].double().item(), 1.0], dtype=torch.float64)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    # ---- what faults and tests look at -------------------------------------------------------------------

    def layer(self, number: int) -> TransformerLayer | None:
        """Layer `number` (from 0, over all stages) where this rank holds it."""
        for chunk in self.model_chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer) and module.layer_number == number + 1:
                    return module
        return None

    def bucket_groups(self) -> list:
        return [group for chunk in self.model_chunks for group in chunk.bucket_groups]

    def owned_range(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Elements [start, end) of the flattened parameter that this rank's optimizer updates."""
        if not self.config.use_distributed_optimizer:
            return 0, parameter.numel()
        (optimizer,) = self.optimizer.chained_optimizers
        if parameter not in optimizer.model_param_group_index_map:
            return 0, 0
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        return owned.start, owned.end

    def optimizer_parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The tensor that Adam updates for `parameter`: itself, its fp32 copy, or this rank's shard."""
        (optimizer,) = self.optimizer.chained_optimizers
        if self.config.use_distributed_optimizer:
            group, order = optimizer.model_param_group_index_map[parameter]
            return optimizer.optimizer.param_groups[group]["params"][order]
        return parameter if self.config.precision == "fp32" else parameter.main_param

    def finish(self) -> None:
        """Waits for parameters that are still being gathered. All ranks together."""
        for chunk in self.model_chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook()
                chunk.enable_forward_pre_hook()

    def fingerprints(self) -> dict[str, str]:
        """sha256 of what this rank's training has moved: weights, optimizer state, random states."""
        states: list[torch.Tensor] = []
        for optimizer in self.optimizer.chained_optimizers:
            for tensor in _adam_parameters(optimizer):
                states.append(tensor)
                states += [s for _, s in sorted(optimizer.optimizer.state[tensor].items())]
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        numpy_state = numpy.random.get_state()
        return {
            "weights": _sha256(self.parameters.values()),
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
            name: int((~torch.isfinite(parameter.detach())).sum())
            for name, parameter in self.parameters.items()
        }
        return {name: count for name, count in counts.items() if count}


class _Snapshot:
    """Weights, Adam's state and the loss scale before a step, and the way back."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parameters = [(p, p.detach().clone()) for p in trainer.parameters.values()]
        self._adam = []
        self._scalers = []
        for optimizer in trainer.optimizer.chained_optimizers:
            for parameter in _adam_parameters(optimizer):
                states = optimizer.optimizer.state
                saved = _cloned(states.get(parameter, {}))
                self._adam.append((parameter, parameter.detach().clone(), states, saved))
            scaler = getattr(optimizer, "grad_scaler", None)
            if scaler is not None:
                self._scalers.append((scaler, _cloned(scaler.state_dict())))

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, copy in self._parameters:
            parameter.copy_(copy)
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


def _global_parameter_names(model_chunks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in model_chunks:
        layers = {
            name: module.layer_number - 1
            for name, module in chunk.named_modules()
            if isinstance(module, TransformerLayer)
        }
        for name, parameter in chunk.named_parameters():
            for layer, number in layers.items():
                if name.startswith(layer + "."):
                    name = re.sub(r"\d+$", str(number), layer) + name[len(layer) :]
                    break
            yield re.sub(r"^(module\.)+", "", name), parameter


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach()
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
        digest.update(tensor.view(torch.uint8).numpy())
    return digest.hexdigest()
