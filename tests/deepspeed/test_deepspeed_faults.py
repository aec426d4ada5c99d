"""Faults planted on rank 1 of two, under each of ZeRO's stages: rank, parameter, module, operator, cause."""

import pytest
from on_cpu import run_kept_ranks

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
# The sum was scanned on arrival, so it was overwritten afterwards, on this rank alone.
SEEN_ON_ARRIVAL = {"reduced": ("not_reproduced", "grad_norm", [0], "body.weight", "", False)}
LINES = {"forward": "Divide.forward", "backward": "Root.forward", "loss": "Training.loss"}


def all_faults(rank, world_size, variant, faults, options):
    from engine_training import verdict_of

    return {fault: verdict_of(rank, variant, fault, **options) for fault in faults}


def summary(verdict):
    (origin,) = verdict["origins"]
    place = origin["coordinates"]
    ranks = [place["rank"]] if place else origin["candidates"]
    is_of_parameter = origin["cause"] in ("not_reproduced", "collective_result", "bad_weight")
    name = origin["parameter"] if is_of_parameter else origin["module"]
    op = "" if origin["cause"] == "bad_weight" else origin["operator"] or ""
    return origin["cause"], origin["phase"], ranks, name or "", op, verdict["rerun"]["reproduced"]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("variant", "level"),
    [
        ("zero1_fp32_sums", "grads"),
        ("zero2_bf16", "grads"),
        ("zero3_partitioned", "boundaries"),
        # The same optimizer as in stage 2, and the other level.
        pytest.param("zero1_bf16", "grads", marks=pytest.mark.exhaustive),
        pytest.param("zero2_bf16", "boundaries", marks=pytest.mark.exhaustive),
        pytest.param("zero3_partitioned", "grads", marks=pytest.mark.exhaustive),
    ],
)
def test_each_fault_names_its_rank_and_its_cause(variant, level):
    faults = list(EXPECTED)
    results = run_kept_ranks(2, all_faults, variant, faults, {"level": level})
    assert results[0] == results[1]
    verdicts = results[0]
    expected = EXPECTED | (SEEN_ON_ARRIVAL if level == "boundaries" else {})
    assert {fault: summary(verdicts[fault]) for fault in faults} == expected
    for fault, function in LINES.items():
        assert verdicts[fault]["origins"][0]["code"]["function"] == function
    assert all(verdict["iteration"] == (3 if fault == "state" else 2) for fault, verdict in verdicts.items())


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "variant",
    [
        "zero1_overlap",
        "zero2_small_buckets",
        "zero2_not_contiguous",
        "zero2_offload",
        "zero2_accumulation",
        "zero3_accumulation",
        "zero3_offload",
    ],
)
def test_faults_are_named_alike_however_gradients_are_kept(variant):
    faults = ["gradient", "forward", "loss"]
    if not variant.startswith("zero3"):  # it keeps small weights whole, beside their shards
        faults.append("weight")
    results = run_kept_ranks(2, all_faults, variant, faults, {})
    assert results[0] == results[1]
    assert {fault: summary(results[0][fault]) for fault in faults} == {
        fault: EXPECTED[fault] for fault in faults
    }


def overwritten(rank, world_size):
    from engine_training import verdict_of

    return verdict_of(rank, "zero2_bf16", "overwritten")


def test_a_bucket_that_is_overwritten_while_it_is_reduced_is_a_race_at_that_line():
    (origin,) = run_kept_ranks(2, overwritten)[0]["origins"]
    assert (origin["cause"], origin["phase"], origin["candidates"]) == ("race", "grad_reduced", [0, 1])
    assert origin["code"]["text"].endswith("# here")
    (fact,) = [each for each in origin["facts"] if each["kind"] == "wrote_during_transfer"]
    assert (fact["operator"], fact["transfer"]) == ("aten::fill_.Scalar", "c10d::allreduce_")


def beside_garbage(rank, world_size, variant, fault):
    """Memory that ZeRO-3 allocates and does not write, in buckets and weights, is NaN."""
    import ctypes
    import types
    from unittest import mock

    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero import partition_parameters
    from engine_training import GATHERS, torch, verdict_of, verdict_of_damage

    def empty(*args, **kwargs):
        mallopt = ctypes.CDLL(None).mallopt
        perturb = -6  # M_PERTURB of <malloc.h>
        mallopt(perturb, 0x80)  # 0x7f7f, in float16 NaN
        padding = torch.empty(*args, **kwargs)
        mallopt(perturb, 0)
        return padding

    with_garbage = types.SimpleNamespace(**vars(torch) | {"empty": empty})
    with (
        mock.patch.object(coalesced_collectives, "torch", with_garbage),
        mock.patch.object(partition_parameters, "torch", with_garbage),
    ):
        if fault == "gather once":
            return verdict_of_damage(rank, variant, GATHERS)
        return verdict_of(rank, variant, fault)


