"""A model that is sharded after nanlocator attached to it is refused or followed, never silently
unwatched."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import fsdp1_training
import pytest
import torch
from fsdp2_training import Fsdp2, shard
from ranks import run_kept_ranks, run_ranks
from sharded_runs import verdict_of
from sharded_training import Net, mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import nanlocator
from nanlocator import attach
from nanlocator.hooks import points
from nanlocator.sharding import fsdp2


def optimizer_made_first(rank, world_size, attach):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, "plain")
    attach(model, optimizer)


def watch(model, optimizer):
    nanlocator.watch(model, optimizer)


def wrap(model, optimizer):
    nanlocator.LocatingOptimizer(optimizer, model)


@pytest.mark.parametrize("attach", [watch, wrap])
def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_refused(attach):
    for name, text in run_ranks(2, optimizer_made_first, attach):
        assert name == "UsageError" and "holds none of the model's parameters" in text


def attached_first(rank, world_size, how):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "watch":
        nanlocator.watch(model, optimizer)
    else:
        optimizer = nanlocator.LocatingOptimizer(optimizer, model)
    if how == "one layer":
        fully_shard(model.middle)
    elif how == "fsdp1":
        model = fsdp1_training.shard(model, "plain")
    elif how == "tensor":
        parallelize_module(model, mesh(2, names=("tp",)), {"body.0": ColwiseParallel()})
    else:
        shard(model, "plain")

    def closure():
        loss = model(torch.randn(6, 4), torch.zeros(6, 1)).square().mean()
        loss.backward()
        return loss

    if how == "without closure":
        closure()
        optimizer.step()
    elif how == "watch":
        closure()
    else:
        optimizer.step(closure)


@pytest.mark.parametrize("how", ["watch", "closure", "without closure", "one layer", "fsdp1", "tensor"])
def test_sharding_a_model_that_is_watched_is_an_error_in_its_first_step(how):
    for name, text in run_ranks(2, attached_first, how):
        assert name == "UsageError" and "were passed to nanlocator" in text
        assert ("middle.weight" if how == "one layer" else "body.0.weight") in text


def watched_while_whole(rank, world_size):
    """After an evaluation, the root keeps its parameters whole until the next backward."""
    training = Fsdp2(rank, "one_group", "before")
    with torch.no_grad():
        training.loss()
    return verdict_of(training)


def test_a_model_that_holds_whole_parameters_at_the_moment_is_followed_all_the_same():
    (origin,) = run_kept_ranks(2, watched_while_whole)[0]["origins"]
    assert (origin["coordinates"]["rank"], origin["parameter"]) == (1, "head.weight")


def unedited(rank, world_size, fault):
    """A script's training, attached like ``python -m nanlocator`` does."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        attach.follow_process()
        training = Fsdp2(rank, "plain", fault)
        try:
            training.step()
            with training.planted():
                training.step()
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict, said.getvalue()


@pytest.mark.parametrize(
    ("fault", "expected"), [("before", ("head.weight", None)), ("forward", (None, "aten::sqrt"))]
)
def test_an_unedited_script_that_shards_its_model_is_watched(fault, expected):
    verdict, said = run_ranks(2, unedited, fault)[0]
    (origin,) = verdict["origins"]
    assert origin["coordinates"]["rank"] == 1
    assert (origin["parameter"], origin["operator"]) == expected
    assert "attached to AdamW and FSDPNet (8 parameters)" in said


def in_another_torch(rank, world_size, renamed):
    """Simulates a torch whose private names nanlocator does not know."""
    training = Fsdp2(rank, "plain", "forward")
    if renamed == "attribute":
        fsdp2._part_of = lambda param: param.what_it_had_before
    else:
        renamed = {
            name: dataclasses.replace(getattr(points, name), attribute="foreach_otherwise")
            for name in ("FSDP2_REDUCE", "FSDP2_GATHER")
        }
        fsdp2.points = SimpleNamespace(**renamed)
    watch = nanlocator.watch(training.model, training.optimizer)
    not_covered = json.loads((Path(watch.run_dir) / "run.json").read_text())["not_covered"]
    try:
        for _ in range(2):
            training.step()
    except nanlocator.NonFiniteGradientError as error:
        return not_covered, error.verdict["origins"]


@pytest.mark.parametrize(
    ("renamed", "said"),
    [("attribute", "where the shards of fully_shard lie"), ("function", "(this torch has no ")],
)
def test_what_a_later_torch_does_otherwise_is_not_seen_and_that_is_said(renamed, said):
    for not_covered, origins in run_ranks(2, in_another_torch, renamed):
        assert any(said in text for text in not_covered)
        (origin,) = origins
        assert (origin["operator"], origin["coordinates"]["rank"]) == ("aten::sqrt", 1)
