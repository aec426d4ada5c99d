"""tools/gpu without a GPU. Its tests are in tests/gpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def gpu(*arguments, folder):
    command = [ROOT / "tools" / "gpu", *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)


def test_each_file_of_tests_gpu_is_one_of_its_parts(tmp_path):
    parts = gpu("--list", folder=tmp_path).stdout.split()
    assert parts[0] == "build"
    files = {file.stem.removeprefix("test_gpu_") for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {*parts} - {"build", "suite", "triton", "trainer"}


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--nothing"], ["--seconds", "soon"]])
def test_wrong_use(arguments, tmp_path):
    assert gpu(*arguments, folder=tmp_path).returncode == 2


def test_figures_come_with_device_and_commit(tmp_path):
    done = gpu("--cpu", "--only", "scans", "suite", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *tests = map(json.loads, (tmp_path / "gpu_figures.jsonl").read_text().splitlines())
    assert machine["device"] == "cpu" and machine.keys() >= {"commit", "torch"}
    assert {test["outcome"] for test in tests} == {"passed"}
    assert sum(test["figures"].get("compared", 0) for test in tests) > 100
    assert "suite: needs a GPU" in done.stdout


def test_a_test_that_would_begin_too_late_is_left_out(tmp_path):
    assert gpu("--cpu", "--only", "scans", "--seconds", "0", folder=tmp_path).returncode == 0
    _, *tests = map(json.loads, (tmp_path / "gpu_figures.jsonl").read_text().splitlines())
    assert {test["outcome"] for test in tests} == {"skipped"}


def test_what_a_machine_without_network_lacks_is_packed(tmp_path):
    done = gpu("--pack", "brought", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    brought = tmp_path / "brought"
    assert (brought / "dev" / "usr" / "include" / "gtest").exists()
    assert (brought / "site" / "nlohmann_json" / "include" / "nlohmann" / "json.hpp").exists()
    assert "MiB" in done.stdout
