"""torch.distributed.pipelining: all stages re-run a schedule's step; results do not change."""

import json
import signal
import time
from pathlib import Path

import pytest
import sharded_runs
import torch
from pipelined_training import SECOND_AXIS, VARIANTS, Block, Pipelined
from ranks import run_kept_ranks, run_programs, run_ranks
from sharded_runs import DEADLINE, die_in, healthy, recovered
from torch import distributed as dist
from watched_steps import as_code_says

import nanlocator
from nanlocator.sharding import pipelining


def ranks_of(variant):
    return 8 if variant == "tensor_fsdp" else 4 if variant in SECOND_AXIS else 2


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(variant):
    assert run_kept_ranks(ranks_of(variant), healthy, Pipelined, variant) == [[]] * ranks_of(variant)


def located(variant, fault, culprits=(1,)):
    return sharded_runs.located(ranks_of(variant), Pipelined, variant, fault, culprits)


def of_only_origin(verdict, *fields):
    (origin,) = verdict["origins"]
    return tuple(origin["coordinates"][f] if f in ("rank", "pp", "dp") else origin[f] for f in fields)


@pytest.mark.parametrize(
    ("variant", "culprit"),
    [("gpipe", 0), ("1f1b", 0), ("1f1b", 1), ("interleaved", 0), ("zero_bubble", 1), ("v", 0)],
)
def test_a_birth_in_forward_names_stage_microbatch_module_and_line(variant, culprit):
    verdict = located(variant, "forward", (culprit,))
    place = of_only_origin(verdict, "phase", "rank", "microbatch", "operator", "cause")
    assert place == ("forward", culprit, 2, "aten::sqrt", "operator_undefined")
    (origin,) = verdict["origins"]
    assert origin["module"].endswith("scale") and origin["code"]["function"] == as_code_says("Scale.forward")
    assert origin["coordinates"]["pp"] == {"rank": culprit, "size": 2}
    assert any("bit-identical" in line for line in origin["evidence"])


@pytest.mark.parametrize(
    ("variant", "culprit"),
    [("gpipe", 1), ("1f1b", 0), ("1f1b", 1), ("interleaved", 1), ("zero_bubble", 0), ("v", 1)],
)
def test_a_birth_in_backward_names_the_operator_of_forward(variant, culprit):
    verdict = located(variant, "backward", (culprit,))
    place = of_only_origin(verdict, "phase", "rank", "microbatch", "forward_operator")
    assert place == ("backward", culprit, 2, "aten::sqrt")


@pytest.mark.parametrize("variant", ["gpipe", "v"])
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
    assert place == ("unknown", culprit, f"layers.{2 * culprit}.linear.weight")


@pytest.mark.parametrize(
    ("variant", "culprit"), [("1f1b", 0), ("1f1b", 1), ("interleaved", 1), ("zero_bubble", 0)]
)
def test_a_message_that_changes_on_its_way_names_both_ends(variant, culprit):
    verdict = located(variant, "message", (culprit,))
    assert of_only_origin(verdict, "cause", "rank") == ("pipeline_transfer", culprit)
    (origin,) = verdict["origins"]
    sender = f"rank {1 - culprit}"
    assert any(f"{sender} sent finite" in line for line in origin["evidence"])


@pytest.mark.parametrize(("variant", "culprit"), list(zip(SECOND_AXIS, (1, 2, 1, 2), strict=True)))
def test_beside_other_parallelism_both_places_are_named(variant, culprit):
    verdict = located(variant, "forward", (culprit,))
    place = of_only_origin(verdict, "phase", "rank", "operator")
    assert place == ("forward", culprit, "aten::sqrt")
    coordinates = verdict["origins"][0]["coordinates"]
    place = coordinates[SECOND_AXIS[variant]]["rank"], coordinates["pp"]["rank"]
    assert place == (culprit // 2, culprit % 2)


@pytest.mark.parametrize(("variant", "candidates"), [("fsdp", [1, 3]), ("ddp", [3])])
def test_a_gradient_that_goes_bad_after_its_reduction_is_its_stages(variant, candidates):
    """All ranks have contributed to a shard's sum; of whole gradients, another replica has a clean copy."""
    verdict = located(variant, "memory", (3,))
    place = of_only_origin(verdict, "cause", "candidates", "phase", "parameter")
    assert place == ("collective_result", candidates, "grad_reduced", "layers.2.linear.weight")


def test_with_shards_and_tensor_parallelism_every_place_is_named():
    """Ranks are laid out like torchtitan's: pp, dp, tp."""
    data = located("tensor_fsdp", "forward", (6, 7))
    assert of_only_origin(data, "phase", "candidates", "operator") == ("forward", [6, 7], "aten::sqrt")
    shard = located("tensor_fsdp", "memory", (5,))  # after the reduction, over pp1 tp1
    place = of_only_origin(shard, "cause", "candidates", "parameter")
    assert place == ("collective_result", [5, 7], "layers.2.linear.weight")
    (owner,) = (fact for fact in shard["origins"][0]["facts"] if fact["kind"] == "clean_before_reduction")
    assert owner["ranks"] == [5] and shard["origins"][0]["tensor"]["shape"] == [4, 8]


def test_two_stages_faults_at_once_are_two_origins():
    verdict = located("1f1b", "memory", (0, 1))
    found = {(o["coordinates"]["pp"]["rank"], o["parameter"]) for o in verdict["origins"]}
    assert found == {(0, "layers.0.linear.weight"), (1, "layers.2.linear.weight")}


@pytest.mark.parametrize("variant", ["1f1b", "zero_bubble", "fsdp"])
def test_after_a_transient_fault_training_goes_on_as_if_it_had_not_been(variant):
    assert run_kept_ranks(ranks_of(variant), recovered, Pipelined, variant, "memory") == [[2]] * ranks_of(
        variant
    )


def in_closure(rank, world_size, fault):
    training = Pipelined(rank, "1f1b", fault)
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.parts[0])
    with training.planted_below():
        try:
            for _ in range(2):
                training.number += 1
                optimizer.step(training.evaluate)
                optimizer.zero_grad()
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict


