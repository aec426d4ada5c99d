"""Level boundaries on device meshes: the crossings of each process group are scanned in every step, so a
verdict blames a collective for damage that it does once, and names its group."""

import contextlib
import functools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from damaged_collectives import damaged
from fsdp1_training import Fsdp1
from fsdp2_training import Fsdp2
from pipelined_training import Pipelined
from ranks import run_kept_ranks, run_ranks
from sharded_runs import healthy, located, verdict_of
from sharded_training import corrupt
from test_tensor_parallel import TensorParallel
from torch._C._distributed_c10d import ProcessGroup

import nanlocator

LEVEL = {"level": "boundaries"}


class Damaging:
    """The fault is a method of ProcessGroup: its result changes once on a culprit, below nanlocator's
    wrapper."""

    def planted_below(self):
        return damaged((self.fault,), lambda: self.plants(self.fault), corrupt, once=True)

    def planted(self):
        return contextlib.nullcontext()


class DamagingFsdp2(Damaging, Fsdp2):
    pass


class DamagingFsdp1(Damaging, Fsdp1):
    pass


@pytest.mark.parametrize(
    ("ranks", "kind", "variant", "method", "group", "module"),
    [
        (2, DamagingFsdp2, "plain", "_allgather_base", "world", "norm"),
        (4, DamagingFsdp2, "hsdp", "_allgather_base", "dp_shard", "norm"),
        (2, DamagingFsdp1, "plain", "allgather", "world", "body.0"),
        (4, DamagingFsdp1, "hybrid", "allgather", "shard", "body.0"),
    ],
)
def test_a_weight_that_one_rank_gathers_wrongly_once_is_its_gathers(
    ranks, kind, variant, method, group, module
):
    verdict = located(ranks, kind, variant, method, (1,), LEVEL)
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["candidates"]) == ("collective_result", [1])
    assert (origin["phase"], origin["module"], origin["operator"]) == ("forward", module, f"c10d::{method}_")
    fact = origin["facts"][0]
    assert (fact["kind"], fact["group"], fact["peers"]) == ("collective_changed", group, [0, 1])
    assert verdict["rerun"]["reproduced"] is False


@pytest.mark.parametrize(
    ("ranks", "kind", "variant", "method", "group", "peers", "candidates"),
    [
        (2, DamagingFsdp2, "plain", "_reduce_scatter_base", "world", [0, 1], [0, 1]),
        (4, DamagingFsdp2, "hsdp", "_reduce_scatter_base", "dp_shard", [0, 1], [0, 1]),
        (4, DamagingFsdp2, "hsdp", "allreduce", "dp_replicate", [1, 3], [1]),
        (2, DamagingFsdp1, "plain", "_reduce_scatter_base", "world", [0, 1], [0, 1]),
    ],
)
def test_gradients_that_are_reduced_wrongly_once_are_their_reductions(
    ranks, kind, variant, method, group, peers, candidates
):
    """Each member of an all-reduce has its own copy of the sum. In a reduce-scatter, one member has it, and
    all have contributed to it. The result of the next reduction is not a second origin."""
    (origin,) = located(ranks, kind, variant, method, (1,), LEVEL)["origins"]
    assert (origin["cause"], origin["candidates"]) == ("collective_result", candidates)
    assert (origin["phase"], origin["module"], origin["parameter"]) == ("grad_reduced", "head", "head.weight")
    fact = origin["facts"][0]
    assert (fact["kind"], fact["group"], fact["peers"]) == ("collective_changed", group, peers)


class DamagingTensorParallel(TensorParallel):
    """The fault is a functional collective: its result changes once on a culprit."""

    def planted_below(self):
        operators, left = torch.ops._c10d_functional, [None]
        inner = operators.wait_tensor

        def wait_tensor(tensor):
            result = inner(tensor)
            if left and tensor.numel() > 8 and self.plants(self.fault):
                left.pop()
                corrupt(tensor)
            return result

        return mock.patch.object(operators, "wait_tensor", wait_tensor)


def test_what_dtensor_gets_out_of_a_collective_wrongly_once_is_that_collectives():
    (origin,) = located(4, DamagingTensorParallel, "dp_tp", "wait", (1,), LEVEL)["origins"]
    assert (origin["cause"], origin["candidates"]) == ("collective_result", [1])
    assert (origin["phase"], origin["operator"]) == ("forward", "_c10d_functional::all_reduce")
    assert (origin["facts"][0]["group"], origin["facts"][0]["peers"]) == ("tp", [0, 1])


