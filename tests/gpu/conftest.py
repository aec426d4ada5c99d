"""Tests for a GPU. Without one, each test that can do so runs on the CPU, at small size.

tools/gpu runs each file in its own process and sets two variables. Values that a test records
(`record_property`) are appended to NANLOCATOR_FIGURES, a line of JSON for each test, and no test begins after
NANLOCATOR_DEADLINE (seconds since the epoch).
"""

import json
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest
import torch
from fixtures import run_in_tmp_path, same_seed, without_leftovers  # noqa: F401
from gpu_machine import DEVICE, ROOT, Replays


@pytest.fixture(scope="session")
def device():
    return DEVICE


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        if DEVICE == "cpu" and item.get_closest_marker("needs_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def in_time():
    if time.time() > float(os.environ.get("NANLOCATOR_DEADLINE", "inf")):
        pytest.skip("no time was left")


def pytest_sessionstart():
    _write({
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    })  # fmt: skip


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _write({
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "figures": dict(report.user_properties),
        })  # fmt: skip


def _output(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _write(line):
    if path := os.environ.get("NANLOCATOR_FIGURES"):
        with open(path, "a") as file:
            print(json.dumps(line), file=file)


@pytest.fixture(scope="module")
def replays():
    return Replays()
