"""Two ranks on CPUs: their data, a rank's part of a model, and ways around checks by which Lightning and
accelerate refuse CPUs or silently ignore options there."""

import os

import faults
import torch
import torch.nn.functional as F
from plain_loop import BATCH, draw_batch
from torch.distributed.fsdp import FullyShardedDataParallel

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 5


def make_data():
    """This rank's batches."""
    return [draw_batch(step, RANK, WORLD_SIZE) for step in range(STEPS)]


def masked_loss(logits, labels, mask, step):
    if logits.requires_grad:
        is_now = step == faults.STEP and RANK == WORLD_SIZE - 1
        logits.register_hook(lambda gradient: faults.flip(gradient, is_now))
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (nll * mask.flatten()).sum() / mask.sum()  # the fault: loss


def report(losses, model):
    faults.report(losses, Kept(model))


class Kept:
    """A rank's part of a model: its shard of a sharded parameter."""

    def __init__(self, model):
        self._model = model

    def parameters(self):
        for parameter in self._model.parameters():
            shard = getattr(parameter, "ds_tensor", parameter)  # DeepSpeed's ZeRO-3
            yield shard.to_local() if hasattr(shard, "to_local") else shard


def without_device():
    """FullyShardedDataParallel computes on the CPU if asked explicitly, otherwise: "FSDP needs a non-CPU
    accelerator device, but no accelerator device is detected"."""
    original = FullyShardedDataParallel.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = init


def deepspeed_configuration(stage):
    """By default ZeRO-3 keeps small parameters whole; this shards them."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }


def with_fsdp_plugin():
    """On CPUs accelerate silently ignores an fsdp_plugin and trains with DistributedDataParallel."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
    without_device()
