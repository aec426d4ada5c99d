"""A training script without nanlocator: in step 3 rank 1 gets a batch without a label."""

import os

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile


def main():
    torch.distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(4):
        labels = torch.randint(0, 3, (6,))
        if rank == 1 and step == 2:
            labels.fill_(-100)
        loss = nn.functional.cross_entropy(engine(torch.randn(6, 4)), labels)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
