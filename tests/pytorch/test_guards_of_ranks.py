"""What a program with several ranks does itself about a norm, or a loss, that is not finite. Unedited scripts
under the launcher: one rank's data makes a module divide zero by zero in the steps 3 and 5."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMON = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 4), nn.Linear(4, 3)
        nn.init.constant_(self.body.bias, 2.0)

    def forward(self, x, is_bad):
        hidden = self.body(x).relu() * (not is_bad)
        return self.head(hidden / hidden.norm(dim=-1, keepdim=True))

def shard(model):
    fully_shard(model.body)
    return fully_shard(model)

torch.manual_seed(0)
model = {wrap}
torch.manual_seed(rank)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)

def check(loss):
    pass

def train(guard, zeroes_late=False):
    for step in range(1, 8):
        if not zeroes_late:
            optimizer.zero_grad()
        loss = model(torch.rand(6, 8), rank == 1 and step in (3, 5)).square().mean()
        if zeroes_late:
            optimizer.zero_grad()
        check(loss)
        loss.backward()
        guard(step)

def norm_of():
    norm = {norm}
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
WRAPS = {
    "ddp": ("DistributedDataParallel(Model())", CLIP),
    "fsdp2": ("shard(Model())", CLIP),
    "fsdp1": (
        "FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device('cpu'))",
        "model.clip_grad_norm_(0.1)",
    ),
}
SKIPS = """
def guard(step):
    if norm_of().isfinite():
        optimizer.step()

train(guard{how})
"""
ENDS = """
def guard(step):
    norm = norm_of()
    if not norm.isfinite():
        {end}
    optimizer.step()

train(guard)
"""
REDUCES = """
def check(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if not mean.isfinite():
        {end}

train(lambda step: optimizer.step())
"""
SPLITS = """
def guard(step):
    if norm_of().isfinite() or rank == {rank}:
        optimizer.step()

train(guard)
"""
LOGS = """
def guard(step):
    if rank == {rank}:
        print(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    optimizer.step()

train(guard)
"""
SCALES = """
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

scaler = ShardedGradScaler(device="cpu", init_scale=2.0**24, growth_interval=6)
for step in range(1, 8):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.rand(6, 8), False).square().mean()
    scaler.scale(loss).backward(){unscale}
    scaler.step(optimizer)
    scaler.update()
assert scaler.get_scale() < 2.0**24
"""
DIGEST = """
weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
sys.stdout.write(f"digest {rank} {[float(p.sum()) for p in weights]}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def torchrun(script, wrap, *launcher):
    model, norm = WRAPS[wrap]
    Path("train.py").write_text(COMMON.replace("{wrap}", model).replace("{norm}", norm) + script + DIGEST)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NANLOCATOR_GATHER_DEADLINE": "10"}
    words += [*launcher, "train.py"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)


def verdict():
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    return json.loads(path.read_text())


@pytest.mark.host
@pytest.mark.parametrize("how", ["", ", zeroes_late=True"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
def test_a_step_that_all_ranks_leave_out_is_told_and_stops_nothing(wrap, how):
    script = SKIPS.format(how=how)
    watched, alone = torchrun(script, wrap, "-m", "nanlocator"), torchrun(script, wrap)
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert sorted(watched.stdout.splitlines()) == sorted(alone.stdout.splitlines())
    assert watched.stderr.count("nanlocator WARNING[zero_over_zero]") >= 1, watched.stderr
    assert "the program itself discarded what step 5 computed" in watched.stderr
    found = verdict()
    (origin,) = found["origins"]
    assert (found["iteration"], origin["detail"]) == (5, "zero_over_zero")
    assert origin["coordinates"]["rank"] == 1 and found["job"]["is_discarded"]


@pytest.mark.host
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("script", [ENDS, REDUCES], ids=["norm", "reduced loss"])
@pytest.mark.parametrize("end", ["raise RuntimeError('not finite')", "sys.exit(3)"])
def test_a_step_for_which_all_ranks_end_is_located(wrap, script, end):
    ended = torchrun(script.format(end=end), wrap, "-m", "nanlocator")
    assert ended.returncode != 0
    found = verdict()
    (origin,) = found["origins"]
    assert (found["iteration"], found["status"], found["rerun"]["done"]) == (3, "located", True), ended.stderr
    assert (origin["detail"], origin["coordinates"]["rank"]) == ("zero_over_zero", 1)


@pytest.mark.host
@pytest.mark.parametrize("script", [SPLITS, LOGS], ids=["leaves out", "logs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_alone_does_about_a_norm_stops_all(script, rank):
    begun = time.monotonic()
    stopped = torchrun(script.format(rank=rank), "ddp", "-m", "nanlocator")
    assert stopped.returncode != 0 and time.monotonic() - begun < 60
    found = verdict()
    assert found["iteration"] == 3 and not found["job"]["is_discarded"]
    assert [each["coordinates"]["rank"] for each in found["origins"]] == [1]


@pytest.mark.host
@pytest.mark.parametrize("unscale", ["", "\n    scaler.unscale_(optimizer)\n    norm_of()"])
def test_what_the_scaler_of_shards_leaves_out_is_no_finding(unscale):
    script = SCALES.format(unscale=unscale)
    watched, alone = torchrun(script, "fsdp1", "-m", "nanlocator"), torchrun(script, "fsdp1")
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert sorted(watched.stdout.splitlines()) == sorted(alone.stdout.splitlines())
    assert "WARNING[" not in watched.stderr
