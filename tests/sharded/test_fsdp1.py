"""``FullyShardedDataParallel``: parameters by their own names, gradients before their reduction."""

import pytest
import sharded_runs
import torch
from fsdp1_training import VARIANTS, Fsdp1
from ranks import run_kept_ranks
from sharded_runs import healthy, recovered, verdict_of
from sharded_training import corrupt


def ranks_of(variant):
    return 4 if variant == "hybrid" else 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(variant):
    assert run_kept_ranks(ranks_of(variant), healthy, Fsdp1, variant) == [[]] * ranks_of(variant)


def located(variant, fault):
    return sharded_runs.located(ranks_of(variant), Fsdp1, variant, fault)


@pytest.mark.parametrize("variant", ["plain", "flat", "no_shard", "hybrid"])
def test_a_gradient_that_goes_bad_once_before_the_reduction_names_its_rank(variant):
    verdict = located(variant, "before")
    (origin,) = verdict["origins"]
    assert (origin["phase"], origin["coordinates"]["rank"]) == ("grad_local", 1)
    assert origin["parameter"] == "head.weight"
    assert origin["tensor"]["shape"] == [3, 8] and origin["tensor"]["first_bad_index"] == [2, 1]
    assert origin["cause"] == "not_reproduced" and verdict["rerun"]["reproduced"] is False


@pytest.mark.parametrize("variant", ["plain", "flat"])
def test_a_shard_that_goes_bad_after_the_reduction_is_counted_in_the_original_parameter(variant):
    (origin,) = located(variant, "after")["origins"]
    assert (origin["phase"], origin["cause"]) == ("grad_reduced", "collective_result")
    # 24 elements, and 3 of the bias (with padding to a multiple of 4 between them): rank 1 keeps from 14 on.
    assert origin["parameter"] == "head.weight" and origin["tensor"]["shape"] == [3, 8]
    assert origin["tensor"]["first_bad"] in (15, 17)
    assert origin["candidates"] == [0, 1]
    (owner,) = (fact for fact in origin["facts"] if fact["kind"] == "clean_before_reduction")
    assert owner["ranks"] == [1]


def test_a_birth_in_forward_on_one_rank_names_operator_and_module():
    (origin,) = located("plain", "forward")["origins"]
    assert (origin["coordinates"]["rank"], origin["phase"]) == (1, "forward")
    assert (origin["operator"], origin["module"]) == ("aten::sqrt", "scale")


def log_in_a_wrapped_module(rank, world_size):
    training = Fsdp1(rank, "plain")
    linear = training.net.middle.module
    forward = linear.forward
    linear.forward = lambda x: torch.log(-forward(x).abs() - 1)
    return verdict_of(training)


def test_a_module_that_shares_its_name_with_its_wrapper_is_in_the_bundle():
    verdict = run_kept_ranks(2, log_in_a_wrapped_module)[0]
    assert not [note for note in verdict["notes"] if "could not be made" in note]
    for origin in verdict["origins"]:
        assert (origin["operator"], origin["module"]) == ("aten::log", "middle")
        assert origin["bundle"]


def test_a_mean_over_nothing_on_one_rank_is_that_ranks():
    (origin,) = located("plain", "empty_loss")["origins"]
    assert (origin["cause"], origin["coordinates"]["rank"]) == ("empty_loss_mask", 1)


def bad_shard(rank, world_size, variant):
    training = Fsdp1(rank, variant)
    if rank == 1:
        weights = training.net.middle._handle.flat_param
        training.optimizer.register_step_post_hook(lambda *_: corrupt(weights._local_shard, 2))
    return verdict_of(training)


@pytest.mark.parametrize("variant", ["plain", "flat"])
def test_a_bad_shard_of_a_weight_is_that_of_the_rank_that_keeps_it(variant):
    (origin,) = run_kept_ranks(2, bad_shard, variant)[0]["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "middle.weight")
    assert origin["candidates"] == [1] and origin["tensor"]["shape"] == [8, 7]
    assert origin["tensor"]["first_bad"] == 34  # of 56 + 8 elements, rank 1 keeps those from 32 on


def test_after_a_transient_fault_training_goes_on_as_if_it_had_not_been():
    assert run_kept_ranks(2, recovered, Fsdp1, "plain", "before") == [[2]] * 2
