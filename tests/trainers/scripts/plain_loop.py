"""The usual loop: a small GPT, AdamW, clipping. `torchrun --nproc-per-node 2 plain_loop.py --ddp` too."""

import argparse

import faults
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LENGTH, BATCH = 128, 32, 8, 4


class UnitNorm(nn.Module):
    """Normalises every token's vector to length one."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), width**0.5))

    def forward(self, x):
        return self.weight * (x / x.norm(dim=-1, keepdim=True))  # the fault: norm


class LogGate(nn.Module):
    """Gates a vector with its own magnitude."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        magnitude = x.abs().mean(dim=-1, keepdim=True)
        return x * torch.sigmoid(self.weight * torch.log(magnitude))  # the fault: log


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.norm = norm
        self.attention = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=faults.BLANK)
        norm = LogGate if faults.KIND == "log" else UnitNorm
        self.blocks = nn.ModuleList([Block(WIDTH, nn.Identity()), Block(WIDTH, norm(WIDTH))])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw_batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    if rank == world_size - 1:
        tokens = faults.blank(tokens, step)
    mask = torch.ones(BATCH, LENGTH)
    mask[:, : LENGTH // 2] = 0  # the prompts
    if rank == world_size - 1 and faults.wakes("loss", step):
        mask[:] = 0  # no targets are left
    return tokens[:, :-1], tokens[:, 1:], mask


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    rank, world_size = 0, 1
    if arguments.ddp:
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Gpt()
    if arguments.ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(arguments.steps):
        inputs, labels, mask = draw_batch(step, rank, world_size)
        logits = model(inputs)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (nll * mask.flatten()).sum() / mask.sum()  # the fault: loss
        loss.backward()
        faults.flip(next(model.parameters()).grad, step == faults.STEP and rank == world_size - 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if rank == 0:
        faults.report(losses, model)
    if arguments.ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
