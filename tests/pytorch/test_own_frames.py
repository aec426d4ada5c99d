"""Frames of the user's code are recognised by the places of the packages, whatever the folders' names."""

import json

import pytest
from ranks import run_python

SCRIPT = """
import torch
from nanlocator import LocatingOptimizer

def bad_logarithm(x):
    return torch.log(x - x)

model = torch.nn.Linear(3, 1)
optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, on_bad="report")

def closure():
    loss = (model(torch.ones(2, 3)) * bad_logarithm(torch.ones(()))).sum()
    loss.backward()
    return loss

optimizer.step(closure)
"""


@pytest.mark.parametrize("folder", ["nanlocator", "torch", "integrations", "a folder"])
def test_a_script_in_a_folder_named_like_a_package_keeps_its_frames(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "train.py").write_text(SCRIPT)
    done = run_python(tmp_path / folder / "train.py")
    assert done.returncode == 0, done.stderr
    (ledger,) = (tmp_path / "nanlocator_run" / "a0").glob("ledger_*.jsonl")
    births = [json.loads(line) for line in ledger.read_text().splitlines() if '"birth"' in line]
    assert any(
        frame.startswith(f"{tmp_path / folder / 'train.py'}:") and frame.endswith("in bad_logarithm")
        for birth in births
        for frame in birth.get("stack", [])
    ), births
