"""Planted faults on TP2 x PP2 x DP2 beside those of test_matrix.py: single places, several at once, and
conclusions from gradients alone.

The truth is the fault's own record of its action (`planted`), never the verdict. Megatron's ranks:
    dp0: 0 1 (stage 0, tp 0 and 1), 4 5 (stage 1)        dp1: 2 3 (stage 0), 6 7 (stage 1)
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib

import pytest
from launch import run_torchrun

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

GRID = {"tp": 2, "pp": 2, "hidden": 32, "sequence": 16, "num_microbatches": 2}
REPLICA = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
SHARDED_OVERLAPPED = {
    "precision": "bf16",
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 3000,
}
CONFIGURATIONS = {
    "ddp_fp32": {},
    "overlapped": {"overlap_grad_reduce": True, "bucket_size": 3000},
    "sharded": {"precision": "bf16", "use_distributed_optimizer": True},
    "sharded_overlapped": SHARDED_OVERLAPPED,
}
GRADIENTS_ALONE = {"level": "grads", "rerun": False}
STOPPED = "nanlocator.NonFiniteGradientError"
_numbers = itertools.count()


def run(pool, faults, *, steps=3, training=None, undo_faults=False, **nanlocator):
    return pool.run(
        {
            "name": f"fault_{next(_numbers)}_{faults[0]['name']}",
            "ranks": 8,
            "steps": steps,
            "training": GRID | (training or {}),
            "nanlocator": {"on_bad": "stop"} | nanlocator,
            "faults": faults,
            "undo_faults": undo_faults,
            "timeout": 300.0,
        }
    )


def stopped(pool, faults, **options):
    """Runs into the fault under policy stop. Checks that all ranks raised the same verdict in the planted
    step; returns it and the ranks' results."""
    outcome = run(pool, faults, **options)
    ranks = outcome.require_results()
    iteration = faults[0]["iteration"]
    verdict = ranks[0]["error"]["verdict"] if ranks[0]["error"] else None
    for rank in ranks:
        assert rank["error"] is not None, f"rank {rank['rank']} was not stopped\n{outcome.logs()}"
        assert rank["error"]["type"] == STOPPED, f"{rank['error']}\n{outcome.logs()}"
        assert rank["error"]["verdict"] == verdict
        assert rank["iteration"] == iteration
        assert len(rank["records"]) == iteration - 1
    assert verdict["iteration"] == iteration
    on_disk = json.loads((pathlib.Path(ranks[0]["run_dir"]) / "verdict.json").read_text())
    assert on_disk == verdict
    return verdict, ranks


def weights_are_untouched(ranks):
    return all(
        rank["fingerprints"]["weights"] == rank["records"][-1]["weights_sha256"]
        and rank["non_finite_parameters"] == {}
        for rank in ranks
    )


def the_origin(verdict):
    assert len(verdict["origins"]) == 1, verdict["origins"]
    return verdict["origins"][0]


def names_exactly(origin, fact):
    """Rank, phase, parameter and element of the origin are the planted ones."""
    assert origin["candidates"] == [fact["rank"]]
    assert origin["coordinates"]["rank"] == fact["rank"]
    for axis in ("tp", "pp", "dp"):
        assert origin["coordinates"][axis]["rank"] == fact[axis]
    names_the_element(origin, fact)


def names_the_element(origin, fact):
    assert origin["phase"] == fact["phase"]
    assert origin["parameter"] == fact["parameter"]
    assert origin["tensor"]["shape"] == fact["shape"]
    assert origin["tensor"]["first_bad"] == fact["element"]
    counts = {key: origin["tensor"][key] for key in ("nan", "pos_inf", "neg_inf")}
    expected = {"nan": "nan", "inf": "pos_inf", "-inf": "neg_inf"}[fact["value"]]
    assert counts == {"nan": 0, "pos_inf": 0, "neg_inf": 0} | {expected: 1}


