"""One pool of forked ranks for all tests of this folder; a clear error if `nanlocator` is not built."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from launch import ScenarioPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """A ScenarioPool; `environment` is added to the ranks' environment."""
    environment = {"PYTHONWARNINGS": "ignore"}
    built = ROOT / "build" / "release" / "python"
    is_importable = importlib.util.find_spec("nanlocator") is not None
    if not is_importable and (built / "nanlocator").exists():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(built), os.environ.get("PYTHONPATH")]))
        is_importable = True
    with ScenarioPool(tmp_path_factory.mktemp("megatron"), environment) as pool:
        pool.environment = environment
        pool.has_nanlocator = is_importable
        yield pool


@pytest.fixture
def nanlocator_is_built(pool):
    if not pool.has_nanlocator:
        pytest.fail("the package nanlocator is not built: run tools/setup, or put its folder on PYTHONPATH")
