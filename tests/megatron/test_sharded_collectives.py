"""Wrong results of Megatron-FSDP's collectives on one rank: gathers of weights, which level modules watches
and level boundaries does not, and reductions."""

import ctypes

import pytest
from fixtures import run_in_tmp_path  # noqa: F401
from ranks import RankServer

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

# gpt_training redirects Megatron's CUDA to the CPU before it imports it.
run_ranks = RankServer("torch._dynamo", "gpt_training").run_ranks
TRAINING = {
    "hidden": 32,
    "sequence": 16,
    "num_microbatches": 2,
    "layers": 2,
    "use_distributed_optimizer": True,
    "megatron_fsdp": "optim_grads_params",
}
GATHERS = ("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced")
REDUCTIONS = ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter")


def damaged_training(rank, world_size, methods, level, once):
    from damaged_collectives import damaged
    from gpt_training import Trainer, TrainingConfig

    import nanlocator.megatron

    def spoil(tensor):
        ctypes.memset(tensor.data_ptr(), 255, tensor.nbytes)

    trainer = Trainer(TrainingConfig(**TRAINING))
    locator = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer, level=level)
    is_now = lambda: rank == 1 and locator._driver.is_in_pass  # noqa: E731
    with damaged(methods, is_now, spoil, once=once, more_than=64):
        try:
            trainer.train(2)
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict


def only_origin(methods, level="boundaries", once=False):
    (origin,) = run_ranks(2, damaged_training, methods, level, once)[0]["origins"]
    return origin


def kinds_of(origin):
    return [fact["kind"] for fact in origin["facts"]]


@pytest.mark.parametrize("level", ["boundaries", "modules"])
def test_a_gather_that_is_always_wrong_on_one_rank_is_named_with_its_group(level):
    origin = only_origin(GATHERS, level)
    assert (origin["cause"], origin["candidates"], origin["phase"]) == ("collective_result", [1], "forward")
    came = origin["facts"][0]
    assert came["kind"] == ("came_from_collective" if level == "boundaries" else "collective_changed")
    assert came["group"].startswith("DATA_PARALLEL_GROUP")
    assert came["peers"] == [0, 1]


def test_a_gather_that_was_wrong_once_is_named_where_it_is_watched():
    origin = only_origin(GATHERS, "modules", once=True)
    assert (origin["cause"], origin["candidates"], origin["phase"]) == ("collective_result", [1], "forward")
    assert {"collective_changed", "own_copy_bad", "happened_once"} <= set(kinds_of(origin))


def test_a_gather_that_was_wrong_once_is_not_ruled_out_where_it_is_not_watched():
    origin = only_origin(GATHERS, once=True)
    assert (origin["cause"], origin["candidates"]) == ("not_reproduced", [1])
    assert "weights_gathered_unseen" in kinds_of(origin)
    assert any("everything but gathered weights" in text for text in origin["evidence"])
    assert "gather" in origin["alternatives"]


@pytest.mark.parametrize(
    ("level", "once"),
    [
        ("boundaries", True),
        ("modules", False),
        pytest.param("boundaries", False, marks=pytest.mark.exhaustive),
        pytest.param("modules", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_sum_that_is_wrong_where_it_is_kept_is_of_all_that_made_it(level, once):
    origin = only_origin(REDUCTIONS, level, once)
    assert (origin["cause"], origin["phase"]) == ("collective_result", "grad_reduced")
    assert origin["candidates"] == [0, 1]
    assert "only_owner_keeps_sum" in kinds_of(origin)
