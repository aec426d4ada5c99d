"""Healthy programs whose ranks do not train alike, under the launcher: it may not follow them, and never
stops them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

def train(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""

# Only rank 1 has an optimizer, and it sends its weights.
LEARNER = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1) if rank == 1 else None
for _ in range(4):
    for p in model.parameters():
        dist.broadcast(p.data, 1)
    if rank == 0:
        dist.send(torch.randn(8, 4), 1)
    else:
        batch = torch.empty(8, 4)
        dist.recv(batch, 0)
        train(model, optimizer, batch)
"""

# Rank 0 alone trains something else between two steps.
PROBE = """
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    train(model, optimizer, torch.randn(8, 4))
    if rank == 0:
        probe = nn.Linear(4, 1)
        train(probe, torch.optim.SGD(probe.parameters(), 0.1), torch.randn(8, 4))
    dist.barrier()
"""

JOINED = """
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with model.join():
    for step in range(3 + 2 * rank):
        train(model, optimizer, torch.randn(8, 4))
"""

DIGEST = """
digest = [float(p.sum()) for p in model.parameters()]
sys.stdout.write(f"digest {rank} {digest}\\n")  # in one piece: the other rank writes at the same time
sys.stdout.flush()
dist.destroy_process_group()
"""


def torchrun(*command):
    environment = os.environ | {"NANLOCATOR_GATHER_DEADLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.host
@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("script", "attached"),
    [(LEARNER, 0), (PROBE, 1), (JOINED, 0)],
    ids=["a learner", "a probe on one rank", "join"],
)
def test_a_healthy_job_is_not_stopped(script, attached):
    Path("train.py").write_text(COMMON + script + DIGEST)
    watched, alone = torchrun("-m", "nanlocator", "train.py"), torchrun("train.py")
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert sorted(watched.stdout.split("\n")) == sorted(alone.stdout.split("\n"))
    assert watched.stderr.count(": attached to SGD") == attached, watched.stderr
    assert "not attached: " in watched.stderr
    assert not list(Path().glob("nanlocator_run/*/verdict.json"))
