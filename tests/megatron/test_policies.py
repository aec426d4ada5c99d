"""Training after a finding: skip, recover, report, a loss scale that is still searched, more findings than
are located; and a NaN that Megatron-Core itself makes."""

from __future__ import annotations

import json
import math
import pathlib

import compare
import pytest
from compare import differences, without_nanlocator
from test_matrix import EXPERTS, LAYOUTS, Layout

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

STOPPED = "nanlocator.NonFiniteGradientError"


def train(pool, name, layout, steps=6, **options):
    return compare.train(pool, f"policy_{name}", layout, steps=steps, **options)


def bad_gradient(layout, iteration, **options):
    """One element of a gradient on the last rank that holds the faulty layer."""
    layer = layout.faulty_layer
    rank = layout.rank(layout.tp - 1, layout.stage_of(layer), layout.dp - 1)
    weight = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
    return {"name": "main_grad_element", "rank": rank, "iteration": iteration, "parameter": weight} | options


def iterations_of(verdicts):
    return [verdict["iteration"] for verdict in verdicts]


def read_json(ranks, name):
    return json.loads((pathlib.Path(ranks[0]["run_dir"]) / name).read_text())


# ---- skip ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("configuration", ["distributed_optimizer_bf16", "tp2_pp2_dp2", "experts_alltoall"])
def test_skip_steps_no_rank_and_goes_on(pool, configuration):
    layout = LAYOUTS[configuration]
    faults = [bad_gradient(layout, 3), bad_gradient(layout, 5, repeats=None, value=math.inf)]
    ranks = train(pool, f"skip_{configuration}", layout, faults=faults, on_bad="skip").require_success()
    for rank in ranks:
        assert iterations_of(rank["verdicts"]) == [3, 5]
        weights = [record["weights_sha256"] for record in rank["records"]]
        for record in rank["records"]:
            assert record["successful"] is (record["iteration"] not in (3, 5))
        assert rank["non_finite_parameters"] == {}
        assert weights[1] == weights[2] and weights[3] == weights[4]
        assert len(set(weights)) == 4  # the other steps moved them
    status = read_json(ranks, "status.json")
    assert (status["state"], status["iteration"]) == ("skipped", 5)


def test_skip_steps_no_rank_where_parameters_are_gathered_later(pool):
    # In this layout the weights at the end of a step are not yet the step's result: a run that ends with a
    # skipped step is compared with one that ends before it.
    layout = LAYOUTS["overlap_param_gather"]
    before = train(pool, "until_2", layout, steps=2).require_success()
    ranks = train(
        pool, "skip_3", layout, steps=3, faults=[bad_gradient(layout, 3)], on_bad="skip"
    ).require_success()
    longer = train(pool, "until_3", layout, steps=3).require_success()
    for rank, expected, other in zip(ranks, before, longer, strict=True):
        for state in ("weights", "optimizer"):
            assert rank["fingerprints"][state] == expected["fingerprints"][state]
            assert rank["fingerprints"][state] != other["fingerprints"][state]


def test_the_ledger_of_a_skipped_step_has_its_microbatches(pool):
    layout = Layout(2, {})
    ranks = train(pool, "ledger", layout, faults=[bad_gradient(layout, 3)], on_bad="skip").require_success()
    for rank in ranks:
        name = "ledger_tp{tp}pp{pp}dp{dp}.jsonl".format(**rank["coordinates"])
        lines = [json.loads(line) for line in (pathlib.Path(rank["run_dir"]) / name).read_text().splitlines()]
        (step,) = (line for line in lines if line["record"] == "ledger")
        assert (step["iteration"], step["on_bad"]) == (3, "skip")
        microbatches = [line for line in lines if line["record"] == "microbatch"]
        assert [microbatch["number"] for microbatch in microbatches] == [0, 1]
        for microbatch in microbatches:
            (tokens,) = (line for line in microbatch["tensors"] if line.startswith("tokens: "))
            assert "int64 [2, 16]" in tokens and "fingerprint" in tokens


def test_more_findings_than_are_located_are_skipped_all_the_same(pool):
    layout, located, bad = Layout(2, {}), 16, 20
    faults = [bad_gradient(layout, 2 + number) for number in range(bad)]
    ranks = train(pool, "many", layout, steps=bad + 3, faults=faults, on_bad="skip").require_success()
    for rank in ranks:
        skipped = [record["iteration"] for record in rank["records"] if not record["successful"]]
        assert skipped == [fault["iteration"] for fault in faults]
        statuses = [verdict["status"] for verdict in rank["verdicts"]]
        assert statuses == ["located"] * located + ["partial"] * (bad - located)
    assert len(list((pathlib.Path(ranks[0]["run_dir"]) / "verdicts").iterdir())) == located


