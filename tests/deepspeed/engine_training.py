"""Trains a small model with a DeepSpeed engine, and plants faults in it."""

import contextlib
import ctypes
import functools
import logging
import math
import os
import time
from unittest import mock

import on_cpu
import torch
from damaged_collectives import damaged
from torch import nn

on_cpu.use()

import deepspeed  # noqa: E402
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402  (which each engine would import)

import nanlocator.deepspeed  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
# It reports no fp16 on the CPU, but torch computes it there.
type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
deepspeed.utils.logger.setLevel(logging.ERROR)

# Each is a configuration of DeepSpeed; other keys of "zero_optimization" are beside the stage.
VARIANTS = {
    "zero0": {"stage": 0},
    "zero0_bf16": {"stage": 0, "dtype": "bf16"},
    "zero1": {"stage": 1},
    "zero1_bf16": {"stage": 1, "dtype": "bf16"},
    "zero1_fp32_sums": {"stage": 1, "dtype": "bf16", "sums": "fp32"},  # BF16_Optimizer
    "zero1_fp16": {"stage": 1, "dtype": "fp16"},
    "zero1_overlap": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 64},
    "zero2": {"stage": 2},
    "zero2_bf16": {"stage": 2, "dtype": "bf16"},
    "zero2_fp32_sums": {"stage": 2, "dtype": "bf16", "sums": "fp32"},
    "zero2_bf16_unchecked": {"stage": 2, "dtype": "bf16", "check_grad_overflow": False},
    "zero2_fp16": {"stage": 2, "dtype": "fp16"},
    "zero2_small_buckets": {"stage": 2, "reduce_bucket_size": 64, "overlap_comm": True},
    "zero2_not_contiguous": {"stage": 2, "contiguous_gradients": False},
    "zero2_offload": {"stage": 2, "dtype": "bf16", "offload_optimizer": {"device": "cpu"}},
    "zero2_accumulation": {"stage": 2, "dtype": "bf16", "accumulation": 3},
    "zero1_accumulation": {"stage": 1, "accumulation": 3},
    "zero3": {"stage": 3},
    "zero3_bf16": {"stage": 3, "dtype": "bf16"},
    "zero3_fp16": {"stage": 3, "dtype": "fp16"},
    "zero3_partitioned": {"stage": 3, "stage3_param_persistence_threshold": 0, "dtype": "bf16"},
    "zero3_fp16_partitioned": {"stage": 3, "stage3_param_persistence_threshold": 0, "dtype": "fp16"},
    "zero3_accumulation": {"stage": 3, "accumulation": 3},
    "zero3_offload": {"stage": 3, "dtype": "bf16", "offload_optimizer": {"device": "cpu"}},
}
REDUCTIONS = ("allreduce", "reduce", "_reduce_scatter_base", "reduce_scatter")
GATHERS = ("allgather", "_allgather_base")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Divide(nn.Module):
    """Divides by ``divisor``: a forward birth if it is zero."""

    def __init__(self):
        super().__init__()
        self.divisor = 2.0

    def forward(self, x):
        return x / torch.full_like(x[:, :1], self.divisor)


class Root(nn.Module):
    """Its derivative at zero is infinite."""

    def __init__(self):
        super().__init__()
        self.is_at_zero = False

    def forward(self, x):
        shifted = x - x.detach() if self.is_at_zero else x.abs() + 1
        return torch.sqrt(shifted)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.divide = Divide()
        self.body = nn.Linear(16, 16)
        self.root = Root()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.drop(self.root(self.body(self.divide(torch.tanh(self.first(x)))))))