@pytest.mark.parametrize(
    ("ranks", "kind", "variant", "fault", "expected"),
    [
        (2, Fsdp2, "plain", "forward", ("operator_undefined", [1], "forward", "scale")),
        (4, Fsdp2, "hsdp", "backward", ("operator_undefined", [1], "backward", "scale")),
        (2, Fsdp2, "plain", "empty_loss", ("empty_loss_mask", [1], "loss", None)),
        (4, Fsdp2, "hsdp", "before", ("not_reproduced", [1], "grad_local", None)),
        (2, Fsdp1, "plain", "before", ("not_reproduced", [1], "grad_local", None)),
        (4, TensorParallel, "dp_tp", "before", ("not_reproduced", [1], "grad_local", None)),
        (2, Pipelined, "1f1b", "forward", ("operator_undefined", [1], "forward", "layers.2.scale")),
    ],
)
def test_other_faults_are_told_as_without_it(ranks, kind, variant, fault, expected):
    (origin,) = located(ranks, kind, variant, fault, (1,), LEVEL)["origins"]
    assert (origin["cause"], origin["candidates"], origin["phase"], origin["module"]) == expected


@pytest.mark.parametrize(
    ("ranks", "kind", "variant"),
    [
        (4, Fsdp2, "hsdp"),
        (2, Fsdp2, "mixed_precision"),
        (2, Fsdp1, "plain"),
        (4, TensorParallel, "dp_tp"),
        (2, Pipelined, "1f1b"),
    ],
)
def test_training_is_bit_identical(ranks, kind, variant):
    assert run_kept_ranks(ranks, healthy, kind, variant, LEVEL) == [[]] * ranks


def bad_shard(rank, world_size):
    training = Fsdp2(rank, "plain")
    if rank == 1:
        weight = training.net.middle.weight
        training.optimizer.register_step_post_hook(lambda *_: corrupt(weight.to_local().detach()))
    return verdict_of(training, **LEVEL)


def test_a_bad_shard_accuses_no_gather():
    (origin,) = run_kept_ranks(2, bad_shard)[0]["origins"]
    assert (origin["cause"], origin["candidates"]) == ("bad_weight", [1])
    assert origin["parameter"] == "middle.weight"


class OutOfStep(DamagingFsdp2):
    """Ranks average a number at different places of the program, before or after the first forward, and then
    a part of the loss."""

    def loss(self):
        average = functools.partial(dist.all_reduce, group=averaging())
        if self.rank == 0:
            work = average(torch.ones(4), async_op=True)
        loss = super().loss()
        if self.rank == 1:
            work = average(torch.ones(4), async_op=True)
        work.wait()
        shift = torch.ones(16)
        average(shift)
        return loss * shift.mean()


@functools.cache
def averaging():
    return dist.new_group(group_desc="averaging")


def test_ranks_whose_passes_begin_at_different_collectives_count_alike():
    (origin,) = located(2, OutOfStep, "plain", "allreduce", (1,), LEVEL)["origins"]
    assert (origin["cause"], origin["candidates"]) == ("collective_result", [1])
    assert origin["facts"][0]["group"] == "averaging"


def left_as_it_was(rank, world_size):
    training = Fsdp2(rank, "plain")
    operators = torch.ops._c10d_functional
    operators.all_reduce, operators.wait_tensor  # noqa: B018  (the namespace creates them at first access)
    before = dict(vars(ProcessGroup)), dict(vars(operators))
    watch = nanlocator.watch(training.model, training.optimizer, **LEVEL)
    training.step()
    watch.remove()
    training.step()
    return (
        dict(vars(ProcessGroup)) == before[0],
        [name for name, each in before[1].items() if vars(operators)[name] is not each],
    )


def test_it_leaves_the_process_as_it_was():
    assert run_kept_ranks(2, left_as_it_was) == [(True, [])] * 2


def without_closure(rank, world_size):
    training = Fsdp2(rank, "plain", "forward")
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.model, **LEVEL)
    try:
        for training.number in (1, 2):
            training.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict, optimizer._driver.run_dir


def test_a_step_without_a_closure_claims_nothing_of_what_crossed():
    (verdict, run_dir), _ = run_ranks(2, without_closure)
    kinds = {fact["kind"] for origin in verdict["origins"] for fact in origin["facts"]}
    assert verdict["origins"] and not kinds & {"received_finite_before", "collective_changed"}
    not_covered = json.loads((Path(run_dir) / "run.json").read_text())["not_covered"]
    assert "what ranks exchange, because step() is called without a closure" in not_covered
