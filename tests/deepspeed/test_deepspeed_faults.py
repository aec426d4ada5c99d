"""Faults planted on rank 1 of two, under each of ZeRO's stages: rank, parameter, module, operator, cause."""

import pytest
from on_cpu import run_ranks

# fault: (cause, phase, ranks, parameter or module, operator, whether it repeats)
EXPECTED = {
    "gradient": ("not_reproduced", "grad_local", [1], "body.weight", "", False),
    "reduced": ("collective_result", "grad_reduced", [0, 1], "body.weight", "", False),
    "forward": ("operator_undefined", "forward", [1], "divide", "aten::div.Tensor", True),
    "backward": ("operator_undefined", "backward", [1], "root", "aten::div.Tensor", True),
    "loss": ("empty_loss_mask", "loss", [1], "", "aten::div.Tensor", True),
    "weight": ("bad_weight", "forward", [1], "body.weight", "", True),
    "state": ("bad_weight", "forward", [1], "body.weight", "", True),
}
LINES = {"forward": "Divide.forward", "backward": "Root.forward", "loss": "Training.loss"}


def all_faults(rank, world_size, variant, faults):
    from engine_training import verdict_of

    return {fault: verdict_of(rank, variant, fault) for fault in faults}


def summary(verdict):
    (origin,) = verdict["origins"]
    place = origin["coordinates"]
    ranks = [place["rank"]] if place else origin["candidates"]
    is_of_parameter = origin["cause"] in ("not_reproduced", "collective_result", "bad_weight")
    name = origin["parameter"] if is_of_parameter else origin["module"]
    op = "" if origin["cause"] == "bad_weight" else origin["operator"] or ""
    return origin["cause"], origin["phase"], ranks, name or "", op, verdict["rerun"]["reproduced"]


@pytest.mark.parametrize("variant", ["zero1_bf16", "zero1_fp32_sums", "zero2_bf16", "zero3_partitioned"])
def test_each_fault_names_its_rank_and_its_cause(variant):
    faults = list(EXPECTED)
    results = run_ranks(2, all_faults, variant, faults)
    assert results[0] == results[1]
    verdicts = results[0]
    assert {fault: summary(verdicts[fault]) for fault in faults} == EXPECTED
    for fault, function in LINES.items():
        assert verdicts[fault]["origins"][0]["code"]["function"] == function
    assert all(verdict["iteration"] == (3 if fault == "state" else 2) for fault, verdict in verdicts.items())
