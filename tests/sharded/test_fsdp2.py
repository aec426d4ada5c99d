"""``fully_shard``: each rank's own gradients are scanned before their reduction; results do not change."""

import json
from pathlib import Path

import pytest
import sharded_runs
import torch
from fsdp2_training import VARIANTS, Fsdp2
from ranks import run_kept_ranks, run_ranks
from sharded_runs import healthy, recovered, verdict_of
from sharded_training import corrupt
from watched_steps import as_code_says, verdict_of_closure

import nanlocator

HSDP = ("hsdp", "hsdp_accumulation")


def ranks_of(variant):
    return 4 if variant.startswith("hsdp") else 2


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("variant", (*VARIANTS, *HSDP))
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(variant):
    assert run_kept_ranks(ranks_of(variant), healthy, Fsdp2, variant) == [[]] * ranks_of(variant)


def located(variant, fault, *arguments):
    return sharded_runs.located(ranks_of(variant), Fsdp2, variant, fault, *arguments)


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        "accumulation",
        "two_backwards",
        "hsdp",
        "offload",
        "kept_after_forward",
        "one_group",
        "frozen",
    ],
)
def test_a_gradient_that_goes_bad_once_before_the_reduction_names_its_rank(variant):
    verdict = located(variant, "before")
    (origin,) = verdict["origins"]
    assert (origin["phase"], origin["coordinates"]["rank"]) == ("grad_local", 1)
    assert origin["parameter"] == "head.weight"
    assert origin["tensor"]["shape"] == [3, 8] and origin["tensor"]["first_bad_index"] == [0, 2]
    assert origin["cause"] == "not_reproduced" and verdict["rerun"]["reproduced"] is False


@pytest.mark.parametrize("variant", ["plain", "offload", "kept_after_forward"])
def test_a_shard_that_goes_bad_after_the_reduction_is_said_to_be_clean_before(variant):
    verdict = located(variant, "after")
    (origin,) = verdict["origins"]
    assert (origin["phase"], origin["cause"]) == ("grad_reduced", "collective_result")
    assert origin["candidates"] == [0, 1]
    # Rank 1 keeps the last of three rows.
    assert origin["parameter"] == "head.weight" and origin["tensor"]["first_bad_index"] == [2, 2]
    assert "rank 1" in " ".join(origin["evidence"])


def test_a_shard_that_is_clean_on_its_other_keeper_went_bad_where_it_lies():
    (origin,) = located("hsdp", "after")["origins"]
    assert (origin["coordinates"]["rank"], origin["parameter"]) == (1, "head.weight")
    assert origin["tensor"]["first_bad_index"] == [2, 2]
    assert (origin["cause"], origin["phase"]) == ("collective_result", "grad_reduced")


@pytest.mark.parametrize("variant", ["plain", "offload", "checkpointed"])
def test_a_birth_in_forward_on_one_rank_names_operator_module_and_line(variant):
    verdict = located(variant, "forward")
    (origin,) = verdict["origins"]
    assert (origin["phase"], origin["coordinates"]["rank"]) == ("forward", 1)
    assert (origin["operator"], origin["module"]) == ("aten::sqrt", "scale")
    assert origin["cause"] == "operator_undefined"
    assert origin["code"]["function"] == as_code_says("Scale.forward")
    assert verdict["rerun"]["reproduced"] is True and verdict["rerun"]["not_restored"] == []
    assert any("bit-identical" in line for line in origin["evidence"])


@pytest.mark.parametrize("variant", ["accumulation", "mixed_precision", "kept_after_forward"])
def test_a_birth_in_backward_on_one_rank_names_the_operator_of_forward(variant):
    (origin,) = located(variant, "backward")["origins"]
    assert (origin["phase"], origin["coordinates"]["rank"]) == ("backward", 1)
    assert (origin["forward_operator"], origin["module"]) == ("aten::sqrt", "scale")


@pytest.mark.parametrize("variant", ["plain", "offload"])
def test_a_mean_over_nothing_on_one_rank_is_that_ranks(variant):
    (origin,) = located(variant, "empty_loss")["origins"]
    assert (origin["cause"], origin["coordinates"]["rank"]) == ("empty_loss_mask", 1)


def test_two_ranks_faults_at_once_are_two_origins():
    verdicts = run_kept_ranks(2, two_at_once)
    found = {(o["coordinates"]["rank"], o["parameter"], o["cause"]) for o in verdicts[0]["origins"]}
    assert found == {(0, "middle.weight", "not_reproduced"), (1, "head.weight", "not_reproduced")}


def two_at_once(rank, world_size):
    parameter = ("middle.weight", "head.weight")[rank]
    return verdict_of(Fsdp2(rank, "plain", "before", culprits=(0, 1), parameter=parameter))


@pytest.mark.parametrize("variant", ["plain", "accumulation", "hsdp"])
def test_after_a_transient_fault_training_goes_on_as_if_it_had_not_been(variant):
    ranks = ranks_of(variant)
    assert run_kept_ranks(ranks, recovered, Fsdp2, variant, "before") == [[2]] * ranks


def bad_shard(rank, world_size, variant, parameter, keepers):
    training = Fsdp2(rank, variant)
    if rank in keepers:
        weight = training.net.get_parameter(parameter)
        training.optimizer.register_step_post_hook(lambda *_: corrupt(weight.to_local().detach()))
    return verdict_of(training)


