"""tools/gpu without a GPU. Its tests are in tests/gpu."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_prepare  # noqa: E402


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


def test_quick_times_alone_what_is_timed_and_then_runs_the_parts_beside_each_other(tmp_path):
    done = gpu("--cpu", "--quick", "--only", "scans", "faults", "--seconds", "0", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *alone, one, another, _ = [line.split()[0] for line in done.stdout.splitlines()]
    assert alone == ["nccl", "timed"] and {one, another} == {"faults", "scans"}


def test_what_a_machine_without_network_lacks_is_copied(tmp_path):
    gpu_prepare.copy_installed(tmp_path)
    assert (tmp_path / "dev" / "usr" / "include" / "gtest").exists()
    assert (tmp_path / "site" / "nlohmann_json" / "include" / "nlohmann" / "json.hpp").exists()


def test_a_library_keeps_the_device_code_of_one_architecture():
    def entry(kind, architecture, code):
        return struct.pack("<HHIQ12xI16x", kind, 0x101, 48, len(code), architecture) + code

    def fat_binary(*entries):
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(b"".join(entries))) + b"".join(entries)

    def library(*, kept_alone):
        other = bytes(32) if kept_alone else bytes(range(1, 33))
        own = bytes(range(33, 65))
        one = fat_binary(entry(2, 80, other), entry(2, 90, own), entry(1, 90, other))
        two = fat_binary(entry(2, 100, other))
        return b"host code" + one + b"\x50\xed\x55\xba is no header" + two + b"end"

    assert gpu_prepare.only_of_one_architecture(library(kept_alone=False)) == library(kept_alone=True)