def facts_of(origin, kind):
    return [fact for fact in origin["facts"] if fact["kind"] == kind]


def test_a_collective_that_gave_one_rank_another_sum_is_suspected_before_the_operator_it_reached(pool):
    # log(0) in Megatron's own vocabulary-parallel cross-entropy, in every pass; the operator itself is
    # correct.
    fault = {"name": "vocabulary_parallel_sum", "rank": 5, "iteration": 2}
    verdict, ranks = stopped(pool, [fault])
    assert [fact["pass_number"] for fact in ranks[5]["planted"]] == [1, 2, 3, 4]
    origin = the_origin(verdict)
    assert (origin["candidates"], origin["operator"], origin["microbatch"]) == ([5], "aten::log", 1)
    (different,) = facts_of(origin, "members_got_other_values")
    assert (different["ranks"], different["peers"], different["group"]) == ([5], [4], "tp")
    assert (different["operator"], different["count"], different["of"]) == ("c10d::allreduce_", 1, 0)
    assert (origin["action_kind"], origin["owner"]) == ("check_collective_code", "framework")
    assert origin["cause"] == "collective_result"


def test_an_operators_own_fault_is_not_laid_to_collectives(pool):
    fault = {
        "name": "forward_operator",
        "rank": 5,
        "iteration": 2,
        "kind": "log",
        "layer": 3,
        "repeats": None,
    }
    verdict, _ = stopped(pool, [fault])
    origin = the_origin(verdict)
    assert origin["candidates"] == [5]
    assert not facts_of(origin, "members_got_other_values")
    same = {fact["group"]: fact for fact in facts_of(origin, "members_got_the_same")}
    assert (same["tp"]["ranks"], same["tp"]["peers"]) == ([5], [4])
    assert same["tp"]["count"] > 0
    assert origin["owner"] == "model_author"


def test_the_clean_copies_of_a_bad_weight_say_what_they_hold_there(pool):
    fault = {"name": "bad_weight", "rank": 3, "iteration": 2}
    verdict, ranks = stopped(pool, [fault])
    origin = the_origin(verdict)
    (copies,) = facts_of(origin, "copies_value")
    assert (copies["ranks"], copies["peers"]) == ([3], [1])
    (value,) = copies["values"]
    assert value["name"] == "1" and 0 < abs(value["value"]) < 1
    assert not ranks[1]["planted"]


def test_a_fault_in_the_first_step_is_named_as_well(pool):
    # The first iteration launches its collectives elsewhere (finish_grad_sync instead of the hooks).
    fault = {"name": "main_grad_element", "rank": 3, "iteration": 1}
    verdict, ranks = stopped(pool, [fault], training=CONFIGURATIONS["overlapped"])
    names_exactly(the_origin(verdict), ranks[3]["planted"][0])
    assert all(rank["non_finite_parameters"] == {} for rank in ranks)


@pytest.mark.parametrize(
    ("configuration", "rank"),
    [  # each stage, tensor-parallel rank and replica
        ("ddp_fp32", 7),
        ("sharded_overlapped", 3),
        pytest.param("ddp_fp32", 0, marks=pytest.mark.exhaustive),
        pytest.param("sharded_overlapped", 6, marks=pytest.mark.exhaustive),
    ],
)
def test_every_parameter_is_named_when_its_gradient_goes_bad(pool, configuration, rank):
    """One run: each iteration puts a bad element into another parameter of `rank`; the step is undone."""
    parameters = known_parameters(pool)[rank]
    values = itertools.cycle([math.nan, math.inf, -math.inf])
    faults = [
        {
            "name": "main_grad_element",
            "rank": rank,
            "iteration": number + 2,
            "parameter": name,
            "element": (7 * number) % math.prod(shape),
            "value": next(values),
        }
        for number, (name, shape) in enumerate(parameters.items())
    ]
    assert len(faults) <= 16  # limit of findings gathered in a run
    outcome = run(
        pool,
        faults,
        steps=len(faults) + 1,
        training=LAYER_PER_STAGE | CONFIGURATIONS[configuration],
        undo_faults=True,
        on_bad="report",
        **GRADIENTS_ALONE,
    )
    ranks = outcome.require_success()
    assert len(ranks[rank]["planted"]) == len(faults)
    assert len(ranks[rank]["verdicts"]) == len(faults)
    for fact, verdict in zip(ranks[rank]["planted"], ranks[0]["verdicts"], strict=True):
        assert verdict["iteration"] == fact["iteration"]
        names_exactly(the_origin(verdict), fact)


