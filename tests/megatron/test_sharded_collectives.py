"""What a rank gets out of Megatron-FSDP's collectives wrongly, every time: its gathers of weights, which
level boundaries does not watch, and its reductions."""

import ctypes
import math

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
    "layers": 4,
    "use_distributed_optimizer": True,
    "megatron_fsdp": "optim_grads_params",
}
GATHERS = ("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced")
REDUCTIONS = ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter")


def damaged_training(rank, world_size, methods):
    from damaged_collectives import damaged
    from gpt_training import Trainer, TrainingConfig

    import nanlocator.megatron

    def spoil(tensor):
        ctypes.c_float.from_address(tensor.data_ptr() + 4 * 2).value = math.nan

    trainer = Trainer(TrainingConfig(**TRAINING))
    locator = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer)
    with damaged(methods, lambda: rank == 1 and locator._driver.is_in_pass, spoil, more_than=64):
        try:
            trainer.train(2)
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict


def only_origin(methods):
    (origin,) = run_ranks(2, damaged_training, methods)[0]["origins"]
    return origin


def test_a_gather_that_is_wrong_on_one_rank_is_named_with_its_group():
    origin = only_origin(GATHERS)
    assert (origin["cause"], origin["candidates"], origin["phase"]) == ("collective_result", [1], "forward")
    assert origin["module"] == "embedding.word_embeddings"
    came = origin["facts"][0]
    assert (came["kind"], came["peers"]) == ("came_from_collective", [0, 1])
    assert came["group"].startswith("DATA_PARALLEL_GROUP")


def test_a_sum_that_is_wrong_where_it_is_kept_is_of_all_that_made_it():
    origin = only_origin(REDUCTIONS)
    assert (origin["cause"], origin["phase"]) == ("collective_result", "grad_reduced")
    assert origin["candidates"] == [0, 1]
    assert "only_owner_keeps_sum" in [fact["kind"] for fact in origin["facts"]]
