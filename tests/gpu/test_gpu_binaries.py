"""The kernels' own tests and benchmark, as tools/gpu builds them; without a GPU, their CPU counterparts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_machine import DEVICE, ROOT

from nanlocator import _C

BUILD = Path(_C.__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SANITIZER = shutil.which("compute-sanitizer") or str(Path(NVCC).with_name("compute-sanitizer"))
SMALL = "--gtest_filter=-*TwoToThe31Elements*"
SMALLER = SMALL + ":*AnyBitsOfAnyLength*"  # some hundred times slower under these two


def output_of(*command):
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not here")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def test_the_kernels_pass_their_tests(record_property):
    name = "nanlocator_cuda_tests" if DEVICE == "cuda" else "nanlocator_scan_tests"
    passed = re.findall(r"\[  PASSED  \] (\d+) tests?", output_of(BUILD / "bin" / name))
    record_property("passed", int(passed[-1]))


@pytest.mark.needs_gpu
@pytest.mark.parametrize(
    ("tool", "cases"), [("memcheck", SMALL), ("racecheck", SMALLER), ("initcheck", SMALLER)]
)
def test_the_kernels_pass_their_tests_under_compute_sanitizer(tool, cases):
    output_of(
        SANITIZER, "--tool", tool, "--error-exitcode", "1", BUILD / "bin" / "nanlocator_cuda_tests", cases
    )


@pytest.mark.slow
@pytest.mark.timed
def test_the_scans_rate_beside_a_copy_of_the_same_bytes(record_property):
    if DEVICE == "cuda":
        command = [BUILD / "bin" / "cuda_scan_benchmark", "--benchmark_format=json"]
    elif (BUILD / "lib" / "libmemory_read.so").exists():
        benchmark = ROOT / "tools" / "benchmarks" / "scan.py"
        options = ["--rounds", "1", "--layers", "1", "--dtypes", "bfloat16", "--json"]
        command = [sys.executable, benchmark, *options]
    else:
        pytest.skip("its peer memory_read is not built: run tools/setup")
    record_property("benchmark", json.loads(output_of(*command)))
