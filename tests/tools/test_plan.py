"""tools/bench plan: what is counted on the meta device is what the engine does on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron

BENCHMARKS = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"


def counted(name: str, rank: int) -> dict:
    command = [sys.executable, BENCHMARKS / "plan_counting.py", name, str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, folder: Path) -> list[dict]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, BENCHMARKS / "plan_counting.py", name, "--measured", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["small", "small pipeline", "small experts"])
def test_what_is_counted_without_memory_is_what_the_engine_does(name, tmp_path):
    for rank, real in enumerate(measured(name, tmp_path)):
        plan = counted(name, rank)
        assert {key: plan[key] for key in real} == real


def test_every_published_configuration_has_a_step_time_and_a_source():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from plan_configurations import CONFIGURATIONS
    finally:
        sys.path.remove(str(BENCHMARKS))
    for c in CONFIGURATIONS:
        assert c.step_seconds > 0.1 and c.source
        assert c.ranks == c.tp * c.pp * c.dp
