"""Fixtures that the Python tests of several rooms share; every file of a test goes below its own tmp_path."""

import gc
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
