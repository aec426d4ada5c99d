"""Scanners of logs recognise a block as what it is: something not finite, and nothing else."""

import re

import pytest
import torch

import nanlocator

# Rows of nvidia-resiliency-ext's registry of signatures, quoted from
# src/nvidia_resiliency_ext/attribution/restart_agent/l0/registry.py at d8686d9c7015 (2026-08-07, Apache-2.0).
# Matched line by line, without case; without the alternative about PCIe. Those that words of ours could meet.
ROWS = {
    "nan_or_inf": (
        r"(?:loss|grad(?:ient)?|activation)[=:\s]+(?:nan|[-+]?inf(?:inity)?)\b"
        r"|(?:nan|[-+]?inf(?:inity)?)\s+(?:loss|grad(?:ient)?|detected|encountered)"
        r"|non[- ]finite"
    ),
    "gpu_hardware_fault": (
        r"\bXid\b|ECC.*(?:uncorrectable|DBE)|GPU.*(?:off bus|fallen off)"
        r"|NVLink.{0,24}(?:link down|uncorrectable(?: error)?|CRC error|recovery failed)"
        r"|NVLink\s+fatal\s+(?:error|failure)"
        r"|thermal.{0,80}(?:shutdown|violation|fault)"
    ),
    "infra_policy_event": r"SLURM.*(?:preempt|node failure|NODE_FAIL)|\bpreempted\b|\bnode failure\b",
    "user_cancelled": r"\bscancel\b|\bcancelled by user\b|\buser .*cancel",
    "checkpoint_compatibility_mismatch": r"\bcheckpoint\b.{0,160}\bmismatch\b",
    "bad_token_or_window": r"bad token|bad sample|token window|skip(?:ping)? .*token|quarantine .*token",
    "artifact_or_path_not_found": r"\bNo such file or directory\b",
}


def matched(line):
    return {name for name, pattern in ROWS.items() if re.search(pattern, line, re.I)}


def matched_by_the_package(line):
    registry = pytest.importorskip("nvidia_resiliency_ext.attribution.restart_agent.l0.registry")
    return {row.registry_id for row in registry.match_registry(line)}


class Broken(torch.nn.Module):
    def __init__(self, spoil):
        super().__init__()
        self.linear, self.spoil, self.calls = torch.nn.Linear(4, 4), spoil, 0

    def forward(self, x):
        self.calls += 1
        return self.spoil(self, self.linear(x))


def once(module, y):
    if module.calls == 2:
        y.detach().numpy()[0, 1] = float("nan")  # unseen by operators
    return y


def of_math(module, y):
    return torch.log(y * 0 - 1) if module.calls > 1 else y


def of_weight(module, y):
    if module.calls == 1:
        module.linear.weight.data[1, 2] = float("nan")
    return y


@pytest.mark.parametrize("on_bad", ["stop", "report"])
@pytest.mark.parametrize("spoil", [once, of_math, of_weight])
@pytest.mark.parametrize("scan", [matched, matched_by_the_package])
def test_a_block_is_something_not_finite_and_nothing_else(scan, spoil, on_bad, capfd, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "88213")
    torch.manual_seed(0)
    model = Broken(spoil)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer, on_bad=on_bad)
    try:
        for _ in range(3):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError:
        pass
    finally:
        watch.remove()
    block = capfd.readouterr().err
    assert re.search(r"nanlocator (ERROR|FATAL)\[", block) and "\n  restart " in block
    found = [scan(line) for line in block.splitlines()]
    others = {"observed_exception"}  # a traceback, if there is one
    assert set().union(*found) - others == {"nan_or_inf"}, block


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("  check: dmesg -T | grep -i xid", "gpu_hardware_fault"),
        ("  kill: scancel --signal=KILL --full 88213", "user_cancelled"),
    ],
)
def test_what_the_block_avoids_is_what_they_look_for(line, row):
    assert matched(line) == {row}
