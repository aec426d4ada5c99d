"""Fixtures that the Python tests of several rooms share; every file of a test goes below its own tmp_path, or
below own_folder."""

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
    """To be in; only this user can write it and what is above it. Everybody can write /tmp."""
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
    """An optimizer that has raised waits for the next bad step, hooks and all, until it is collected. And a
    re-run asks what Torch counts for the whole process: has anything been compiled?"""
    gc.collect()
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()