# ---- recover ------------------------------------------------------------------------------------------

RECOVERED = {
    "ddp_fp32": LAYOUTS["ddp_fp32"],
    "sequence_parallel": LAYOUTS["sequence_parallel"],
    "interleaved": Layout(4, {"pp": 2, "vp": 2}),
    "context_parallel_all_gather": LAYOUTS["context_parallel_all_gather"],
    "megatron_fsdp": LAYOUTS["megatron_fsdp"],
    "experts": Layout(2, EXPERTS | {"expert_bias": True}),
    "tp2_pp2_dp2_sharded_overlapped": LAYOUTS["tp2_pp2_dp2_sharded_overlapped"],
}


def one_off_faults(layout):
    faults = [bad_gradient(layout, 2), bad_gradient(layout, 3, value=math.inf)]
    layer = layout.faulty_layer
    rank = layout.rank(layout.tp - 1, layout.stage_of(layer), layout.dp - 1)
    place = {"rank": rank, "layer": layer, "microbatch": 1}
    faults.append({"name": "activation_element", "region": "attention", "iteration": 4} | place)
    if layout.tp > 1:
        reduced = {"name": "tensor_parallel_reduction", "region": "attention", "iteration": 5}
        faults.append(reduced | place)
    if layout.pp > 1:
        last = layout.rank(0, layout.pp - 1, layout.dp - 1)
        faults += [
            {"name": "pipeline_receive", "rank": last, "iteration": 6},
            {"name": "pipeline_receive", "direction": "backward", "iteration": 7},
        ]
    return faults


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("configuration", RECOVERED)
def test_a_recovered_training_is_the_one_that_never_had_the_fault(pool, configuration):
    layout = RECOVERED[configuration]
    faults = one_off_faults(layout)
    steps = faults[-1]["iteration"] + 1
    reference = without_nanlocator(pool, layout, steps)
    ranks = train(
        pool, f"recovered_{configuration}", layout, steps, faults=faults, on_bad="recover"
    ).require_success()
    acted = {fact["iteration"] for rank in ranks for fact in rank["planted"]}
    assert acted == {fault["iteration"] for fault in faults}
    for rank in ranks:
        assert iterations_of(rank["verdicts"]) == sorted(acted)
    assert not differences(ranks, reference)
    assert read_json(ranks, "status.json")["state"] == "recovered"


def test_more_findings_than_are_located_are_recovered_all_the_same(pool):
    layout = Layout(2, {})
    limit = [{"name": "environment", "NANLOCATOR_MAX_INCIDENTS": "2"}]
    faults = [bad_gradient(layout, iteration) for iteration in (2, 3, 4, 6)]
    ranks = train(
        pool, "many_recovered", layout, steps=7, faults=faults, preparations=limit, on_bad="recover"
    ).require_success()
    assert not differences(ranks, without_nanlocator(pool, layout, steps=7))
    for rank in ranks:
        statuses = [verdict["status"] for verdict in rank["verdicts"]]
        assert statuses == ["located", "located", "partial", "partial"]


def test_a_fault_that_repeats_stops_under_recover_before_the_weights_are_touched(pool):
    layout = LAYOUTS["sequence_parallel"]
    faults = [bad_gradient(layout, 2), bad_gradient(layout, 4, repeats=None)]
    ranks = train(pool, "repeats", layout, faults=faults, on_bad="recover").require_results()
    for rank in ranks:
        assert rank["error"]["type"] == STOPPED
        assert rank["iteration"] == 4
        assert [verdict["rerun"]["reproduced"] for verdict in rank["verdicts"]] == [False, True]
        assert rank["fingerprints"]["weights"] == rank["records"][-1]["weights_sha256"]
        assert rank["non_finite_parameters"] == {}
    assert read_json(ranks, "status.json")["state"] == "stopped"


def test_report_goes_on_with_the_bad_step(pool):
    layout = Layout(2, {})
    faults = [bad_gradient(layout, 4, repeats=None)]
    ranks = train(pool, "report", layout, faults=faults, on_bad="report").require_success()
    for rank in ranks:
        assert len(rank["records"]) == 6
        assert rank["non_finite_parameters"]  # the optimizer was allowed to step
        assert iterations_of(rank["verdicts"]) == [4, 5, 6]
    assert read_json(ranks, "status.json")["state"] == "reported"


# ---- the loss scale -----------------------------------------------------------------------------------

