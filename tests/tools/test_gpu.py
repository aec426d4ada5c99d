"""tools/gpu without a GPU: every step that the CPU can do, at small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_GPU = {"sanitizer", "streams-races", "graph", "suite", "triton", "trainer"}
ON_CPU = ["build", "scan-stats", "streams", "faults", "rerun", "kernel-faults", "transparency"]


def gpu(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [ROOT / "tools" / "gpu", *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)


def test_the_steps_are_listed_in_order(tmp_path):
    done = gpu("--list", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:2] == ["build", "kernels"] and names[-1] == "trainer"
    assert {line.split()[0] for line in done.stdout.splitlines() if " GPU " in line} == NEEDS_GPU


def test_an_unknown_step_is_wrong_use(tmp_path):
    assert gpu("--only", "nothing", folder=tmp_path).returncode == 2


def test_what_needs_a_gpu_is_skipped_without_one(tmp_path):
    done = gpu("--cpu", "--only", *NEEDS_GPU, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "gpu_session.json").read_text())["steps"]
    assert {step["name"]: step["status"] for step in steps} == dict.fromkeys(NEEDS_GPU, "skipped")


def test_on_the_cpu_every_step_passes_and_leaves_its_figures(tmp_path):
    done = gpu("--cpu", "--only", *ON_CPU, "--output", "figures.json", folder=tmp_path)
    logs = "".join(log.read_text()[-2000:] for log in sorted((tmp_path / "figures.logs").glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    session = json.loads((tmp_path / "figures.json").read_text())
    assert session["machine"]["device"] == "cpu"
    figures = {step["name"]: step["figures"] for step in session["steps"]}
    assert [step["status"] for step in session["steps"]] == ["passed"] * len(ON_CPU)
    assert figures["scan-stats"]["compared"] > 100
    assert figures["faults"]["log of a negative number"]["operator"] == "aten::log"
    assert figures["rerun"]["time_over_step"] > 1


def test_a_rank_that_fails_in_the_rerun_ends_in_time_and_what_is_on_disk_is_counted(tmp_path):
    gpu("--cpu", "--only", "rank-failure", folder=tmp_path)
    (step,) = json.loads((tmp_path / "gpu_session.json").read_text())["steps"]
    assert step["status"] in ("passed", "failed")  # not timed out
    assert step["figures"].keys() >= {"seconds", "ledgers"}


@pytest.mark.megatron
def test_a_step_of_megatron_has_the_same_bits_with_and_without(tmp_path):
    done = gpu("--cpu", "--only", "megatron", folder=tmp_path)
    session = json.loads((tmp_path / "gpu_session.json").read_text())
    assert done.returncode == 0, (tmp_path / "gpu_session.logs" / "megatron.log").read_text()[-3000:]
    (step,) = session["steps"]
    assert step["figures"]["bits_are_equal"] and step["figures"]["work"]["launches"] > 0


@pytest.mark.megatron
@pytest.mark.parametrize("name", ["megatron-faults", "ddp-faults", "fsdp-faults"])
def test_faults_in_parallel_training_are_named(name, tmp_path):
    done = gpu("--cpu", "--only", name, folder=tmp_path)
    assert done.returncode == 0, (tmp_path / "gpu_session.logs" / f"{name}.log").read_text()[-5000:]
    (step,) = json.loads((tmp_path / "gpu_session.json").read_text())["steps"]
    cases = step["figures"]["cases"]
    assert cases["healthy"]["different_tensors"] == 0
    assert cases["log of a negative"]["found"]["operator"] == "aten::log"
    assert [replay["status"] for replay in cases["log of a negative"]["replays"]] == [1]


def test_what_a_machine_without_network_lacks_is_packed(tmp_path):
    done = gpu("--pack", "brought", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    headers = tmp_path / "brought" / "dev" / "usr" / "include"
    assert (headers / "nlohmann" / "json.hpp").exists() and (headers / "gtest").exists()
    assert "MiB" in done.stdout