def configuration(variant):
    options = dict(VARIANTS[variant])
    dtype = options.pop("dtype", "fp32")
    accumulation = options.pop("accumulation", 1)
    sums = options.pop("sums", None)
    check = options.pop("check_grad_overflow", True)
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": options,
        "data_types": {"grad_accum_dtype": sums},
        "bf16": {"enabled": dtype == "bf16", "check_grad_overflow": check},
        "fp16": {"enabled": dtype == "fp16", "hysteresis": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class Training:
    """One rank's training."""

    def __init__(self, rank, variant, initial_scale_power=10, **options):
        torch.manual_seed(0)
        os.environ["LOCAL_RANK"] = str(rank)  # as its launcher does
        self.rank, self.config = rank, configuration(variant)
        self.config["fp16"]["initial_scale_power"] = initial_scale_power
        self.dtype = DTYPES[VARIANTS[variant].get("dtype", "fp32")]
        self.model = Net()
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=torch.optim.Adam(self.model.parameters(), lr=0.01),
            config=self.config,
            dist_init_required=False,
        )
        self.locator = None
        if options.pop("watched", True):
            self.locator = nanlocator.deepspeed.install(self.engine, output_dir="run", **options)
        torch.manual_seed(rank)
        self.step_number = 0
        self.losses = []
        self.before_step = lambda: None
        self.has_labels = lambda: True
        self.planted = contextlib.ExitStack()

    def loss(self, outputs, labels):
        valid = labels >= 0
        losses = nn.functional.cross_entropy(outputs.float(), labels.clamp(min=0), reduction="none")
        return (losses * valid).sum() / valid.sum()

    def step(self):
        self.step_number += 1
        self.before_step()
        for _ in range(self.config["gradient_accumulation_steps"]):
            x, labels = torch.randn(6, 4).to(self.dtype), torch.randint(0, 3, (6,))
            loss = self.loss(self.engine(x), labels if self.has_labels() else labels.fill_(-1))
            self.engine.backward(loss)
            self.engine.step()
            self.losses.append(loss.detach().clone())

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def state(self):
        """The masters and Adam's state, from which the weights are computed."""
        inner = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        state = [v for s in inner.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            whole = [p.detach().clone() for p in self.model.parameters()]
        return [*whole, *(s.clone() for s in state), *self.losses, torch.rand(1)]

    def masters(self):
        return [
            m.detach().clone() for group in self.engine.optimizer.param_groups for m in group["params"]
        ] or [m.detach().clone() for m in self.engine.optimizer.fp32_partitioned_groups_flat]

    # --- faults of step 2, on rank 1 -----------------------------------------------------------------

    def plant(self, fault):
        getattr(self, f"_plant_{fault}")()

    def is_now(self, rank=1):
        return self.rank == rank and self.step_number == 2

    def _plant_gradient(self):
        self.spoil_gradient(self.model.body.weight, rank=1)

    def spoil_gradient(self, parameter, rank):
        """In memory, once, before its reduction."""
        left = [None]

        def hook(gradient):
            if left and self.is_now(rank):
                left.pop()
                overwrite(gradient, 2)

        parameter.register_hook(hook)

    def _plant_reduced(self):
        """Once, in rank 0's part of the sum."""
        layout, left = self.locator._layout, [None]
        reduced = layout.reduced

        def corrupted():
            parts = reduced()
            if left and parts and self.is_now(rank=0):
                left.pop()
                overwrite(dict(parts)[BODY_WEIGHT].view(-1), 2)
            return parts

        layout.reduced = corrupted
        if layout.reducer is self.engine:  # the same tensors before and after
            layout.about_to_be_reduced = lambda *_, **__: reduced()

    def _plant_reduction(self):
        """In rank 1's results of the collectives that sum."""
        self._plant_in_collectives(*REDUCTIONS)

    def _plant_gather(self):
        """In rank 1's results of the collectives that gather."""
        self._plant_in_collectives(*GATHERS)

    def _plant_in_collectives(self, *names):
        """At each call."""
        spoil = functools.partial(overwrite, element=2)
        self.planted.enter_context(damaged(names, self.is_now, spoil, more_than=16))

    def _plant_overwritten(self):
        """On both ranks, in the other rank's part of a bucket's buffer, before its reduction has read it."""
        comm = deepspeed.comm
        inner = comm.all_reduce

        def all_reduce(tensor, *args, **kwargs):
            if tensor.numel() <= 16 or self.step_number != 2:
                return inner(tensor, *args, **kwargs)
            if self.rank == 1:
                time.sleep(1.0)
            for _ in range(2):  # gloo's threads wait for rank 1
                torch.distributed.all_reduce(torch.zeros(1), async_op=True)
            work = inner(tensor, *args, async_op=True, **kwargs)
            (tensor[:16] if self.rank == 0 else tensor[-16:]).fill_(math.nan)  # here
            return work.wait()

        self.planted.enter_context(mock.patch.object(comm, "all_reduce", all_reduce))

    def _plant_forward(self):
        self.before_step = lambda: setattr(self.model.divide, "divisor", 0.0 if self.is_now() else 2.0)

    def _plant_backward(self):
        self.before_step = lambda: setattr(self.model.root, "is_at_zero", self.is_now())

    def _plant_loss(self):
        self.has_labels = lambda: not self.is_now()

    def _plant_weight(self):
        """In rank 1's weight: in ZeRO-3 its shard, which the others gather; else its copy."""

        def damage():
            if self.is_now():
                weight = next(tensor for i, tensor in self.locator._layout.weights() if i == BODY_WEIGHT)
                overwrite(weight.view(-1), 2)

        self.before_step = damage

    def _plant_state(self):
        """In Adam's moments of rank 1's part: the weight is bad in step 3."""

        def damage():
            if self.is_now():
                for _, name, tensor, _ in self.locator._layout.optimizer_state({BODY_WEIGHT}):
                    if name == "exp_avg":
                        overwrite(tensor, 2)

        self.before_step = damage


BODY_WEIGHT = 2  # its id


def overwrite(tensor, element):
    """One element becomes NaN by a write that no observer sees."""
    size = tensor.element_size()
    kind, value = (ctypes.c_float, math.nan) if size == 4 else (ctypes.c_uint16, 0x7FFF)
    kind.from_address(tensor.data_ptr() + element * size).value = value


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def verdict_of(rank, variant, fault, **options):
    """The verdict of three steps with this fault; the list of verdicts if nothing was raised."""
    training = Training(rank, variant, **options)
    training.plant(fault)
    return _verdict(training)


def verdict_of_damage(rank, variant, collectives):
    """Damages rank 1's result of one of these collectives, once, below level boundaries' watch."""
    training = None
    spoil = functools.partial(overwrite, element=2)
    is_now = lambda: training is not None and training.is_now()  # noqa: E731
    with damaged(collectives, is_now, spoil, once=True, more_than=16):
        training = Training(rank, variant, level="boundaries")
        return _verdict(training)


def two_faults(rank, variant):
    """The verdict on two gradients, one per rank, that go bad in the same step."""
    training = Training(rank, variant)
    training.spoil_gradient(training.model.head.weight, rank=0)
    training.spoil_gradient(training.model.body.weight, rank=1)
    return _verdict(training)


def _verdict(training):
    try:
        training.run(3)
        return training.locator.verdicts
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        training.planted.close()
        training.locator.remove()
