"""torch.distributed.pipelining: a schedule's step is executed again by all stages; nothing changes."""

import pytest
import torch
from pipelined_training import IN_PARALLEL, VARIANTS, Pipelined
from ranks import run_ranks

import nanlocator


def ranks_of(variant):
    return 4 if variant in IN_PARALLEL else 2


def healthy(rank, world_size, variant):
    alone = Pipelined(rank, variant)
    losses = [alone.step() for _ in range(3)]
    expected = alone.state()
    training = Pipelined(rank, variant)
    watch = nanlocator.watch(training.model, training.optimizer, rerun="always")
    assert [training.step() for _ in range(3)] == losses
    watch.remove()
    assert all(torch.equal(a, b) for a, b in zip(expected, training.state(), strict=True))
    return watch.verdicts


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(variant):
    assert run_ranks(ranks_of(variant), healthy, variant) == [[]] * ranks_of(variant)


def watched(rank, world_size, variant, fault, culprits):
    training = Pipelined(rank, variant, fault, culprits)
    watch = nanlocator.watch(training.model, training.optimizer)
    try:
        for _ in range(3):
            training.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    return watch.verdicts


def located(variant, fault, culprits=(1,)):
    verdicts = run_ranks(ranks_of(variant), watched, variant, fault, culprits)
    assert all(verdict == verdicts[0] for verdict in verdicts), verdicts
    assert verdicts[0]["iteration"] == 2
    return verdicts[0]


def of_only_origin(verdict, *fields):
    (origin,) = verdict["origins"]
    return tuple(origin["coordinates"][f] if f in ("rank", "pp", "dp") else origin[f] for f in fields)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("variant", ["gpipe", "1f1b", "interleaved", "zero_bubble", "v"])
def test_a_birth_in_forward_names_stage_microbatch_module_and_line(variant, culprit):
    verdict = located(variant, "forward", (culprit,))
    place = of_only_origin(verdict, "phase", "rank", "microbatch", "operator", "cause")
    assert place == ("forward", culprit, 2, "aten::sqrt", "operator_undefined")
    (origin,) = verdict["origins"]
    assert origin["module"].endswith("scale") and origin["code"]["function"] == "Scale.forward"
    assert origin["coordinates"]["pp"] == {"rank": culprit, "size": 2}
    assert any("bit-identical" in line for line in origin["evidence"])


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("variant", ["gpipe", "1f1b", "interleaved", "zero_bubble", "v"])
def test_a_birth_in_backward_names_the_operator_of_forward(variant, culprit):
    verdict = located(variant, "backward", (culprit,))
    place = of_only_origin(verdict, "phase", "rank", "microbatch", "forward_operator")
    assert place == ("backward", culprit, 2, "aten::sqrt")


@pytest.mark.parametrize("variant", ["1f1b", "v"])
def test_a_mean_over_nothing_names_the_microbatch_of_the_last_stage(variant):
    last = 0 if variant == "v" else 1
    verdict = located(variant, "empty_loss", (last,))
    assert of_only_origin(verdict, "cause", "rank", "microbatch") == ("empty_loss_mask", last, 2)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_weight_that_is_bad_before_the_step_is_its_stages(culprit):
    verdict = located("1f1b", "weight", (culprit,))
    place = of_only_origin(verdict, "cause", "rank", "parameter")
    assert place == ("bad_weight", culprit, f"layers.{2 * culprit}.linear.weight")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_gradient_that_goes_bad_once_is_its_stages(culprit):
    verdict = located("1f1b", "memory", (culprit,))
    place = of_only_origin(verdict, "cause", "rank", "parameter")
    assert place == ("not_reproduced", culprit, f"layers.{2 * culprit}.linear.weight")


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("variant", ["1f1b", "interleaved", "zero_bubble"])
def test_a_message_that_changes_on_its_way_names_both_ends(variant, culprit):
    verdict = located(variant, "message", (culprit,))
    assert of_only_origin(verdict, "cause", "rank") == ("pipeline_transfer", culprit)
    (origin,) = verdict["origins"]
    sender = f"rank {1 - culprit}"
    assert any(f"{sender} sent finite" in line for line in origin["evidence"])


@pytest.mark.parametrize("variant", IN_PARALLEL)
@pytest.mark.parametrize("culprit", [1, 2])
def test_beside_data_parallelism_both_places_are_named(variant, culprit):
    verdict = located(variant, "forward", (culprit,))
    place = of_only_origin(verdict, "phase", "rank", "operator")
    assert place == ("forward", culprit, "aten::sqrt")
    coordinates = verdict["origins"][0]["coordinates"]
    assert (coordinates["dp"]["rank"], coordinates["pp"]["rank"]) == (culprit // 2, culprit % 2)
