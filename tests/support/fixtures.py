"""Fixtures for the Python tests of several rooms. Every test writes its files below its own tmp_path or
own_folder."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def own_folder(run_in_tmp_path, monkeypatch):
    """Changes to a folder that only this user can write, parents included; everybody can write /tmp."""
    usual = os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix=".nanlocator-test-", dir=Path.home()) as folder:
        monkeypatch.chdir(folder)
        yield Path(folder)
    os.umask(usual)


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def without_leftovers():
    """Collects optimizers that have raised, which otherwise keep their hooks and wait for the next bad step,
    and clears Torch's process-wide counters, which tell a re-run whether anything was compiled."""
    gc.collect()
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()