LAYER_PER_STAGE = {"layers": 2}
_parameters: list[dict] = []


def known_parameters(pool):
    """For each rank, from a run without nanlocator: {name: shape}."""
    if not _parameters:
        scenario = {"name": "parameters", "ranks": 8, "steps": 1, "training": GRID | LAYER_PER_STAGE}
        _parameters.extend(rank["parameters"] for rank in pool.run(scenario).require_success())
    return _parameters


def test_gradients_alone_narrow_a_nan_born_in_forward_to_its_replica(pool):
    # It has crossed the tensor-parallel all-reduce and the pipeline before any gradient exists: gradients
    # alone can name the replica, and must not claim to know the rank.
    fault = {"name": "forward_operator", "rank": 6, "iteration": 2, "layer": 2}
    verdict, ranks = stopped(pool, [fault], **GRADIENTS_ALONE)
    assert ranks[6]["planted"]
    assert not verdict["rerun"]["done"]
    for origin in verdict["origins"]:
        assert set(origin["candidates"]) <= set(REPLICA[1])
    assert 6 in {candidate for origin in verdict["origins"] for candidate in origin["candidates"]}
    assert weights_are_untouched(ranks)


def test_gradients_alone_name_the_rank_of_a_nan_born_in_backward_inside_a_tensor_parallel_region(pool):
    # After the all-reduce of the input's gradient both tensor-parallel ranks are bad; before it, in the
    # gradient of linear_fc1, only the faulty one. Layer 3 and the head have finite gradients.
    fault = {"name": "backward_operator", "rank": 7, "iteration": 2, "layer": 2}
    verdict, ranks = stopped(pool, [fault], **GRADIENTS_ALONE)
    origin = the_origin(verdict)
    assert ranks[7]["planted"][0]["operator"] == "aten::sqrt"
    assert origin["candidates"] == [7]
    assert origin["parameter"] in {f"decoder.layers.2.mlp.linear_fc1.{kind}" for kind in ("weight", "bias")}
    assert weights_are_untouched(ranks)


def test_a_bad_weight_is_named_before_it_is_used_when_parameters_are_checked(pool):
    fault = {
        "name": "bad_weight",
        "rank": 5,
        "iteration": 2,
        "value": math.inf,
        "parameter": "decoder.layers.3.mlp.linear_fc2.weight",
    }
    training = CONFIGURATIONS["sharded"]
    verdict, ranks = stopped(pool, [fault], training=training, check_params=True, **GRADIENTS_ALONE)
    origin = the_origin(verdict)
    (fact,) = (fact for rank in ranks for fact in rank["planted"])
    names_exactly(origin, fact)
    assert origin["cause"] == "bad_weight"
    kinds = {fact["kind"] for fact in origin["facts"]}
    assert {"finite_after_update", "optimizer_state_finite"} <= kinds


def test_an_update_that_breaks_a_weight_from_clean_gradients_is_named(pool):
    fault = {
        "name": "optimizer_update",
        "rank": 4,
        "iteration": 2,
        "parameter": "decoder.layers.2.mlp.linear_fc2.weight",
    }
    outcome = run(pool, [fault], check_params=True)
    ranks = outcome.require_results()
    assert {rank["error"]["type"] for rank in ranks} == {STOPPED}, outcome.logs()
    origin = the_origin(ranks[0]["error"]["verdict"])
    names_exactly(origin, ranks[4]["planted"][0] | {"value": "nan"})
    assert origin["cause"] == "optimizer_update"
    assert {rank["iteration"] for rank in ranks} == {2}


