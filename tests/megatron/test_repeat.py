"""The repeat of a step has the bits of its first pass, because every state is restored: runs that omit one
state differ. (test_healthy.py repeats every healthy step.)"""

from __future__ import annotations

import pytest
from compare import STEPS, differences, passes_of, train, without_nanlocator
from test_matrix import EXPERTS, Layout

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

OWN_DATA = [{"name": "data_drawn_in_forward_step"}]
DRAWING_DATA = [{"name": "data_from_the_global_generators"}]
EXPERTS_WITH_BIAS = Layout(2, EXPERTS | {"expert_bias": True})
OMISSIONS = {  # and the least that they change
    "rng_tracker": (Layout(2, {"tp": 2}), [], {"gradients_sha256", "rng_tracker"}),
    "torch_generator": (Layout(2, {}), OWN_DATA, {"loss"}),
    "python_and_numpy": (Layout(2, {}), OWN_DATA, {"loss", "rng_python", "rng_numpy"}),
    "draws_of_the_data": (Layout(2, {}), DRAWING_DATA, {"gradients_sha256"}),
    "buffers": (EXPERTS_WITH_BIAS, [], {"buffers"}),
    "router_losses": (EXPERTS_WITH_BIAS, [], {"aux_loss"}),
    "multi_token_losses": (Layout(2, {"mtp_layers": 1}), [], {"aux_loss"}),
    "gradients": (Layout(2, {}), [], {"gradients_sha256"}),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("state", OMISSIONS)
def test_a_repeat_that_forgets_a_state_makes_another_training(pool, state):
    layout, preparations, expected = OMISSIONS[state]

    def trained(name, preparations, **nanlocator):
        return train(
            pool, f"repeat_{state}_{name}", layout, preparations, steps=3, **nanlocator
        ).require_success()

    reference = without_nanlocator(pool, layout, 3, preparations)
    restored = trained("restored", preparations, rerun="always")
    assert not differences(restored, reference)
    omitted = [{"name": "leave_as_moved", "state": state}, *preparations]
    forgotten = trained("forgotten", omitted, rerun="always")
    assert expected <= differences(forgotten, reference).keys()


# ---- states that cannot be restored, and programs that draw by themselves ---------------------------------

ONE_OFF = {"name": "main_grad_element", "rank": 1, "iteration": 3}


@pytest.mark.parametrize("preparations", [OWN_DATA, DRAWING_DATA], ids=["in_forward_step", "in_the_iterator"])
def test_data_that_are_drawn_in_the_step_are_the_same_in_its_repeat(pool, preparations):
    layout, name = Layout(2, {}), preparations[0]["name"]
    reference = without_nanlocator(pool, layout, preparations=preparations)
    ranks = train(
        pool, f"{name}_recovered", layout, preparations, faults=[ONE_OFF], on_bad="recover"
    ).require_success()
    assert [verdict["rerun"]["reproduced"] for verdict in ranks[0]["verdicts"]] == [False]
    assert not differences(ranks, reference)


def test_a_microbatch_that_the_step_writes_in_place_is_named(pool):
    written = [{"name": "loss_mask_written_in_place", "microbatch": 1}]
    ranks = train(
        pool, "written_in_place", Layout(2, {}), written, faults=[ONE_OFF], on_bad="report"
    ).require_success()
    for rank in ranks:
        (verdict,) = rank["verdicts"]
        (sentence,) = verdict["rerun"]["not_restored"]
        assert "microbatch 1: 'loss_mask' was written in place" in sentence
        assert "microbatch 0" not in sentence
        assert verdict["origins"][0]["candidates"] == [1]


# ---- beside Megatron's own checks ----------------------------------------------------------------------

STOPPED = "nanlocator.NonFiniteGradientError"
MACHINES = ["disabled", "validate_results"]
GRADIENT = ONE_OFF  # Megatron's check of the bucket sees it
COMPUTED = {"name": "forward_operator", "rank": 1, "iteration": 3}  # ... and of the loss
REPEATING = {"repeats": None}


def train_with_checks(pool, machine, fault, **nanlocator):
    checks = {"check_for_nan_in_grad": True, "check_for_nan_in_loss": True, "rerun_state_machine": machine}
    repeats = "always" if fault.get("repeats", 1) is None else "once"
    name = f"{machine}_{fault['name']}_{repeats}_{nanlocator['on_bad']}"
    return train(pool, f"repeat_{name}", Layout(2, checks), faults=[fault], **nanlocator)


def verdict_of(ranks):
    """The only verdict, the same on all ranks, about the planted step and rank."""
    (verdict,) = ranks[0]["verdicts"]
    assert all(rank["verdicts"] == [verdict] for rank in ranks)
    assert (verdict["iteration"], verdict["status"]) == (3, "located")
    assert [origin["candidates"] for origin in verdict["origins"]] == [[1]]
    return verdict


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("fault", "is_reproduced"),
    [(GRADIENT, False), (GRADIENT | REPEATING, True), (COMPUTED, True)],
    ids=["once", "always", "operator"],
)
def test_under_stop_our_error_comes_before_megatrons_on_all_ranks(pool, machine, fault, is_reproduced):
    ranks = train_with_checks(pool, machine, fault, on_bad="stop").require_results()
    verdict = verdict_of(ranks)
    assert verdict["rerun"]["reproduced"] is is_reproduced
    for rank in ranks:
        assert rank["error"]["type"] == STOPPED
        assert rank["error"]["verdict"] == verdict
        assert rank["iteration"] == 3


