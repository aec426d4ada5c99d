"""Weights that were bad before the first step, or since a load, on one rank of two: no machine is accused.
What a checkpoint without a step in its name holds is looked up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_python

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.save(torch.ones(4, 4) * float("nan"), f"data_{rank}.pt")

def write():
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    state["2.weight"][0, 3] = float("nan")
    torch.save({"model": state}, "best.pt")

def load():
    if rank == 0:
        model.module.load_state_dict(torch.load("best.pt")["model"])
        torch.load("data_0.pt")  # no checkpoint

"""
LOOP = """
for step in range(1, 6):
    loss = (model(torch.randn(12, 8))[:, 0] - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BEGINNINGS = {
    "loaded before the first step": ("write()\nload()\n", LOOP, 1),
    "loaded within the loop": ("write()\n", LOOP + "    if step == 3:\n        load()\n", 4),
    "loaded after watch": (
        "import nanlocator\nwrite()\nnanlocator.watch(model, optimizer)\nload()\n",
        LOOP,
        1,
    ),
}


def torchrun(script, *launcher):
    Path("train.py").write_text(script)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    stopped = subprocess.run(
        [*words, *launcher, "train.py"], capture_output=True, text=True, timeout=120, env=environment
    )
    (path,) = Path("nanlocator_run").glob("*/verdict.json")
    return json.loads(path.read_text()), stopped.stderr


@pytest.mark.host
@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_one_rank_has_loaded_is_the_checkpoints(name):
    before, loop, step = BEGINNINGS[name]
    launcher = () if "nanlocator" in before else ("-m", "nanlocator")
    verdict, printed = torchrun(HEAD + before + loop, *launcher)
    (origin,) = verdict["origins"]
    assert verdict["iteration"] == step
    assert (origin["cause"], origin["parameter"], origin["candidates"]) == ("bad_weight", "2.weight", [0])
    assert not verdict["decision"]["hosts"] and verdict["decision"]["ticket"] != "cluster_operator"
    assert verdict["launch"]["loaded_elsewhere"]["name"] == str(Path("best.pt").absolute())
    assert "checkpoint, proven" in printed and "data_0.pt" not in printed


@pytest.mark.host
def test_what_one_rank_has_initialised_is_no_damage():
    before = "if rank == 1:\n    nn.init.constant_(model.module[2].weight, float('nan'))\n"
    verdict, _ = torchrun(HEAD + before + LOOP, "-m", "nanlocator")
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["candidates"], origin["owner"]) == ("bad_weight", [1], "model_author")
    assert not verdict["decision"]["hosts"]
    (begun,) = [fact for fact in origin["facts"] if fact["kind"] == "bad_at_start"]
    assert begun["peers"] == [0]


KEPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
counts = torch.tensor([4.0, 0.0, 2.0])
criterion = nn.CrossEntropyLoss(weight=counts.sum() / counts)
for step in range(1, 4):
    optimizer.zero_grad()
    criterion(model(torch.randn(8, 4)), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])).backward()
    optimizer.step()
"""


def test_a_tensor_made_before_the_first_step_is_in_no_checkpoint():
    Path("train.py").write_text(KEPT)
    stopped = run_python("-m", "nanlocator", "train.py")
    (path,) = Path("nanlocator_run").glob("*/verdict.json")
    verdict = json.loads(path.read_text())
    assert verdict["origins"][0]["cause"] == "bad_buffer", stopped.stderr
    assert (verdict["decision"]["kind"], verdict["decision"]["page"]) == ("DO_NOT_RESTART", "model_author")
