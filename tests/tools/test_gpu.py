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
PARALLEL_FAULTS = ["megatron-faults", "ddp-faults", "fsdp-faults"]

pytestmark = pytest.mark.slow


def gpu(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [ROOT / "tools" / "gpu", *arguments]
    # Else inductor compiles ten programs to know what this CPU has.
    environment = {**os.environ, "PYTHON": sys.executable, "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=1500)


class Session:
    """One run of tools/gpu on the CPU, and what it leaves."""

    def __init__(self, *steps: str, folder: Path) -> None:
        self.done = gpu("--cpu", "--only", *steps, "--output", "figures.json", folder=folder)
        self.logs = folder / "figures.logs"
        written = json.loads((folder / "figures.json").read_text())
        self.machine = written["machine"]
        self.steps = {step["name"]: step for step in written["steps"]}

    def figures(self, name: str) -> dict:
        """Of a step that has passed."""
        assert self.steps[name]["status"] == "passed", (self.logs / f"{name}.log").read_text()[-5000:]
        return self.steps[name]["figures"]


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session(*ON_CPU, "rank-failure", *NEEDS_GPU, folder=tmp_path_factory.mktemp("session"))


@pytest.fixture(scope="module")
def parallel_session(tmp_path_factory) -> Session:
    return Session("megatron", *PARALLEL_FAULTS, folder=tmp_path_factory.mktemp("parallel"))


def test_the_steps_are_listed_in_order(tmp_path):
    done = gpu("--list", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:2] == ["build", "kernels"] and names[-1] == "trainer"
    assert {line.split()[0] for line in done.stdout.splitlines() if " GPU " in line} == NEEDS_GPU


def test_an_unknown_step_is_wrong_use(tmp_path):
    assert gpu("--only", "nothing", folder=tmp_path).returncode == 2


def test_what_needs_a_gpu_is_skipped_without_one(session):
    assert {session.steps[name]["status"] for name in NEEDS_GPU} == {"skipped"}


@pytest.mark.compiles
def test_on_the_cpu_every_step_passes_and_leaves_its_figures(session):
    figures = {name: session.figures(name) for name in ON_CPU}
    assert session.machine["device"] == "cpu"
    assert figures["scan-stats"]["compared"] > 100
    assert figures["faults"]["log of a negative number"]["operator"] == "aten::log"
    assert figures["rerun"]["time_over_step"] > 1


def test_the_exit_status_says_whether_a_step_failed(session):
    failed = any(step["status"] in ("failed", "timed out") for step in session.steps.values())
    assert session.done.returncode == failed, session.done.stdout + session.done.stderr


def test_a_rank_that_fails_in_the_rerun_ends_in_time_and_what_is_on_disk_is_counted(session):
    step = session.steps["rank-failure"]
    assert step["status"] in ("passed", "failed")  # not timed out
    assert step["figures"].keys() >= {"seconds", "ledgers"}


@pytest.mark.megatron
def test_a_step_of_megatron_has_the_same_bits_with_and_without(parallel_session):
    figures = parallel_session.figures("megatron")
    assert figures["bits_are_equal"] and figures["work"]["launches"] > 0


@pytest.mark.megatron
@pytest.mark.parametrize("name", PARALLEL_FAULTS)
def test_faults_in_parallel_training_are_named(name, parallel_session):
    cases = parallel_session.figures(name)["cases"]
    assert cases["healthy"]["different_tensors"] == 0
    assert cases["log of a negative"]["found"]["operator"] == "aten::log"
    assert [replay["status"] for replay in cases["log of a negative"]["replays"]] == [1]


def test_what_a_machine_without_network_lacks_is_packed(tmp_path):
    done = gpu("--pack", "brought", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    brought = tmp_path / "brought"
    assert (brought / "dev" / "usr" / "include" / "gtest").exists()
    assert (brought / "site" / "nlohmann_json" / "include" / "nlohmann" / "json.hpp").exists()
    assert "MiB" in done.stdout
