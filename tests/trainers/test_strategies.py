"""Strategies and plugins for models in shards, on two ranks."""

import json
from pathlib import Path

import pytest
import strategy_ranks

CASES = [
    ("lightning_strategies", "fsdp1"),
    ("lightning_strategies", "fsdp2"),
    ("lightning_strategies", "deepspeed_1"),
    ("lightning_strategies", "deepspeed_2"),
    ("lightning_strategies", "deepspeed_3"),
    ("fabric_strategies", "fsdp1"),
    ("fabric_strategies", "fsdp2"),
    ("fabric_strategies", "deepspeed_2"),
    ("fabric_strategies", "deepspeed_3"),
    ("accelerate_strategies", "fsdp1"),
    ("accelerate_strategies", "fsdp2"),
    ("accelerate_strategies", "deepspeed_2"),
    ("accelerate_strategies", "deepspeed_3"),
]


@pytest.fixture(autouse=True)
def needs_packages():
    for folder in (strategy_ranks.TRAINERS, strategy_ranks.DEEPSPEED):
        if not folder.is_dir():
            pytest.skip(f"needs what tools/setup puts into {folder}")


def results(ranks):
    assert [code for code, _, _ in ranks] == [0, 0], ranks[1][2][-3000:]
    return [
        [line for line in out.splitlines() if line.startswith(("losses:", "weights:"))] for _, out, _ in ranks
    ]


@pytest.mark.parametrize(("script", "strategy"), CASES)
def test_training_computes_the_same_bits(script, strategy):
    alone = strategy_ranks.run_script(script, strategy)
    watched = strategy_ranks.run_script(script, strategy, NANLOCATOR="1", NANLOCATOR_RERUN="always")
    assert [len(lines) for lines in results(alone)] == [2, 2]
    assert results(watched) == results(alone)
    said = watched[0][2]
    assert ("of a DeepSpeed engine" if "deepspeed" in strategy else "attached to AdamW") in said
    assert "other bits" not in said and "not executed again" not in said


def located(script, strategy, fault):
    ranks = strategy_ranks.run_script(script, strategy, NANLOCATOR="1", FAULT=fault)
    assert all("NonFiniteGradientError" in said for _, _, said in ranks), ranks[1][2][-3000:]
    return json.loads(Path("nanlocator_run/a0/verdict.json").read_text())


@pytest.mark.parametrize(("script", "strategy"), CASES)
def test_a_birth_in_forward_on_one_rank_is_located(script, strategy):
    verdict = located(script, strategy, "norm")
    (origin,) = verdict["origins"]
    assert (origin["coordinates"]["rank"], origin["phase"]) == (1, "forward")
    assert origin["operator"].startswith("aten::div")
    assert origin["module"].endswith("blocks.1.norm")
    assert origin["code"]["function"] == "UnitNorm.forward"
    assert verdict["rerun"]["reproduced"] is True


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        ("lightning_strategies", "fsdp1"),
        ("fabric_strategies", "fsdp2"),
        ("accelerate_strategies", "deepspeed_2"),
        ("fabric_strategies", "deepspeed_3"),
    ],
)
def test_memory_of_a_gradient_that_goes_bad_once_is_that_ranks(script, strategy):
    verdict = located(script, strategy, "once")
    (origin,) = verdict["origins"]
    assert origin["coordinates"]["rank"] == 1
    assert origin["cause"] == "not_reproduced" and verdict["rerun"]["reproduced"] is False
