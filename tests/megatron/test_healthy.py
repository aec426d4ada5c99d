"""A healthy run with nanlocator is the run without it, bit for bit, and nothing is found.

Every configuration trains 50 steps twice in fresh processes; losses, norms, gradients and weights of every
step, and weights, Adam's state and all random states at the end, must be equal on every rank.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

SMALL = {"hidden": 32, "sequence": 16, "num_microbatches": 2, "dropout": 0.1}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 3000}
SHARDED = {"use_distributed_optimizer": True, "precision": "bf16"}
EXACT = ("loss", "grad_norm", "successful", "zeros", "loss_scale", "gradients_sha256", "weights_sha256")

CONFIGURATIONS = {
    "ddp_fp32": (2, {}),
    "ddp_bf16": (2, {"precision": "bf16"}),
    "ddp_bf16_gradients_in_bf16": (2, {"precision": "bf16", "grad_reduce_in_fp32": False}),
    "overlap_grad_reduce": (2, OVERLAPPED),
    "distributed_optimizer_bf16": (2, SHARDED),
    "distributed_optimizer_bf16_overlapped": (2, SHARDED | OVERLAPPED | {"overlap_param_gather": True}),
    "fp16_dynamic_loss_scale": (2, {"precision": "fp16", "initial_loss_scale": 2.0**24}),
    "megatrons_own_check": (2, {"check_for_nan_in_grad": True, "log_num_zeros": True}),
    "interleaved_pipeline": (2, {"pp": 2, "vp": 2}),
    "sequence_parallel_tied_embeddings": (
        4,
        {"tp": 2, "pp": 2, "sequence_parallel": True, "tied_embeddings": True},
    ),
    "tp2_pp2_dp2": (8, {"tp": 2, "pp": 2}),
    "tp2_pp2_dp2_distributed_overlapped": (
        8,
        {"tp": 2, "pp": 2, "overlap_param_gather": True} | SHARDED | OVERLAPPED,
    ),
}


def train(pool, name, nanlocator):
    ranks, training = CONFIGURATIONS[name]
    scenario = {
        "name": f"healthy_{name}_{'without' if nanlocator is None else 'with'}",
        "ranks": ranks,
        "steps": 50,
        "training": SMALL | training,
        "nanlocator": nanlocator,
        "timeout": 300.0,
    }
    return pool.run(scenario).require_success()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_healthy_run_is_bit_identical_and_nothing_is_found(pool, name):
    without = train(pool, name, None)
    with_it = train(pool, name, {"on_bad": "stop", "check_params": True})
    for reference, ours in zip(without, with_it, strict=True):
        assert ours["verdicts"] == []
        assert len(ours["records"]) == len(reference["records"]) == 50
        for step, expected in zip(ours["records"], reference["records"], strict=True):
            assert [step[field] for field in EXACT] == [expected[field] for field in EXACT]
        assert ours["fingerprints"] == reference["fingerprints"]
        if name == "fp16_dynamic_loss_scale":  # the scale is found by overflowing: routine, not a finding
            skipped = sum(not step["successful"] for step in reference["records"])
            assert skipped > 0
            assert ours["dismissed"] == skipped
