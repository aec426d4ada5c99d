"""``Training`` over the stages of torch.distributed.pipelining, in its schedules."""

import contextlib
import itertools
from unittest import mock

import torch
from sharded_training import BAD_STEP, Scale, Training, corrupt, mesh
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES = 4
# Stages per rank; schedule.
VARIANTS = {
    "gpipe": (1, schedules.ScheduleGPipe),
    "1f1b": (1, schedules.Schedule1F1B),
    "interleaved": (2, schedules.ScheduleInterleaved1F1B),
    "zero_bubble": (2, schedules.ScheduleInterleavedZeroBubble),
    "v": (2, schedules.ScheduleZBVZeroBubble),
    "fsdp": (1, schedules.Schedule1F1B),
    "ddp": (1, schedules.Schedule1F1B),
    "interleaved_fsdp": (2, schedules.ScheduleInterleaved1F1B),
    "tensor": (1, schedules.Schedule1F1B),
    "tensor_fsdp": (1, schedules.Schedule1F1B),
}
SECOND_AXIS = {"fsdp": "dp", "ddp": "dp", "interleaved_fsdp": "dp", "tensor": "tp"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.scale = Scale()

    def forward(self, hidden, offset):
        return self.scale(self.dropout(self.linear(hidden)), offset)


class Stage(nn.Module):
    """The layers with these numbers in the whole model."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})

    def forward(self, hidden, offset):
        for block in self.layers.values():
            hidden = block(hidden, offset)
        return hidden


def masked_mean(output, mask):
    return (output.square() * mask).sum() / mask.sum()


class Pipelined(Training):
    """Two ranks, two times two, or ("tensor_fsdp") two times two times two, with two layers each. Faults:
    ``message``, a value changes on its way to a culprit; ``memory``, the first weight's gradient changes
    after the schedule's step."""

    def __init__(self, rank, variant, fault=None, culprits=(1,)):
        self.rank, self.variant, self.fault = rank, variant, fault
        self.is_culprit = rank in culprits
        self.number = 0
        self.once = itertools.repeat(True, 1)
        stages_here, schedule = VARIANTS[variant]
        if variant in SECOND_AXIS:
            self.mesh = mesh(2, 2, names=(SECOND_AXIS[variant], "pp"))
        elif variant == "tensor_fsdp":
            self.mesh = mesh(2, 2, 2, names=("pp", "dp", "tp"))
        else:
            self.mesh = mesh(2, names=("pp",))
        place, ranks = self.mesh["pp"].get_local_rank(), 2
        count = stages_here * ranks
        own = range(place, count, ranks) if variant != "v" else (place, count - 1 - place)
        self.parts, stages = [], []
        for index in own:
            torch.manual_seed(index)
            part = Stage(range(index * 4 // count, (index + 1) * 4 // count))
            part = self.parallel(part)
            self.parts.append(part)
            stages.append(
                PipelineStage(part, index, count, torch.device("cpu"), group=self.mesh["pp"].get_group())
            )
            if variant == "v":  # its neighbours are on the same rank, and gloo cannot send to itself
                stages[-1]._get_init_p2p_neighbors_ops = list
        is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
        self.schedule = schedule(stages[0] if is_single else stages, MICROBATCHES, loss_fn=masked_mean)
        self.is_first, self.is_last = 0 in own, count - 1 in own
        self.model = self.parts[0] if len(self.parts) == 1 else self.parts
        self.optimizer = torch.optim.AdamW((p for part in self.parts for p in part.parameters()), lr=0.05)
        torch.manual_seed(self.mesh["dp"].get_local_rank() if variant == "tensor_fsdp" else rank)

    def parallel(self, part):
        if self.variant == "ddp":
            return DistributedDataParallel(part, process_group=self.mesh["dp"].get_group())
        if self.variant in ("tensor", "tensor_fsdp"):
            whole = ColwiseParallel(output_layouts=Replicate())
            part = parallelize_module(part, self.mesh["tp"], {"layers.*.linear": whole})
        if self.variant in ("fsdp", "interleaved_fsdp", "tensor_fsdp"):
            for block in part.layers.values():
                fully_shard(block, mesh=self.mesh["dp"])
            return fully_shard(part, mesh=self.mesh["dp"])
        return part

    def planted_below(self):
        training, recv = self, ProcessGroup.recv

        class Spoiled:
            def __init__(self, work, tensor):
                self.work, self.tensor = work, tensor

            def wait(self, *args):
                result = self.work.wait(*args)
                training.corrupt_once(self.tensor, "message")
                return result

            def __getattr__(self, name):
                return getattr(self.work, name)

        if self.fault != "message" or not self.is_culprit:
            return contextlib.nullcontext()
        return mock.patch.object(
            ProcessGroup,
            "recv",
            lambda group, tensors, *args: Spoiled(recv(group, tensors, *args), tensors[0]),
        )

    def evaluate(self):
        """Forward and backward of all microbatches. Returns the losses on the rank with the last stage."""
        x, offset, mask = torch.randn(8, 8), torch.zeros(8, 1), torch.ones(8, 1)
        if self.plants("forward"):
            offset[5] = -3.0  # in the third microbatch
        if self.plants("backward"):
            offset[5] = -1.0
        if self.plants("empty_loss"):
            mask[4:6] = 0
        if self.fault == "weight" and self.is_culprit and self.number == BAD_STEP:
            corrupt(next(self.parts[0].parameters()).detach())
        losses = []
        self.run_schedule(x, offset, **({"target": mask, "losses": losses} if self.is_last else {}))
        gradient = next(self.parts[0].parameters()).grad
        self.corrupt_once(gradient.to_local() if isinstance(gradient, DTensor) else gradient, "memory")
        return losses

    def run_schedule(self, x, offset, **options):
        return self.schedule.step(*([x] if self.is_first else []), offset=offset, **options)

    def step(self):
        self.number += 1
        losses = self.evaluate()
        self.clip()
        self.corrupt_moment()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def clip(self):
        """Clips like torchtitan (distributed/utils.py, clip_grad_norm_)."""
        parameters = [p for part in self.parts for p in part.parameters()]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm **= 2
        dist.all_reduce(norm, group=self.mesh["pp"].get_group())
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm**0.5)

    def state(self):
        weights = [p.to_local() if hasattr(p, "to_local") else p for m in self.parts for p in m.parameters()]
        return [*(w.detach().clone() for w in weights), torch.rand(1)]
