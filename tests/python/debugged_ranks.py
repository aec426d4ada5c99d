"""One rank of a small training that DebugUnderflowOverflow watches; see test_transformers_debug_ranks.py.

    python debugged_ranks.py RANK SIZE PORT FOLDER TRAINING BAD_RANK

TRAINING: "ddp" exchanges gradients in backward; "sync_bn" sums over the ranks in the middle of the forward;
"alone" enters no collective after its start. On BAD_RANK the third batch overflows in fp16.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from nanlocator.transformers import DebugUnderflowOverflow

BATCHES = 400


class Sums(nn.Module):
    """As SyncBatchNorm, which has no implementation for gloo: the mean over all ranks."""

    def forward(self, x):
        mean = x.mean().detach().float()
        dist.all_reduce(mean)
        return x - mean.to(x.dtype) / dist.get_world_size()


def model_for(training):
    torch.manual_seed(0)
    middle = Sums() if training == "sync_bn" else nn.ReLU()
    layers = [nn.Linear(8, 8), middle, nn.Linear(8, 8)]
    return nn.Sequential(*layers).to(torch.bfloat16 if training == "sync_bn" else torch.float16)


def main(rank, size, port, folder, training, bad_rank):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=600),
    )
    model = model_for(training)
    debugger = DebugUnderflowOverflow(model, output_dir=folder)
    trained = nn.parallel.DistributedDataParallel(model) if training == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dtype = next(model.parameters()).dtype
    for batch in range(BATCHES):
        x = torch.ones(4, 8, dtype=dtype)
        if rank == bad_rank and batch == 2:
            # Finite itself: the first linear layer makes infinities of it.
            x *= torch.finfo(dtype).max
            model[0].weight.data.fill_(1)
        trained(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if training == "alone":
            time.sleep(0.02)
    debugger.remove()
    dist.destroy_process_group()
    print(f"rank {rank} has trained", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:6], int(sys.argv[6]))
