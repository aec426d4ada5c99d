"""Buffers that DistributedDataParallel sends from one rank to all before a forward: C++ does it, past the
methods of ProcessGroup that Python sees (torch/csrc/distributed/c10d/comm.cpp)."""

import functools
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from nanlocator.hooks.patches import replace

OPERATOR = "c10d::broadcast_"
_METHOD = "_default_broadcast_coalesced"  # torch 2.6 to 2.15, nn/parallel/distributed.py

# Called when a broadcast begins, with its group, what this rank sends (None: it only receives) and what it
# receives; gives what is called when it has ended.
Follow = Callable[[ProcessGroup, list[torch.Tensor] | None, list[torch.Tensor]], Callable[[], None]]


def follow_broadcasts(follow: Follow) -> Callable[[], None]:
    """Of every DistributedDataParallel. What it returns ends that."""
    inner = vars(DistributedDataParallel).get(_METHOD)
    if inner is None:
        return lambda: None

    @functools.wraps(inner)
    def broadcast(
        module: DistributedDataParallel,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        buffers = module.modules_buffers if bufs is None else bufs
        group = module.process_group
        end = follow(group, buffers if authoritative_rank == group.rank() else None, buffers)
        inner(module, bufs, bucket_size, authoritative_rank)
        end()

    return replace(DistributedDataParallel, _METHOD, broadcast)


def shows_broadcasts(module: DistributedDataParallel) -> bool:
    """Not where the program sends its buffers by a hook of its own (``register_buffer_comm_hook``)."""
    followed = vars(DistributedDataParallel).get(_METHOD)
    is_followed = followed is not None and getattr(type(module), _METHOD) is followed
    return is_followed and not hasattr(module, "buffer_hook")
