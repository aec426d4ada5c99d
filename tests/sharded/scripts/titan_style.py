"""torchtitan's loop in small: pipeline and fully_shard from one mesh, its clip, no line of nanlocator."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp_shard"))
place = mesh["pp"].get_local_rank()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.is_bad = False

    def forward(self, hidden):
        if self.is_bad:
            hidden = torch.log(hidden)  # of what is negative
        return hidden + self.linear(self.norm(hidden))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in (2 * place, 2 * place + 1)})

    def forward(self, hidden):
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


torch.manual_seed(place)
model = Transformer()
for layer in model.layers.values():
    fully_shard(layer, mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh["dp_shard"])
stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: (output - target).square().mean())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range(1, 4):
    if step == 2 and os.environ.get("FAULT") == str(dist.get_rank()):
        model.layers["3"].is_bad = True
    optimizer.zero_grad()
    losses = []
    batch, target = torch.randn(4, 8), torch.randn(4, 8)
    if place == 0:
        schedule.step(batch)
    else:
        schedule.step(target=target, losses=losses)
    norm = get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm **= 2
    dist.all_reduce(norm, group=mesh["pp"].get_group())
    clip_grads_with_norm_(model.parameters(), 1.0, norm**0.5)
    optimizer.step()
    if losses:
        sys.stdout.write(f"losses: {step} {[loss.item() for loss in losses]}\n")
dist.destroy_process_group()
