"""tools/bench plan: its counts on the meta device equal the engine's on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import RankServer

pytestmark = pytest.mark.megatron

BENCHMARKS = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"


_server = RankServer("plan_counting")


def run_main(rank: int, world_size: int, port: int, *arguments: str) -> None:
    import plan_counting

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["plan_counting.py", *arguments]
    plan_counting.main()


def counted(name: str, rank: int) -> dict:
    ((code, said, errors),) = _server.run_programs(1, run_main, name, str(rank))
    assert code == 0, errors[-4000:]
    return json.loads(said.splitlines()[-1])


def measured(name: str, folder: Path) -> list[dict]:
    ended = _server.run_programs(2, run_main, name, "--measured", str(folder))
    assert [code for code, _, _ in ended] == [0, 0], [errors[-4000:] for _, _, errors in ended]
    return figures_in(folder)


def measured_under_torchrun(name: str, folder: Path) -> list[dict]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, BENCHMARKS / "plan_counting.py", name, "--measured", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return figures_in(folder)


def figures_in(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(autouse=True)
def benchmarks_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize(
    "name, measure",
    [("small", measured_under_torchrun), ("small pipeline", measured), ("small experts", measured)],
)
def test_what_is_counted_without_memory_is_what_the_engine_does(name, measure, tmp_path):
    for rank, real in enumerate(measure(name, tmp_path)):
        plan = counted(name, rank)
        assert {key: plan[key] for key in real} == real


def test_every_published_configuration_has_a_step_time_and_a_source():
    from plan_configurations import CONFIGURATIONS

    for c in CONFIGURATIONS:
        assert c.step_seconds > 0.1 and c.source
        assert c.ranks == c.tp * c.pp * c.dp
