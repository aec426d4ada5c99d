"""Strategies and plugins for sharded models, on two ranks."""

import ast
import functools
import json
from pathlib import Path

import pytest
import strategy_ranks

CASES = [
    *(("lightning_strategies", each) for each in ("fsdp1", "fsdp2", "ddp")),
    *(("lightning_strategies", f"deepspeed_{stage}") for stage in (1, 2, 3)),
    *(("fabric_strategies", each) for each in ("fsdp1", "fsdp2", "deepspeed_2", "deepspeed_3")),
    *(("accelerate_strategies", each) for each in ("fsdp1", "fsdp2", "deepspeed_2", "deepspeed_3")),
    *(("hf_trainer_strategies", each) for each in ("fsdp1", "fsdp2")),
]


def cases(*usual):
    """All cases. Those of a usual run cover each framework with shards and with DeepSpeed's engine, in this
    or the other test."""
    assert set(usual) <= set(CASES)
    return [pytest.param(*case, marks=() if case in usual else pytest.mark.exhaustive) for case in CASES]


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


@functools.cache
def alone(script, strategy):
    return results(strategy_ranks.run_script(script, strategy))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("script", "strategy"),
    cases(
        ("lightning_strategies", "fsdp1"),
        ("lightning_strategies", "deepspeed_3"),
        ("fabric_strategies", "deepspeed_2"),
        ("accelerate_strategies", "fsdp2"),
        ("hf_trainer_strategies", "fsdp1"),
    ),
)
def test_training_computes_the_same_bits(script, strategy):
    watched = strategy_ranks.run_script(script, strategy, NANLOCATOR="1", NANLOCATOR_RERUN="always")
    assert [len(lines) for lines in alone(script, strategy)] == [2, 2]
    assert results(watched) == alone(script, strategy)
    said = watched[0][2]
    assert ("of a DeepSpeed engine" if "deepspeed" in strategy else "attached to AdamW") in said
    assert "other bits" not in said and "not executed again" not in said


def located(script, *arguments, fault):
    ranks = strategy_ranks.run_script(script, *arguments, NANLOCATOR="1", FAULT=fault)
    assert all("NonFiniteGradientError" in said for _, _, said in ranks), ranks[1][2][-3000:]
    return json.loads(Path("nanlocator_run/a0/verdict.json").read_text())


@pytest.mark.parametrize(
    ("script", "strategy"),
    cases(
        ("lightning_strategies", "fsdp2"),
        ("fabric_strategies", "fsdp1"),
        ("accelerate_strategies", "deepspeed_3"),
        ("hf_trainer_strategies", "fsdp1"),
    ),
)
def test_a_birth_in_forward_on_one_rank_is_located(script, strategy):
    verdict = located(script, strategy, fault="norm")
    (origin,) = verdict["origins"]
    assert (origin["coordinates"]["rank"], origin["phase"]) == (1, "forward")
    assert origin["operator"].startswith("aten::div")
    module, function = {
        "hf_trainer_strategies": ("model.layers.1.mlp", "NormMLP.forward"),
    }.get(script, ("blocks.1.norm", "UnitNorm.forward"))
    assert origin["module"].endswith(module) and origin["code"]["function"] == function
    assert verdict["rerun"]["reproduced"] is True


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        ("lightning_strategies", "fsdp1"),
        ("accelerate_strategies", "deepspeed_2"),
        pytest.param("fabric_strategies", "fsdp2", marks=pytest.mark.exhaustive),
        pytest.param("fabric_strategies", "deepspeed_3", marks=pytest.mark.exhaustive),
    ],
)
def test_memory_of_a_gradient_that_goes_bad_once_is_that_ranks(script, strategy):
    verdict = located(script, strategy, fault="once")
    (origin,) = verdict["origins"]
    assert origin["coordinates"]["rank"] == 1
    assert origin["cause"] == "not_reproduced" and verdict["rerun"]["reproduced"] is False


def test_a_step_of_deepspeeds_optimizer_that_the_engine_knows_nothing_of_is_recovered():
    recovered = strategy_ranks.run_script(
        "fabric_strategies", "deepspeed_2", NANLOCATOR="1", NANLOCATOR_ON_BAD="recover", FAULT="once"
    )
    assert results(recovered) == alone("fabric_strategies", "deepspeed_2")
    assert "step 4" in recovered[0][2]


def test_what_a_skipped_step_has_logged_is_no_more_logged_afterwards():
    ranks = strategy_ranks.run_script(
        "lightning_strategies", "fsdp1", NANLOCATOR="1", NANLOCATOR_ON_BAD="skip", FAULT="norm"
    )
    losses = ast.literal_eval(results(ranks)[1][0].removeprefix("losses: ").replace("nan", "None"))
    returned, logged = losses[::2], losses[1::2]
    assert returned == logged and [loss is None for loss in returned] == [False, False, False, True, False]


def test_manual_optimization_inside_of_a_wrapper_is_scanned_and_says_that_it_is_not_executed_again():
    arguments = ("lightning_strategies", "ddp", "manual")
    verdict = located(*arguments, fault="norm")
    assert {origin["coordinates"]["rank"] for origin in verdict["origins"]} == {1}
    assert verdict["rerun"]["done"] is False
    assert "a backward pass ran inside a module's forward" in str(verdict)
    healthy = strategy_ranks.run_script(*arguments, NANLOCATOR="1")
    assert results(healthy) == results(strategy_ranks.run_script(*arguments))


def test_an_optimizer_that_fsdp_has_left_without_the_models_parameters_is_said():
    """accelerate requires the model to be prepared before an optimizer of flat parameters is constructed."""
    for code, _, said in strategy_ranks.run_script(
        "accelerate_strategies", "fsdp1", "together", NANLOCATOR="1", FAULT="norm"
    ):
        assert code == 0
        assert "attached to nothing: no module that an optimizer trains was called" in said


def test_transformers_trainer_with_a_deepspeed_configuration_is_watched():
    said = strategy_ranks.run_script("hf_trainer_deepspeed", NANLOCATOR="1")[0][2]
    assert "of a DeepSpeed engine, ZeRO stage 2" in said, said
    assert "ERROR[log_zero] " in said and "torch.log" in said, said
