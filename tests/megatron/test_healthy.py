"""A healthy run with nanlocator is the run without it, bit for bit, and nothing is found.

Every configuration trains twice in fresh processes; all that Megatron reports of every step, gradients and
weights of every step, and weights, buffers, Adam's state and all random states at the end, must be equal on
every rank. (test_repeat.py does the same with every step executed twice.)
"""

from __future__ import annotations

import pytest
from compare import STEPS, differences, without_nanlocator
from test_matrix import EXPERTS, LAYOUTS, OVERLAPPED, SHARDED, Layout

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

CHECKS = {"check_for_nan_in_grad": True, "check_for_nan_in_loss": True}

CONFIGURATIONS = LAYOUTS | {
    "ddp_bf16": Layout(2, {"precision": "bf16"}),
    "ddp_bf16_gradients_in_bf16": Layout(2, {"precision": "bf16", "grad_reduce_in_fp32": False}),
    "fp16_dynamic_loss_scale": Layout(2, {"precision": "fp16", "initial_loss_scale": 2.0**24}),
    "megatrons_own_checks": Layout(2, CHECKS | {"log_num_zeros": True}),
    "megatrons_own_checks_and_machine": Layout(2, CHECKS | {"rerun_state_machine": "validate_results"}),
    "two_interleaved_stages_overlapped": Layout(2, {"pp": 2, "vp": 2, "overlap_p2p_comm": True}),
    "deallocated_pipeline_outputs": Layout(2, {"pp": 2, "deallocate_pipeline_outputs": True}),
    "experts_sharded_overlapped": Layout(2, EXPERTS | SHARDED | OVERLAPPED),
}


def is_the_same_and_nothing_is_found(pool, name, layout, **nanlocator):
    reference = without_nanlocator(pool, layout)
    scenario = {
        "name": f"healthy_{name}",
        "ranks": layout.ranks,
        "steps": STEPS,
        "training": layout.training | {"dropout": 0.1},
        "nanlocator": {"on_bad": "stop", "check_params": True} | nanlocator,
        "timeout": 300.0,
    }
    ranks = pool.run(scenario).require_success()
    assert not differences(ranks, reference)
    for rank in ranks:
        assert rank["verdicts"] == []
        assert len(rank["records"]) == STEPS
        overflows = sum(not step["successful"] for step in rank["records"])
        assert rank["dismissed"] == overflows
        # The scale is found by overflowing: routine, not a finding.
        assert (overflows > 0) == (name == "fp16_dynamic_loss_scale")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_healthy_run_is_bit_identical_and_nothing_is_found(pool, name):
    is_the_same_and_nothing_is_found(pool, name, CONFIGURATIONS[name])


@pytest.mark.parametrize("level", ["grads", "modules", "operators"])
def test_a_healthy_run_is_bit_identical_at_every_level(pool, level):
    layout = LAYOUTS["sequence_parallel_tied_embeddings"]
    is_the_same_and_nothing_is_found(pool, f"level_{level}", layout, level=level)
