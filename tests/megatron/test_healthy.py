"""A healthy run with nanlocator equals the run without it, bit for bit, and nothing is found.

Every configuration trains without nanlocator and with it, executing every step once or twice. Megatron's
reports, gradients and weights of every step, and weights, buffers, Adam's state and all random states at the
end, must be equal on every rank.
"""

from __future__ import annotations

import pytest
from compare import STEPS, differences, passes_of, train, without_nanlocator
from test_matrix import COMBINATIONS, EXPERTS, LAYOUTS, OVERLAPPED, SHARDED, Layout

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

CHECKS = {"check_for_nan_in_grad": True, "check_for_nan_in_loss": True}
AND_MACHINE = CHECKS | {"rerun_state_machine": "validate_results"}

ONCE = {
    "ddp_bf16": Layout(2, {"precision": "bf16"}),
    "ddp_bf16_gradients_in_bf16": Layout(2, {"precision": "bf16", "grad_reduce_in_fp32": False}),
    "fp16_dynamic_loss_scale": Layout(2, {"precision": "fp16", "initial_loss_scale": 2.0**19}),
    "megatrons_own_checks": Layout(2, CHECKS | {"log_num_zeros": True}),
    "megatrons_own_checks_and_machine": Layout(2, AND_MACHINE),
    "two_interleaved_stages_overlapped": Layout(2, {"pp": 2, "vp": 2, "overlap_p2p_comm": True}),
    "deallocated_pipeline_outputs": Layout(2, {"pp": 2, "deallocate_pipeline_outputs": True}),
    "experts_sharded_overlapped": Layout(2, EXPERTS | SHARDED | OVERLAPPED),
}
TWICE = {
    "fp16_searching_its_scale": Layout(2, {"tp": 2, "precision": "fp16", "initial_loss_scale": 2.0**19}),
    "megatrons_checks": Layout(2, OVERLAPPED | AND_MACHINE),
    "megatrons_checks_interleaved": Layout(2, {"pp": 2, "vp": 2} | AND_MACHINE),
}
# In most layouts the run that repeats its steps covers the other run. In these a step leaves state for the
# next one, or computes its forward twice.
FOLLOWED = {
    "overlap_param_gather",
    "interleaved_pipeline",
    "full_recompute",
    "context_parallel_p2p_dp2",
    "megatron_fsdp_hybrid",
}
COMBINED = COMBINATIONS | {
    "sequence_parallel",
    "megatron_fsdp_tp2_bf16",
    "megatron_fsdp_hybrid",
    "context_parallel_p2p_pp2",
}


def usually(of_its_own, names):
    """All configurations; LAYOUTS that are not among `names` only in an exhaustive run."""
    marks = {name: [] if name in names else pytest.mark.exhaustive for name in LAYOUTS}
    return [pytest.param(name, LAYOUTS[name], marks=mark) for name, mark in marks.items()] + list(
        of_its_own.items()
    )


def is_the_same_and_nothing_is_found(pool, name, layout, **nanlocator):
    options = {"on_bad": "stop", "check_params": True} | nanlocator
    ranks = train(pool, f"healthy_{name}", layout, **options).require_success()
    assert not differences(ranks, without_nanlocator(pool, layout))
    for rank in ranks:
        assert rank["verdicts"] == []
        assert len(rank["records"]) == STEPS
        overflows = sum(not step["successful"] for step in rank["records"])
        assert rank["dismissed"] == overflows
        # The scale is searched by overflows: routine, not a finding.
        assert (overflows > 0) == (name == "fp16_dynamic_loss_scale")


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("name", "layout"), usually(ONCE, FOLLOWED))
def test_a_healthy_run_is_bit_identical_and_nothing_is_found(pool, name, layout):
    is_the_same_and_nothing_is_found(pool, name, layout)


@pytest.mark.parametrize("level", ["grads", "modules", "operators"])
def test_a_healthy_run_is_bit_identical_at_every_level(pool, level):
    layout = LAYOUTS["sequence_parallel_tied_embeddings"]
    is_the_same_and_nothing_is_found(pool, f"level_{level}", layout, level=level)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("name", "layout"), usually(TWICE, LAYOUTS.keys() - COMBINED))
def test_a_run_that_repeats_every_step_is_the_run_without_nanlocator(pool, name, layout):
    is_searching = name == "fp16_searching_its_scale"
    steps, noted = 6 if is_searching else STEPS, [{"name": "note_each_forward"}]
    outcome = train(pool, f"repeat_{name}", layout, noted, steps=steps, rerun="always", check_params=True)
    ranks = outcome.require_success()
    assert not differences(ranks, without_nanlocator(pool, layout, steps))
    assert "other bits" not in outcome.logs(last_lines=10_000)
    for rank in ranks:
        assert rank["verdicts"] == []
        # An overflow of the loss scale ends the step, which is then not repeated.
        assert passes_of(rank, layout) == [1 + record["successful"] for record in rank["records"]]
    if is_searching:
        assert 0 < sum(record["successful"] for record in ranks[0]["records"]) < steps
