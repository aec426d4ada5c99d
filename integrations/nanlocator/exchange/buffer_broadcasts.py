"""Buffers that DistributedDataParallel broadcasts before a forward. C++ does this without the methods of
ProcessGroup that Python sees (torch/csrc/distributed/c10d/comm.cpp)."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

OPERATOR = "c10d::broadcast_"
_METHOD = points.DDP_BROADCAST.attribute  # torch/nn/parallel/distributed.py

# Called when a broadcast begins, with its group, the tensors that this rank sends (None: it only receives)
# and those that it receives. Returns a function that is called when the broadcast has ended.
Follow = Callable[[ProcessGroup, list[torch.Tensor] | None, list[torch.Tensor]], Callable[[], None]]


def follow_broadcasts(patches: Patches, follow: Follow) -> None:
    """Follows the broadcasts of every DistributedDataParallel."""

    def broadcast(
        original: Callable[..., Any],
        module: DistributedDataParallel,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        buffers = module.modules_buffers if bufs is None else bufs
        group = module.process_group
        end = follow(group, buffers if authoritative_rank == group.rank() else None, buffers)
        original(module, bufs, bucket_size, authoritative_rank)
        end()

    patches.wrap(points.DDP_BROADCAST, broadcast)


def shows_broadcasts(module: DistributedDataParallel) -> bool:
    """False if the program sends the buffers with its own hook (``register_buffer_comm_hook``)."""
    followed = vars(DistributedDataParallel).get(_METHOD)
    is_followed = followed is not None and getattr(type(module), _METHOD) is followed
    return is_followed and not hasattr(module, "buffer_hook")
