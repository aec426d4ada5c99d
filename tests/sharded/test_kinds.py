"""Faults that nanlocator must locate in every kind of sharded training."""

import json
import subprocess
from unittest import mock

import pytest
from damaged_collectives import damaged
from fsdp1_training import Fsdp1
from fsdp2_training import Fsdp2
from pipelined_training import Pipelined
from ranks import run_kept_ranks
from sharded_runs import assert_that_a_killed_rank_is_named, located, watched
from sharded_training import corrupt
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import nanlocator

KINDS = [(2, Fsdp2, "plain"), (4, Fsdp2, "hsdp"), (2, Fsdp1, "plain"), (2, Pipelined, "1f1b")]


@pytest.mark.parametrize(("ranks", "kind", "variant"), KINDS)
def test_a_moment_of_the_optimizer_that_is_bad_is_that_of_the_rank_that_keeps_it(ranks, kind, variant):
    verdict = run_kept_ranks(ranks, watched, kind, variant, "moment")[0]
    assert verdict["iteration"] == 3  # its update has made the weight bad
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["candidates"]) == ("bad_weight", [1])
    assert origin["parameter"].endswith("weight")
    assert any("the optimizer's exp_avg of it on rank 1 holds NaN" in line for line in origin["evidence"])


@pytest.mark.parametrize(("ranks", "kind", "variant"), KINDS[1:3])
def test_a_birth_in_backward_on_one_rank_names_the_operator_of_forward(ranks, kind, variant):
    (origin,) = located(ranks, kind, variant, "backward")["origins"]
    assert (origin["phase"], origin["coordinates"]["rank"]) == ("backward", 1)
    assert (origin["forward_operator"], origin["module"]) == ("aten::sqrt", "scale")


def test_births_in_forward_and_means_over_nothing_of_a_replicated_shards_rank_are_that_ranks():
    causes = {"forward": ("operator_undefined", "scale"), "empty_loss": ("empty_loss_mask", None)}
    for fault, (cause, module) in causes.items():
        (origin,) = located(4, Fsdp2, "hsdp", fault)["origins"]
        assert (origin["cause"], origin["coordinates"]["rank"]) == (cause, 1)
        assert origin["module"] == module


@pytest.mark.parametrize(("ranks", "kind", "variant"), KINDS[1:3])
def test_gradients_of_two_ranks_that_go_bad_at_once_are_two_origins_and_no_device_s(ranks, kind, variant):
    verdict = located(ranks, kind, variant, "before", (0, ranks - 1))
    found = [(o["coordinates"]["rank"], o["phase"], o["parameter"], o["cause"]) for o in verdict["origins"]]
    place = ("grad_local", "head.weight", "unknown")
    assert found == [(0, *place), (ranks - 1, *place)]


def maps(rank, world_size, kind, variant):
    training = kind(rank, variant)
    nanlocator.watch(training.model, training.optimizer).remove()


@pytest.mark.parametrize(
    ("ranks", "kind", "variant", "parameter", "expected"),
    [
        (2, Fsdp2, "plain", "head.weight", {0: (0, 16), 1: (16, 24)}),
        (4, Fsdp2, "hsdp", "head.weight", {0: (0, 16), 1: (16, 24), 2: (0, 16), 3: (16, 24)}),
        (2, Fsdp1, "plain", "head.weight", {0: (0, 14), 1: (14, 24)}),
        (2, Pipelined, "1f1b", "layers.2.linear.weight", {1: None}),
    ],
)
def test_the_maps_of_all_ranks_say_who_keeps_which_part(ranks, kind, variant, parameter, expected):
    run_kept_ranks(ranks, maps, kind, variant)
    command = ["nanlocator", "map", "find", "nanlocator_run/a0", parameter, "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (match,) = shown["matches"]
    shards = {each["coordinates"]["rank"]: each["parameter"]["shard"] for each in match["holders"]}
    assert {rank: shard and (shard["begin"], shard["end"]) for rank, shard in shards.items()} == expected


class Gathered(Fsdp2):
    """Fault ``gathered``: a weight changes on a culprit after its gather; its shards do not."""

    def planted(self):
        wait = _fsdp_param_group.FSDPParamGroup.wait_for_unshard

        def wait_for_unshard(group):
            wait(group)
            for each in group.fsdp_params:
                if each.sharded_param is self.sharded:
                    self.corrupt_once(each._unsharded_param.detach(), "gathered")

        return mock.patch.object(_fsdp_param_group.FSDPParamGroup, "wait_for_unshard", wait_for_unshard)


def test_a_weight_that_goes_bad_once_it_is_gathered_accuses_no_shard():
    verdict = located(2, Gathered, "plain", "gathered")
    (origin,) = verdict["origins"]
    assert origin["coordinates"]["rank"] == 1 and origin["cause"] == "not_reproduced"


class Corrupting:
    """The fault is a method of ProcessGroup: each of its results changes on a culprit."""

    def planted(self):
        return damaged((self.fault,), lambda: self.plants(self.fault), corrupt)


class CorruptingFsdp2(Corrupting, Fsdp2):
    pass


class UnclippedFsdp2(CorruptingFsdp2):
    def clip(self):
        pass


class CorruptingFsdp1(Corrupting, Fsdp1):
    pass


@pytest.mark.parametrize(
    ("ranks", "kind", "variant", "method", "group"),
    [
        (2, CorruptingFsdp2, "plain", "_allgather_base", "world"),
        (4, CorruptingFsdp2, "hsdp", "_allgather_base", "dp_shard"),
        (4, UnclippedFsdp2, "hsdp", "_allgather_base", "dp_shard"),
        (2, CorruptingFsdp1, "plain", "allgather", "world"),
        (4, CorruptingFsdp1, "hybrid", "allgather", "shard"),
    ],
)
def test_what_one_rank_alone_gets_out_of_every_gather_is_one_origin_with_the_name_of_the_group(
    ranks, kind, variant, method, group
):
    (origin,) = located(ranks, kind, variant, method)["origins"]
    assert (origin["cause"], origin["candidates"], origin["phase"]) == ("collective_result", [1], "forward")
    assert origin["operator"] == f"c10d::{method}_"
    facts = {fact["kind"]: fact for fact in origin["facts"]}
    came = facts["came_from_collective"]
    assert (came["group"], came["peers"]) == (group, [0, 1])
    assert facts["same_collective_elsewhere"]["count"] > 0


# Every phase of one kind. Of the other kinds, the phases in which the surviving ranks are in a different
# call: a group without the victim, another reduction, a transfer between stages.
KILLED = [
    *((2, Fsdp2, "plain", phase) for phase in ("forward", "backward", "reduction", "update", "repeat")),
    (4, Fsdp2, "hsdp", "reduction"),
    (2, Fsdp1, "plain", "reduction"),
    (2, Pipelined, "1f1b", "forward"),
    (2, Pipelined, "1f1b", "repeat"),
]
FURTHER = [
    *((4, Fsdp2, "hsdp", phase) for phase in ("forward", "backward", "repeat")),
    *((2, Fsdp1, "plain", phase) for phase in ("forward", "backward", "repeat")),
    (2, Pipelined, "1f1b", "backward"),
]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("ranks", "kind", "variant", "phase"),
    [*KILLED, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in FURTHER)],
)
def test_a_rank_that_is_killed_in_any_phase_is_named_by_the_others_in_time(ranks, kind, variant, phase):
    assert_that_a_killed_rank_is_named(ranks, kind, variant, phase)
