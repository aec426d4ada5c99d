"""The training program itself, without nanlocator: is it a training that a fault would really harm?"""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.megatron

# hidden 32 and 16 tokens: a step of 8 ranks takes 0.2 s on 2 cores.
SMALL = {"hidden": 32, "sequence": 16}


def train(pool, name, ranks, steps=5, faults=(), **training):
    return pool.run(
        {"name": name, "ranks": ranks, "steps": steps, "training": SMALL | training, "faults": list(faults)}
    ).require_success()


@pytest.fixture(scope="module")
def two_replicas(pool):
    return train(pool, "dp2", ranks=2)


@pytest.mark.parametrize(
    ("name", "ranks", "training"),
    [
        ("tp2_pp2_dp2", 8, {"tp": 2, "pp": 2}),
        ("tp2_pp2_dp2_sequence_parallel", 8, {"tp": 2, "pp": 2, "sequence_parallel": True}),
        ("pp2_interleaved_dp2", 4, {"pp": 2, "vp": 2}),
        (
            "dp2_everything_overlapped",
            2,
            {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "bucket_size": 3000,
            },
        ),
    ],
)
def test_every_layout_trains_the_same_model_to_the_same_losses(pool, two_replicas, name, ranks, training):
    ranks = train(pool, name, ranks, **training)
    for ours, reference in zip(ranks[0]["records"], two_replicas[0]["records"], strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_two_runs_are_bit_identical_in_different_processes(pool, two_replicas):
    again = train(pool, "dp2_again", ranks=2)
    for ours, reference in zip(again, two_replicas, strict=True):
        assert ours["fingerprints"] == reference["fingerprints"]


def test_dropout_moves_the_tracked_random_states(pool, two_replicas):
    # If the tracker's fork did nothing on CPU, its states would stay as they were seeded.
    ranks = train(pool, "dp2_dropout", ranks=2, dropout=0.1)
    assert ranks[0]["fingerprints"]["rng_tracker"] != two_replicas[0]["fingerprints"]["rng_tracker"]


def test_the_loss_falls_from_a_uniform_guess_to_below_four(pool):
    ranks = train(pool, "loss", ranks=2, steps=40, hidden=128, sequence=64)
    losses = [record["loss"] for record in ranks[0]["records"]]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert max(losses[-5:]) < 4.0


def test_a_nan_in_a_duplicated_norm_weight_escapes_megatrons_norm_and_becomes_a_nan_weight(pool):
    fault = {"name": "tp_duplicated_layernorm", "rank": 1, "iteration": 3}
    name = "decoder.layers.1.input_layernorm.weight"
    ranks = train(pool, "escapes", ranks=2, steps=3, tp=2, faults=[fault])
    assert math.isfinite(ranks[0]["records"][2]["grad_norm"])
    assert ranks[0]["records"][2]["successful"]
    assert ranks[0]["non_finite_parameters"] == {}
    assert ranks[1]["non_finite_parameters"] == {name: 1}


def test_undone_faults_leave_the_trajectory_of_steps_that_never_happened(pool):
    # Steps 3 and 4 carry a NaN each and are undone: weights and Adam's state are those after step 2.
    faults = [{"name": "main_grad_element", "rank": 1, "iteration": k} for k in (3, 4)]
    undone = pool.run(
        {"name": "undone", "ranks": 2, "steps": 4, "training": SMALL, "faults": faults, "undo_faults": True}
    ).require_success()
    never = train(pool, "never", ranks=2, steps=2)
    for ours, reference in zip(undone, never, strict=True):
        assert len(reference["records"]) == 2
        assert ours["fingerprints"]["weights"] == reference["fingerprints"]["weights"]
        assert ours["fingerprints"]["optimizer"] == reference["fingerprints"]["optimizer"]
    assert len(undone[1]["planted"]) == 2


def test_a_fault_that_does_not_fit_is_refused_on_every_rank(pool):
    ranks = pool.run(
        {
            "name": "refused",
            "ranks": 2,
            "steps": 1,
            "training": SMALL,
            "faults": [{"name": "bad_weight", "rank": 1, "parameter": "no.such.weight"}],
        }
    ).require_results()
    for rank in ranks:
        assert rank["error"]["type"] == "builtins.ValueError"
        assert "no.such.weight" in rank["error"]["text"]


def test_a_hanging_rank_is_killed_after_its_stack_was_shown(pool):
    outcome = pool.run(
        {"name": "hangs", "ranks": 2, "steps": 10**6, "training": SMALL | {"tp": 2}, "timeout": 3.0}
    )
    assert outcome.timed_out
    assert "in run_rank" in outcome.logs(last_lines=200)
    with pytest.raises(AssertionError, match="timed out"):
        outcome.require_results()
