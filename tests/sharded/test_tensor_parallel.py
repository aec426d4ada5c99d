"""``parallelize_module`` (DTensor), alone and with ``fully_shard``: ranks' coordinates come from the mesh."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_kept_ranks
from sharded_runs import healthy, located, verdict_of
from sharded_training import Training, corrupt, mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nanlocator


def shard(net, variant):
    sizes, names = {"tp": ((2,), ("tp",)), "unnamed": ((2, 2), ("rows", "columns"))}.get(
        variant, ((2, 2), ("dp", "tp"))
    )
    layout = mesh(*sizes, names=names)
    plan = {"body.0": ColwiseParallel(), "middle": RowwiseParallel()}
    parallelize_module(net, layout if variant == "tp" else layout[names[1]], plan)
    if variant != "tp":
        for module in (net.body, net.middle, net.head, net):
            fully_shard(module, mesh=layout[names[0]])
    return net


class TensorParallel(Training):
    """The ranks of a tensor-parallel group draw the same data."""

    def __init__(self, rank, variant, fault=None, culprits=(1,)):
        super().__init__(rank, shard, variant, fault, culprits, width=6)
        if fault == "before":
            self.follow_gradient()
        torch.manual_seed(0 if variant == "tp" else rank // 2)

    def clip(self):
        """Does nothing: PyTorch has no norm over parameters of several meshes."""

    def follow_gradient(self):
        """The gradient of the middle's weight, as backward made it on this rank."""

        def follow(module, *_):
            weight = module.weight
            if not getattr(weight, "is_followed", False):
                weight.is_followed = True
                weight.register_post_accumulate_grad_hook(
                    lambda p: self.corrupt_once(p.grad.to_local(), "before")
                )

        self.net.middle.register_forward_pre_hook(follow)


@pytest.mark.parametrize("variant", ["tp", "dp_tp"])
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(variant):
    ranks = 2 if variant == "tp" else 4
    assert run_kept_ranks(ranks, healthy, TensorParallel, variant) == [[]] * ranks


@pytest.mark.parametrize(("variant", "culprit"), [("tp", 1), ("dp_tp", 3)])
def test_a_gradient_that_goes_bad_once_on_one_rank_is_that_ranks(variant, culprit):
    verdict = located(2 if variant == "tp" else 4, TensorParallel, variant, "before", [culprit])
    (origin,) = verdict["origins"]
    assert (origin["coordinates"]["rank"], origin["parameter"]) == (culprit, "middle.weight")
    assert origin["coordinates"]["tp"] == {"rank": 1, "size": 2}
    assert origin["coordinates"]["dp"]["size"] == (1 if variant == "tp" else 2)
    # 6 columns over two tensor-parallel ranks.
    assert origin["tensor"]["shape"] == [8, 3] and origin["tensor"]["first_bad_index"] == [0, 2]
    # A replica has executed the same code; else the re-run may lack what it read of the loop.
    assert origin["cause"] == {"dp_tp": "not_reproduced", "tp": "unknown"}[variant]


def test_bad_data_of_a_tensor_parallel_group_is_that_groups():
    verdict = located(4, TensorParallel, "dp_tp", "forward", [2, 3])
    (origin,) = verdict["origins"]
    assert origin["operator"] == "aten::sqrt" and origin["candidates"] == [2, 3]


def bad_shard(rank, world_size):
    training = TensorParallel(rank, "dp_tp")
    if rank == 3:
        weight = training.net.middle.weight
        training.optimizer.register_step_post_hook(lambda *_: corrupt(weight.to_local().detach(), 0))
    return verdict_of(training)


def test_a_bad_shard_of_a_tensor_parallel_weight_is_that_of_the_rank_that_keeps_it():
    (origin,) = run_kept_ranks(4, bad_shard)[0]["origins"]
    assert (origin["cause"], origin["candidates"]) == ("bad_weight", [3])
    assert origin["tensor"]["shape"] == [8, 3] and origin["tensor"]["first_bad_index"] == [4, 0]


def coordinates(rank, world_size, variant):
    training = TensorParallel(rank, variant)
    watch = nanlocator.watch(training.model, training.optimizer)
    watch.remove()
    run = Path(watch.run_dir)
    own = [json.loads(p.read_text()) for p in run.glob("param_manifest_*.json")]
    at = next(m["coordinates"] for m in own if m["coordinates"]["rank"] == rank)
    not_covered = json.loads((run / "run.json").read_text())["not_covered"]
    return at["tp"]["rank"], at["dp"]["rank"], not_covered


def test_ranks_are_placed_by_the_names_of_the_mesh_or_not_at_all():
    placed = run_kept_ranks(4, coordinates, "dp_tp")
    assert [(tp, dp) for tp, dp, _ in placed] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    unknown = run_kept_ranks(4, coordinates, "unnamed")
    assert [(tp, dp) for tp, dp, _ in unknown] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert any("(rows=2, columns=2)" in text for text in unknown[0][2])
