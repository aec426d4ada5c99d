"""One pool of forked ranks for all tests of this folder; a clear error if `nanlocator` is not built."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ScenarioPool

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


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


@pytest.fixture(scope="session")
def run_by(pool):
    """Runs scenarios by a script of this folder that forks ranks: {scenario: [result of each rank]}."""

    def run(script, scenarios, directory):
        (directory / "scenarios.json").write_text(json.dumps(scenarios))
        environment = {**os.environ, **pool.environment, "OMP_NUM_THREADS": "1"}
        path = [str(ROOT / "examples" / "megatron_gpt"), environment.get("PYTHONPATH", "")]
        command = [sys.executable, HERE / script, directory / "scenarios.json", "--output", directory]
        done = subprocess.run(
            command,
            env={**environment, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        logs = "\n".join(
            f"---- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in directory.rglob("rank*.log")
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
        return {
            scenario["name"]: [
                json.loads((directory / scenario["name"] / f"rank{rank}.json").read_text())
                for rank in range(scenario["ranks"])
            ]
            for scenario in scenarios
        }

    return run


@pytest.fixture
def nanlocator_is_built(pool):
    if not pool.has_nanlocator:
        pytest.fail("the package nanlocator is not built: run tools/setup, or put its folder on PYTHONPATH")