@pytest.mark.parametrize("fault", ["forward", "message"])
def test_a_closure_is_executed_again_alike(fault):
    (origin,) = run_ranks(2, in_closure, fault)[0]["origins"]
    assert (origin["coordinates"]["rank"], origin["coordinates"]["pp"]["rank"]) == (1, 1)
    assert origin["cause"] == {"forward": "operator_undefined", "message": "pipeline_transfer"}[fault]


def evaluated(rank, world_size):
    training = Pipelined(rank, "1f1b")
    watch = nanlocator.watch(training.model, training.optimizer)
    training.step()
    training.schedule._has_backward = False
    with torch.no_grad():
        training.run_schedule(torch.randn(8, 8), torch.zeros(8, 1), target=torch.ones(8, 1))
    training.schedule._has_backward = True
    training.step()
    is_in_pass = watch._driver.is_in_pass
    watch.remove()
    return watch.verdicts, is_in_pass


def test_a_step_without_a_backward_is_no_step():
    assert run_kept_ranks(2, evaluated) == [([], False)] * 2


def by_hand(rank, world_size, fault, culprit):
    """A loop that itself sends and receives."""
    torch.manual_seed(rank)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    offset = torch.zeros(4, 1)
    if rank == culprit:
        offset[1] = {"forward": -3.0, "backward": -1.0}[fault]
    for _ in range(2):  # microbatches
        if rank == 0:
            output = model(torch.randn(4, 8), offset)
            dist.send(output.detach(), 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        else:
            received = torch.empty(4, 8)
            dist.recv(received, 0)
            model(received.requires_grad_(), offset).square().mean().backward()
            dist.send(received.grad, 0)
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_a_loop_receives_by_itself_is_no_data_of_its_rank(fault, culprit):
    (origin,) = run_kept_ranks(2, by_hand, fault, culprit)[0]["origins"]
    assert (origin["phase"], origin["coordinates"]["rank"]) == (fault, culprit)
    assert origin["cause"] == "operator_undefined"


def of_another_torch(rank, world_size):
    pipelining._OF_STAGE += ("what_it_was_named_before",)
    training = Pipelined(rank, "1f1b", "memory")
    watch = nanlocator.watch(training.model, training.optimizer)
    try:
        for _ in range(2):
            training.step()
    except nanlocator.NonFiniteGradientError as error:
        not_covered = json.loads((Path(watch.run_dir) / "run.json").read_text())["not_covered"]
        return [o["parameter"] for o in error.verdict["origins"]], not_covered


def test_a_schedule_that_is_done_in_another_way_is_said_not_to_be_followed():
    for parameters, not_covered in run_ranks(2, of_another_torch):
        assert parameters == ["layers.2.linear.weight"]
        assert any("Schedule1F1B" in line for line in not_covered), not_covered


def mapped(rank, world_size, variant):
    training = Pipelined(rank, variant)
    watch = nanlocator.watch(training.model, training.optimizer)
    training.step()
    watch.remove()
    return sorted(path.name for path in Path(watch.run_dir).glob("param_manifest_*"))


@pytest.mark.parametrize(("variant", "replicas"), [("1f1b", 1), ("fsdp", 2)])
def test_the_maps_say_where_a_rank_stands_in_the_pipeline(variant, replicas):
    names = [f"param_manifest_tp0pp{pp}dp{dp}.json" for pp in (0, 1) for dp in range(replicas)]
    assert run_kept_ranks(ranks_of(variant), mapped, variant)[0] == names


def killed(rank, world_size, port, variant):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    training = Pipelined(rank, variant)
    watch = nanlocator.watch(training.model, training.optimizer, gather_deadline=DEADLINE)
    training.step()
    time.sleep(2 * DEADLINE)  # every monitor is connected
    if rank == 1:
        die_in("reduction", training, watch)
    for _ in range(2):
        training.step()


@pytest.mark.parametrize("variant", ["fsdp", pytest.param("interleaved_fsdp", marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_while_its_stage_reduces_is_the_one_that_is_named(variant):
    """Rank 3, which reduces with it, ends with gloo's error, and the other stage with nanlocator's."""
    codes = [code for code, _, _ in run_programs(4, killed, variant)]
    assert codes == [1, -signal.SIGKILL, 1, 1]
    verdicts = [json.loads(path.read_text()) for path in Path("nanlocator_run/a0").glob("verdict*.json")]
    assert verdicts
    for verdict in verdicts:
        assert (verdict["status"], verdict["silent_ranks"], verdict["origins"]) == ("partial", [1], [])
