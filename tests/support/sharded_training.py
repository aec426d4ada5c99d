"""Training of a small sharded model, with faults that can be planted in one rank's step.

A ``Training`` is one rank's; ``fault`` names the fault in step 2, ``culprits`` its ranks. The faults are
real: bits in memory that no operator writes, or data outside a formula's domain.
"""

import contextlib
import ctypes
import functools
import itertools
import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

BAD_STEP = 2


class Scale(nn.Module):
    """Takes a square root whose argument is negative for offsets below -1 and whose derivative is infinite at
    -1."""

    def forward(self, hidden, offset):
        return hidden + torch.sqrt(hidden.square() * (1 + offset.clamp(max=0)) + 1 + offset)


class Net(nn.Module):
    """Has 7 and 3 rows, not multiples of the number of ranks."""

    def __init__(self, width=7, is_checkpointed=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1))
        self.middle = nn.Linear(width, 8)
        self.scale = Scale()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.is_checkpointed = is_checkpointed

    def forward(self, x, offset):
        hidden = self.body(x)
        if self.is_checkpointed:
            hidden = checkpoint(self.middle, hidden, use_reentrant=False)
        else:
            hidden = self.middle(hidden)
        return self.head(self.norm(self.scale(hidden, offset)))


def corrupt(tensor, element=2):
    """Writes like a bit error, without an operator."""
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    ctypes.c_float.from_address(tensor.data_ptr() + 4 * element).value = math.nan


class Training:
    """Args:
    shard: ``shard(model, variant)`` returns the model to call.
    """

    def __init__(self, rank, shard, variant, fault=None, culprits=(1,), width=7):
        torch.manual_seed(0)
        self.rank, self.variant, self.fault = rank, variant, fault
        self.is_culprit = rank in culprits
        self.number = 0
        self.once = itertools.repeat(True, 1)  # hidden: an attribute that changes would count as lost state
        self.net = Net(width, is_checkpointed=variant == "checkpointed")
        if variant == "frozen":
            self.net.body[0].weight.requires_grad_(False)
        self.model = shard(self.net, variant)
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=0.05)
        torch.manual_seed(rank)

    def planted_below(self):
        """A context with the faults that belong below ``watch``'s wrappers."""
        return contextlib.nullcontext()

    def planted(self):
        """A context with the faults that belong outside those wrappers."""
        return contextlib.nullcontext()

    def plants(self, fault):
        return self.fault == fault and self.is_culprit and self.number == BAD_STEP

    def loss(self):
        x, offset = torch.randn(6, 4), torch.zeros(6, 1)
        mask = torch.ones(6, 1)
        if self.plants("forward"):
            offset[3] = -3.0
        if self.plants("backward"):
            offset[3] = -1.0
        if self.plants("empty_loss"):
            mask.zero_()
        return (self.model(x, offset).float().square() * mask).sum() / mask.sum()

    def corrupt_once(self, gradient, fault, element=2):
        if self.plants(fault) and next(self.once, False):
            corrupt(gradient, element)

    def corrupt_moment(self):
        """Corrupts a moment of the first weight of which this rank has a part: the update makes the weight
        bad."""
        if self.plants("moment"):
            moments = (self.optimizer.state[p]["exp_avg"] for p in self.model.parameters())
            local = (m.to_local() if hasattr(m, "to_local") else m for m in moments)
            corrupt(next(moment for moment in local if moment.numel() > 2))

    def backwards(self):
        self.loss().backward()

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self):
        self.number += 1
        self.backwards()
        self.clip()
        self.corrupt_moment()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        """This rank's weights, and a random number."""
        weights = [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]
        return [*(w.detach().clone() for w in weights), torch.rand(1)]


@functools.cache
def mesh(*sizes, names=None):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)