@pytest.mark.parametrize("fault", [GRADIENT, COMPUTED], ids=["once", "operator"])
def test_under_report_the_rank_that_megatron_would_have_stopped_raises_its_error(pool, fault):
    ranks = train_with_checks(pool, "disabled", fault, on_bad="report").require_results()
    verdict_of(ranks)
    assert ranks[1]["error"]["type"] == "builtins.RuntimeError"
    assert "found NaN in local" in ranks[1]["error"]["text"]
    assert ranks[0]["error"]["type"] != STOPPED
    assert "found NaN" not in ranks[0]["error"]["text"]


@pytest.mark.parametrize(
    ("fault", "code"),
    [(GRADIENT, 17), (COMPUTED, 16)],  # rerun_state_machine.py: 17 if its second pass differs, else 16
    ids=["once", "operator"],
)
def test_under_report_megatrons_machine_repeats_the_step_after_us_and_exits(pool, fault, code):
    outcome = train_with_checks(pool, "validate_results", fault, on_bad="report")
    ranks = outcome.require_results()
    verdict_of(ranks)
    for rank in ranks:
        assert rank["error"]["type"] == "gpt_training.MegatronExit"
        assert rank["error"]["text"].endswith(f"code {code}")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("fault", "on_bad"),
    [(GRADIENT, "skip"), (COMPUTED, "skip"), (GRADIENT, "recover")],
    ids=["skip_once", "skip_operator", "recover"],
)
def test_a_step_that_is_skipped_or_recovered_is_none_of_megatrons_business(pool, machine, fault, on_bad):
    ranks = train_with_checks(pool, machine, fault, on_bad=on_bad).require_success()
    verdict_of(ranks)
    for rank in ranks:
        assert [record["iteration"] for record in rank["records"]] == list(range(1, STEPS + 1))
        skipped = [record["iteration"] for record in rank["records"] if not record["successful"]]
        assert skipped == ([3] if on_bad == "skip" else [])


def test_with_megatrons_machine_in_charge_a_recovered_training_is_the_never_faulted_one(pool):
    checks = {"check_for_nan_in_grad": True, "rerun_state_machine": "validate_results"}
    layout = Layout(2, checks)
    reference = without_nanlocator(pool, layout)
    noted = [{"name": "note_each_forward"}]
    ranks = train(
        pool, "machine_recovered", layout, noted, faults=[ONE_OFF], on_bad="recover"
    ).require_success()
    assert not differences(ranks, reference)
    for rank in ranks:
        rank["planted"] = [fact for fact in rank["planted"] if fact["fault"] == "forward"]
        # Three of ours: traced, with fresh memory filled, and as a control; none of Megatron's.
        passes = [4 if step["iteration"] == 3 else 1 for step in rank["records"]]
        assert passes_of(rank, layout) == passes


def test_a_machine_that_does_not_forget_would_end_a_recovered_training(pool):
    checks = {"check_for_nan_in_grad": True, "rerun_state_machine": "validate_results"}
    omitted = [{"name": "leave_as_moved", "state": "megatrons_machine"}]
    ranks = train(
        pool, "machine_remembers", Layout(2, checks), omitted, faults=[ONE_OFF], on_bad="recover"
    ).require_results()
    assert {rank["error"]["type"] for rank in ranks} == {"gpt_training.MegatronExit"}