def test_gradients_that_are_finite_but_too_large_for_the_norm_stop_the_run(pool):
    rank = 5
    fault = {"name": "large_gradients", "rank": rank, "iteration": 2}
    verdict, ranks = stopped(pool, [fault])
    assert max(fact["absmax"] for fact in ranks[rank]["planted"]) < 3e38
    for origin in verdict["origins"]:
        assert origin["phase"] == "grad_norm"
        assert origin["tensor"] is None or origin["tensor"]["nan"] == 0
    assert weights_are_untouched(ranks)


def test_two_operators_on_two_ranks_in_one_step_are_two_origins(pool):
    first = {"name": "forward_operator", "rank": 1, "iteration": 2, "layer": 1, "region": "attention"}
    second = {"name": "backward_operator", "rank": 7, "iteration": 2, "layer": 2, "microbatch": 0}
    verdict, ranks = stopped(pool, [first, second])
    assert len(verdict["origins"]) == 2
    origins = {origin["coordinates"]["rank"]: origin for origin in verdict["origins"]}
    for rank, operator in ((1, "aten::log"), (7, "aten::sqrt")):
        fact, origin = ranks[rank]["planted"][0], origins[rank]
        assert fact["operator"] == operator
        assert operator in " ".join([origin["operator"], *origin["evidence"]])
        assert origin["direction"] == fact["phase"]
        assert origin["microbatch"] == fact["microbatch"]
        assert origin["module"].startswith(fact["module"])
    assert weights_are_untouched(ranks)


@pytest.mark.parametrize("name", ["activation_element", "forward_operator"])
def test_a_nan_that_only_the_recomputed_forward_has_is_not_blamed_on_the_first_one(pool, name):
    fault = {"name": name, "rank": 1, "iteration": 2, "layer": 1, "only_in": "recompute"}
    training = {"recompute": "full"}
    verdict, ranks = stopped(pool, [fault], training=training)
    fact, origin = ranks[1]["planted"][0], the_origin(verdict)
    assert fact["is_recomputed"]
    assert origin["candidates"] == [1]
    assert origin["microbatch"] == fact["microbatch"]
    if name == "forward_operator":
        assert origin["operator"] == fact["operator"]
        assert origin["module"].startswith(fact["module"])
        assert origin["cause"] == "recompute_mismatch"


def test_opposite_infinities_on_two_replicas_are_both_named(pool):
    # Their sum is a NaN, but neither rank had one.
    common = {
        "name": "main_grad_element",
        "iteration": 2,
        "parameter": "decoder.layers.0.mlp.linear_fc1.weight",
    }
    verdict, ranks = stopped(
        pool, [common | {"rank": 0, "value": math.inf}, common | {"rank": 2, "value": -math.inf}]
    )
    origins = {
        origin["coordinates"]["rank"]: origin for origin in verdict["origins"] if origin["coordinates"]
    }
    names_exactly(origins[0], ranks[0]["planted"][0])
    names_exactly(origins[2], ranks[2]["planted"][0])


def test_under_torchrun_all_ranks_stop_and_end_by_themselves(tmp_path):
    # Real interpreters with their own start and finalisation, unlike the forked ranks of `pool`.
    arguments = (
        "--hidden 32 --sequence 16 --steps 3 --nanlocator --fault main_grad_element rank=1 iteration=2"
    )
    outcome = run_torchrun(2, arguments.split(), tmp_path)
    ranks = outcome.require_results()
    assert outcome.exit_codes == [0]
    for rank in ranks:
        assert rank["error"]["type"] == STOPPED, outcome.logs()
    names_exactly(the_origin(ranks[0]["error"]["verdict"]), ranks[1]["planted"][0])