FP16 = Layout(2, {"tp": 2, "precision": "fp16"})
NOTED = [{"name": "note_each_forward"}]


def forwards_by_iteration(rank):
    forwards = [fact["iteration"] for fact in rank["planted"] if fact["fault"] == "forward"]
    return [forwards.count(record["iteration"]) for record in rank["records"]]


def test_the_search_for_a_loss_scale_is_no_finding_and_costs_no_repeat(pool):
    layout = Layout(2, FP16.training | {"initial_loss_scale": 2.0**24})
    ranks = train(pool, "search", layout, steps=12, preparations=NOTED, on_bad="stop").require_success()
    for rank in ranks:
        overflows = sum(not record["successful"] for record in rank["records"])
        assert 0 < overflows < 12
        assert rank["dismissed"] == overflows
        assert rank["verdicts"] == []
        assert set(forwards_by_iteration(rank)) == {layout.training["num_microbatches"]}


def finding_of_a_nan_in_forward(pool, name, initial_loss_scale):
    layout = Layout(2, FP16.training | {"initial_loss_scale": initial_loss_scale})
    fault = {"name": "forward_operator", "rank": 1, "layer": 1, "iteration": 2}
    ranks = train(pool, name, layout, faults=[fault], on_bad="stop").require_results()
    for rank in ranks:
        assert rank["error"]["type"] == STOPPED
        assert rank["iteration"] == 2
    return ranks


def test_a_nan_born_in_forward_is_a_finding_at_once_however_large_the_loss_scale(pool):
    ranks = finding_of_a_nan_in_forward(pool, "forward_fp16", 2.0**16)
    (origin,) = ranks[0]["error"]["verdict"]["origins"]
    assert ranks[0]["dismissed"] == 0
    assert origin["candidates"] == [1]
    assert (origin["direction"], origin["microbatch"]) == ("forward", 1)
    assert origin["operator"] == "aten::log"


def test_an_overflow_of_the_loss_scale_beside_a_nan_born_in_forward_is_not_blamed_on_anybody(pool):
    ranks = finding_of_a_nan_in_forward(pool, "overflow_beside", 2.0**24)
    assert ranks[0]["dismissed"] == 1  # the step before
    first, *others = ranks[0]["error"]["verdict"]["origins"]
    assert (first["candidates"], first["operator"]) == ([1], "aten::log")
    assert {origin["cause"] for origin in others} <= {"loss_scale", "operator_overflow"}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_report_says_whether_megatron_leaves_the_update_out(pool, precision):
    layout = Layout(2, {"tp": 2, "precision": precision, "initial_loss_scale": 2.0**10})
    fault = {"name": "forward_operator", "rank": 1, "layer": 1, "iteration": 2}
    ranks = train(pool, f"left_out_{precision}", layout, faults=[fault], on_bad="report").require_success()
    for rank in ranks:
        job = rank["verdicts"][0]["job"]
        is_successful = rank["records"][1]["successful"]
        assert (job["framework_skips_update"], is_successful) == (precision == "fp16", precision == "bf16")


# ---- Megatron's own -----------------------------------------------------------------------------------


def test_the_nan_of_stock_interleaved_pipelines_on_gloo_is_explained(pool):
    """Nothing is planted. With Megatron's default deallocate_pipeline_outputs, sends in flight read freed
    memory, which glibc fills with NaN here: one rank sends finite values, another receives NaN."""
    interleaved = {"pp": 2, "vp": 2, "num_microbatches": 4, "overlap_p2p_comm": True}
    stock = Layout(2, interleaved | {"deallocate_pipeline_outputs": True})
    freed = [{"name": "freed_memory_is_nan"}]
    ranks = train(pool, "stock", stock, faults=freed, on_bad="stop").require_results()
    for rank in ranks:
        assert rank["error"]["type"] == STOPPED
    assert len({rank["iteration"] for rank in ranks}) == 1  # a race: not always the first
    verdict = ranks[0]["error"]["verdict"]
    assert verdict["origins"]
    for origin in verdict["origins"]:
        assert origin["cause"] in ("pipeline_transfer", "race")  # if the re-run has seen it, too
        (sent,) = (fact for fact in origin["facts"] if fact["kind"] == "message_changed")
        assert len(sent["ranks"]) == len(sent["peers"]) == 1, sent
        assert sent["microbatch"] is not None and sent["bad"]["nan"] > 0, sent
    kept = train(pool, "kept", Layout(2, interleaved), faults=freed, on_bad="stop").require_success()
    assert all(rank["verdicts"] == [] for rank in kept)