@pytest.mark.parametrize(
    ("variant", "fault", "cause"),
    [
        ("zero3_fp16", "forward", "operator_undefined"),
        ("zero3_fp16_partitioned", "gather", "collective_result"),
        ("zero3_fp16_partitioned", "gather once", "collective_result"),
    ],
)
def test_what_zero_3_leaves_in_padding_is_no_origin(variant, fault, cause):
    """It sends memory that is never written or read: in buckets (coalesced_collectives.py,
    reduce_scatter_coalesced) and in weights (partition_parameters.py, _partition_param)."""
    for verdict in run_kept_ranks(2, beside_garbage, variant, fault):
        found = [(origin["cause"], origin["candidates"]) for origin in verdict["origins"]]
        assert found == [(cause, [1])]


def two_at_once(rank, world_size, variants):
    from engine_training import two_faults

    return {variant: two_faults(rank, variant) for variant in variants}


def test_gradients_of_two_ranks_that_go_bad_at_once_are_two_origins():
    variants = ["zero0", "zero1", "zero2", "zero3"]
    for verdicts in run_kept_ranks(2, two_at_once, variants):
        for variant in variants:
            origins = verdicts[variant]["origins"]
            found = {(origin["coordinates"]["rank"], origin["parameter"]) for origin in origins}
            assert found == {(0, "head.weight"), (1, "body.weight")}, variant


def in_collectives(rank, world_size, cases):
    from engine_training import verdict_of

    return {case: verdict_of(rank, *case) for case in cases}


def test_what_a_rank_gets_out_of_collectives_that_damage_it_is_no_ranks_own():
    """The damage is in one rank's own copy if all ranks have one, in the sum if only its owner has it, and in
    gathered weights: those of a rank that keeps them, or at each gather of ZeRO-3."""
    expected = {
        ("zero0", "reduction"): ("collective_result", "grad_reduced", [1]),
        ("zero1_fp32_sums", "reduction"): ("collective_result", "grad_reduced", [0, 1]),
        ("zero2_bf16", "reduction"): ("collective_result", "grad_reduced", [0, 1]),
        ("zero3_partitioned", "reduction"): ("collective_result", "grad_reduced", [0, 1]),
        ("zero1_bf16", "gather"): ("bad_weight", "forward", [1]),
        ("zero2_bf16", "gather"): ("bad_weight", "forward", [1]),
        ("zero3_partitioned", "gather"): ("collective_result", "forward", [1]),
    }
    for verdicts in run_kept_ranks(2, in_collectives, list(expected)):
        for case, (cause, phase, candidates) in expected.items():
            (origin,) = verdicts[case]["origins"]
            assert (origin["cause"], origin["phase"], origin["candidates"]) == (cause, phase, candidates), (
                case
            )
            if phase == "grad_reduced":
                assert "clean_before_reduction" in [fact["kind"] for fact in origin["facts"]]
            elif cause == "bad_weight":  # left by the update's gather
                assert verdicts[case]["iteration"] == 3
                assert "copies_clean" in [fact["kind"] for fact in origin["facts"]]
            else:
                came = origin["facts"][0]
                assert (came["group"], came["peers"]) == ("world", [0, 1])


def damaged_once(rank, world_size, cases):
    from engine_training import GATHERS, REDUCTIONS, verdict_of_damage

    collectives = {"reduction": REDUCTIONS, "gather": GATHERS}
    return {(variant, kind): verdict_of_damage(rank, variant, collectives[kind]) for variant, kind in cases}


def test_what_comes_out_of_a_bucket_or_a_gather_wrongly_once_is_that_collectives():
    """At level boundaries; every rank has the sum of ZeRO-2's bucket, one rank ZeRO-3's."""
    expected = {
        ("zero0", "reduction"): ("c10d::allreduce_", "grad_reduced", [1]),
        ("zero2_bf16", "reduction"): ("c10d::allreduce_", "grad_reduced", [1]),
        ("zero3_partitioned", "reduction"): ("c10d::_reduce_scatter_base_", "grad_reduced", [0, 1]),
        ("zero3_partitioned", "gather"): ("c10d::_allgather_base_", "forward", [1]),
    }
    for verdicts in run_kept_ranks(2, damaged_once, list(expected)):
        for case, (operator, phase, candidates) in expected.items():
            (origin,) = verdicts[case]["origins"]
            assert (origin["cause"], origin["operator"]) == ("collective_result", operator), case
            assert (origin["phase"], origin["candidates"]) == (phase, candidates), case
            fact = origin["facts"][0]
            assert (fact["kind"], fact["peers"]) == ("collective_changed", [0, 1])
            assert bool(origin["parameter"]) == (phase == "grad_reduced")
            assert verdicts[case]["rerun"]["reproduced"] is False
