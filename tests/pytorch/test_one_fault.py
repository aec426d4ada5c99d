"""One fault, from the stopped step to its replay and its offline report: the smoke test for a version of
torch (tools/test --torch X --smoke)."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import nanlocator


class LogNorm(nn.Module):
    def forward(self, x):
        return x - torch.log(x.clamp(min=0).sum(-1, keepdim=True))


def test_a_log_of_zero_in_a_closure_is_named_replayed_and_reported():
    model = nn.Sequential(nn.Linear(4, 4), LogNorm())
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    batch = torch.randn(6, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    optimizer.step(closure)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.0)
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        optimizer.step(closure)
    (origin,) = raised.value.verdict["origins"]
    assert (origin["module"], origin["operator"], origin["phase"]) == ("1", "aten::log", "forward")
    assert origin["cause"] == "operator_undefined"
    assert raised.value.verdict["rerun"]["reproduced"] is True
    assert torch.equal(model[0].bias, torch.full((4,), -1.0))  # the bad step was not applied

    run_dir = Path("nanlocator_run")
    replayed = run("nanlocator", "replay", run_dir / "a0" / origin["bundle"])
    assert replayed.returncode == 1, replayed.stderr  # bad again
    assert "deterministic_undefined" in replayed.stdout
    reported = run("nanlocator", "report", run_dir, "--json")
    assert reported.returncode == 1, reported.stderr
    assert json.loads(reported.stdout)["origins"] == raised.value.verdict["origins"]
    assert "aten::log" in (run_dir / "a0" / "report.html").read_text()


def run(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