@pytest.mark.parametrize(
    ("variant", "parameter", "keepers", "shape", "bad_index"),
    [
        ("plain", "middle.weight", [1], [8, 7], [4, 2]),  # rank 1 keeps the last four of 8 rows
        ("columns", "head.weight", [1], [3, 8], [0, 6]),  # ... of 8 columns
        ("hsdp", "middle.weight", [1], [8, 7], [4, 2]),
        ("hsdp", "middle.weight", [1, 3], [8, 7], [4, 2]),
    ],
)
def test_a_bad_shard_of_a_weight_is_that_of_the_ranks_that_keep_it(
    variant, parameter, keepers, shape, bad_index
):
    verdict = run_kept_ranks(ranks_of(variant), bad_shard, variant, parameter, keepers)[0]
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", parameter)
    assert origin["candidates"] == keepers
    assert origin["tensor"]["shape"] == shape and origin["tensor"]["first_bad_index"] == bad_index
    evidence = " ".join(origin["evidence"])
    assert "from there, by the all-gather of parameters" in evidence and "every copy" not in evidence


def never_initialised(rank, world_size):
    """Parameters as after ``to_empty``: rank 1 has not called reset_parameters."""
    training = Fsdp2(rank, "plain")
    if rank == 1:
        with torch.no_grad():
            for parameter in training.net.middle.parameters():
                parameter.to_local().fill_(float("nan"))
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.model)
    return verdict_of_closure(optimizer, training.loss)


def test_a_shard_that_was_never_initialised_is_named_with_a_closure_too():
    verdict = run_ranks(2, never_initialised)[0]
    assert {o["cause"] for o in verdict["origins"]} == {"bad_weight"}
    assert all(o["candidates"] == [1] for o in verdict["origins"])


def in_closure(rank, world_size, fault):
    training = Fsdp2(rank, "plain", fault)
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.model)

    def closure():
        optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    with training.planted():
        try:
            for _ in range(2):
                training.number += 1
                optimizer.step(closure)
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict


def test_a_closure_is_executed_again_alike():
    (origin,) = run_ranks(2, in_closure, "before")[0]["origins"]
    assert (origin["coordinates"]["rank"], origin["parameter"]) == (1, "head.weight")
    assert origin["cause"] == "not_reproduced"


def without_closure(rank, world_size):
    training = Fsdp2(rank, "plain")
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.model)
    training.loss().backward()
    optimizer.step()
    return json.loads((Path(optimizer._driver.run_dir) / "run.json").read_text())["not_covered"]


def test_a_step_without_a_closure_says_that_own_gradients_are_not_seen():
    for not_covered in run_ranks(2, without_closure):
        assert (
            "gradients before fully_shard reduces them, because step() is called without a closure"
            in not_covered
        )


def manifest(rank, world_size, variant):
    training = Fsdp2(rank, variant)
    watch = nanlocator.watch(training.model, training.optimizer)
    watch.remove()
    (path,) = Path(watch.run_dir).glob(f"param_manifest_*dp{rank}.json")
    parameters = {p["name"]: p for p in json.loads(path.read_text())["parameters"]}
    return parameters["head.weight"]


def test_the_manifest_says_which_shard_a_rank_keeps_and_who_keeps_the_others():
    one, other = run_kept_ranks(2, manifest, "plain")
    assert (one["shape"], one["shard"]) == ([3, 8], {"begin": 0, "end": 16})
    assert other["shard"] == {"begin": 16, "end": 24}
    assert other["shard_group"] == [0, 1]
    assert other["placements"] == ["dimension 0: Shard(dim=0)"]
    one, other = run_kept_ranks(2, manifest, "columns")
    assert other["shard"] == {"begin": 4, "end": 8, "row": 8}
    hybrid = run_kept_ranks(4, manifest, "hsdp")
    assert [p["shard_group"] for p in hybrid] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert hybrid[3]["placements"] == ["dp_replicate: Replicate()", "dp_shard: Shard(dim=0)"]


def evaluated(rank, world_size):
    """Only rank 1 has a finding, so no other rank gathers shards with it."""
    training = Fsdp2(rank, "plain", "forward")
    watch = nanlocator.watch(training.model, training.optimizer)
    training.number = 2
    with torch.no_grad(), watch.evaluating() as verdicts:
        for _ in range(2):
            training.loss()
    training.number = 0
    training.step()
    watch.remove()
    return [verdict["rerun"]["done"] for verdict in verdicts], watch.verdicts


def test_an_evaluation_that_is_bad_on_one_rank_alone_waits_for_no_other():
    assert run_kept_ranks(2, evaluated) == [([], []), ([False, False], [])]


class Reduced(Fsdp2):
    """Gradients that are finite on each rank, and whose sum over ranks is a float16."""

    def __init__(self, rank, variant, fault=None, culprits=(1,)):
        super().__init__(rank, variant, fault, culprits)
        for module in (self.net.body, self.net.middle, self.net.head, self.model):
            module.set_gradient_divide_factor(1.0)

    def loss(self):
        if self.number != 2:
            return super().loss()
        return 3.7e3 * self.model(torch.zeros(6, 4), torch.zeros(6, 1)).sum()  # at most 61,000


def test_a_sum_that_leaves_the_range_of_a_narrower_dtype_accuses_no_machine():
    verdict = sharded_runs.located(2, Reduced, "float16_sums", None)
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["phase"]) == ("collective_sum", "grad_reduced")
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART" and not verdict["decision"]["hosts"]
    (overflow,) = [fact for fact in origin["facts"] if fact["kind"] == "sum_may_exceed_range"]
    assert overflow["dtype"] == "float16"
