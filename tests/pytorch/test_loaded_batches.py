"""The samples of a bad step, by their indices in the data set of a DataLoader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Feats(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, i):
        x = torch.randn(20, 8, generator=torch.Generator().manual_seed(i))
        if i == BAD:
            x[3, 4] = float("nan")
        return x, i % 5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(160, 5))

    def forward(self, x):
        return self.body(x)

def train(batches, move=lambda x: x):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    {watch}
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(move(x)), y).backward()
        optimizer.step()

if __name__ == "__main__":
    torch.manual_seed(0)
    BAD = int(sys.argv[1])
    {train}
"""
AHEAD = """
def one_ahead(batches):
    now = None
    for after in batches:
        if now is not None:
            yield now
        now = after
    yield now
"""
SPOILED = """
def spoiled(batches):
    for x, y in batches:
        x[2, 0, 0] = float("nan")
        yield x, y
"""
MOVED = """
def moved(batches):
    for batch in batches:
        yield [each.double().float() for each in batch]
"""


def origin_of(train, bad, watch="", functions=""):
    Path("train.py").write_text(functions + COMMON.replace("{train}", train).replace("{watch}", watch))
    launcher = () if watch else ("-m", "nanlocator")
    words = [
        sys.executable,
        *launcher,
        "train.py",
        str(bad),
    ]  # not run_python, whose processes have no workers
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode != 0
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    (origin,) = json.loads(path.read_text())["origins"]
    assert origin["cause"] == "bad_input", done.stderr
    return origin, done.stderr


def samples_in(origin):
    return [fact["names"] for fact in origin["facts"] if fact["kind"] == "samples"]


def test_a_batch_that_the_program_drops_when_it_has_moved_it_is_known():
    watch = "import nanlocator; nanlocator.watch(model, optimizer)"
    functions = MOVED
    train = "train((x, y.long()) for x, y in moved(DataLoader(Feats(), batch_size=10)))"
    origin, _ = origin_of(train, 44, watch, functions)
    assert samples_in(origin) == [["samples 40 to 49 of Feats; NaN or Inf in 44"]]


@pytest.mark.parametrize("bad", [77, 3], ids=["later", "in the first step"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named(workers, bad):
    train = f"train(DataLoader(Feats(), batch_size=10, num_workers={workers}))"
    origin, said = origin_of(train, bad)
    begin = bad // 10 * 10
    assert samples_in(origin) == [[f"samples {begin} to {begin + 9} of Feats; NaN or Inf in {bad}"]]
    assert f"this batch (sample {bad} of Feats)" in " ".join(said.split())


def test_a_batch_that_the_program_has_written_to_is_not_the_data_sets():
    train = "train(spoiled(DataLoader(Feats(), batch_size=10)))"
    origin, _ = origin_of(train, -1, functions=SPOILED)
    assert samples_in(origin) == [["samples 0 to 9 of Feats"]] and origin["detail"] == "unrecorded"


def test_a_shuffled_batch_that_was_moved_is_listed():
    watch = "import nanlocator; nanlocator.watch(model, optimizer)"
    train = "train(DataLoader(Feats(), batch_size=4, shuffle=True), lambda x: x.double().float())"
    origin, _ = origin_of(train, 50, watch)
    ((line,),) = samples_in(origin)
    assert line.startswith("samples ") and line.endswith(" of Feats; NaN or Inf in 50")
    assert len(line.split(" of ")[0].split(", ")) == 4


def test_a_batch_that_is_loaded_ahead_is_not_taken_for_the_steps():
    train = "train(one_ahead(DataLoader(Feats(), batch_size=10)))"
    origin, _ = origin_of(train, 55, functions=AHEAD)
    assert samples_in(origin) == [["samples 50 to 59 of Feats; NaN or Inf in 55"]]
