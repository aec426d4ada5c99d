"""What nanlocator cannot scan on real Megatron-Core and gloo: parameters without their own memory, exchanged
bytes, exchanges outside of ProcessGroup, a CUDA graph of the whole iteration. Two ranks."""

import json
import math
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures import run_in_tmp_path  # noqa: F401
from ranks import RankServer
from wrapper_tensors import Quantized, Sealed

# gpt_training redirects Megatron's CUDA to the CPU before it imports it.
run_ranks = RankServer("torch._dynamo", "gpt_training").run_ranks
SMALL = {"hidden": 32, "sequence": 16, "num_microbatches": 2, "layers": 2}
WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"


def make_trainer(**training):
    from gpt_training import Trainer, TrainingConfig

    return Trainer(TrainingConfig(**{**SMALL, **training}))


def verdict_of(trainer, **options):
    import nanlocator.megatron

    locator = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer, **options)
    try:
        trainer.train(1)
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict, Path(locator.run_dir)
    return None, Path(locator.run_dir)


# ---- parameters without memory of their own ----


def with_wrapped_weight(rank, world_size, kind, options):
    import gpt_training

    model_of, wrapped = gpt_training.GPTModel, []

    def make(*args, **kwargs):
        model = model_of(*args, **kwargs)
        layer = model.decoder.layers[0].mlp.linear_fc1
        old = layer.weight
        layer.weight = torch.nn.Parameter(kind(old))
        vars(layer.weight).update(vars(old))
        wrapped.append(layer.weight)
        return model

    gpt_training.GPTModel = make
    trainer = make_trainer(tp=2)
    if rank == 1:
        wrapped[0].payload[3, 2] = math.nan
    verdict, run_dir = verdict_of(trainer, **options)
    c = trainer.coordinates
    ledger = run_dir / f"ledger_tp{c['tp']}pp{c['pp']}dp{c['dp']}.jsonl"
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    (coverage,) = [r for r in records if r["record"] == "coverage" and r["phase"] == "params_before"]
    names = {r["id"]: r["name"] for r in records if r["record"] == "parameter"}
    notes = [r["text"] for r in records if r["record"] == "note"]
    return verdict, [names[i] for i in coverage["parameters"]], notes


@pytest.mark.parametrize("options", [{}, {"rerun": False}], ids=["rerun", "no rerun"])
def test_a_bad_value_in_a_weight_that_can_be_dequantised_is_a_bad_weight(options):
    ranks = run_ranks(2, with_wrapped_weight, Quantized, options)
    for verdict, scanned, notes in ranks:
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["parameter"]) == ("bad_weight", WEIGHT)
        assert origin["candidates"] == [1]
        assert WEIGHT in scanned
        assert any("scanned after dequantising" in note and WEIGHT in note for note in notes)


def test_a_weight_that_nothing_can_dequantise_is_no_error_and_not_covered():
    for verdict, scanned, notes in run_ranks(2, with_wrapped_weight, Sealed, {}):
        assert verdict["origins"], verdict
        assert WEIGHT not in scanned and scanned
        assert any("not scanned" in note and WEIGHT in note for note in notes)


# ---- crossings that cannot be scanned ----


def gather_bytes(x, group):
    payload = x.detach().to(torch.float8_e4m3fn).view(torch.uint8).contiguous()
    gathered = payload.new_empty(2 * payload.numel())
    dist.all_gather_into_tensor(gathered, payload.view(-1), group=group)


def exchange_bytes(x, group):
    payload = x.detach().to(torch.float8_e4m3fn).view(torch.uint8).reshape(-1)
    dist.all_to_all_single(torch.empty_like(payload), payload, group=group)


CROSSES = {"gathered": gather_bytes, "exchanged": exchange_bytes, "nothing": None}


def with_bytes_that_cross(rank, world_size, how, is_overlapped):
    trainer = make_trainer(tp=2)
    from megatron.core import parallel_state

    group, crosses = parallel_state.get_tensor_model_parallel_group(), CROSSES[how]
    trainer.transformer_config.tp_comm_overlap = is_overlapped

    def before(module, arguments):
        if crosses is not None:
            crosses(arguments[0], group)
        if rank == 1 and trainer.microbatch == 0:
            bad = arguments[0].clone()
            bad.view(-1)[5] = math.nan
            return (bad, *arguments[1:])

    trainer.layer(1).mlp.linear_fc2.register_forward_pre_hook(before)
    verdict, _ = verdict_of(trainer, rerun=False)
    return verdict


@pytest.mark.parametrize(
    ("how", "is_overlapped", "candidates", "certainty", "received"),
    [
        ("nothing", False, [1], "high", "received_finite_before"),
        ("gathered", False, [1], "medium", "received_unseen_before"),
        ("exchanged", False, [0, 1], "low", "received_unseen_before"),
        ("nothing", True, [0, 1], "low", "received_unseen_before"),  # userbuffers
    ],
)
def test_a_rank_is_accused_only_as_far_as_what_it_received_was_scanned(
    how, is_overlapped, candidates, certainty, received
):
    first, second = run_ranks(2, with_bytes_that_cross, how, is_overlapped)
    assert first == second
    (origin,) = first["origins"]
    assert origin["phase"] == "forward"
    assert origin["candidates"] == candidates
    assert origin["place_confidence"] == certainty, origin
    kinds = {fact["kind"] for fact in origin["facts"]}
    assert received in kinds
    assert not {"received_finite_before", "received_unseen_before"} - {received} & kinds


# ---- CUDA graphs ----


def with_graph_scope(rank, world_size, scopes):
    trainer = make_trainer(tp=2)
    from megatron.core.transformer.enums import CudaGraphScope

    import nanlocator.megatron

    trainer.transformer_config.cuda_graph_impl = "local"
    trainer.transformer_config.cuda_graph_scope = [CudaGraphScope[scope] for scope in scopes]
    try:
        nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer).remove()
    except nanlocator.UsageError as error:
        return str(error)
    return None


def test_a_graph_of_the_whole_iteration_is_refused_with_what_to_do_and_graphs_of_layers_are_not():
    for text in run_ranks(2, with_graph_scope, ["full_iteration"]):
        assert "cuda_graph_scope" in text and "omit --cuda-graph-scope full_iteration" in text
    assert run_ranks(2, with_graph_scope, ["attn"]) == [None, None]


def with_graph_of_a_layer(rank, world_size):
    """A stand-in replays the graph: it calls the layer and counts."""
    trainer = make_trainer(tp=2)
    layer = trainer.model_chunks[0].module.decoder.layers[1]
    replays = []

    class Manager(torch.nn.Module):
        def __call__(self, module, args, kwargs):
            replays.append(torch.is_grad_enabled())
            return torch.nn.Module.__call__(module, *args, **kwargs)

    layer.cudagraph_manager = Manager()
    with torch.no_grad():
        layer.mlp.linear_fc1.bias.fill_(math.inf)
    verdict, _ = verdict_of(trainer)
    return verdict, len(replays), hasattr(layer, "cudagraph_manager")


def test_a_layer_that_runs_from_a_graph_is_executed_again_without_it():
    for verdict, replays, is_graphed in run_ranks(2, with_graph_of_a_layer):
        assert (replays, is_graphed) == (SMALL["num_microbatches"], True)
        assert any(text.startswith("CUDA graphs: 1 module") for text in verdict["rerun"]["not_restored"])
        assert {origin["cause"] for origin in verdict["origins"]} == {"bad_weight"}


# ---- kernels and compiled functions ----


def phrases_about_operators(rank, world_size):
    """Keys: whether a step may be executed again."""
    from nanlocator.megatron import configuration

    trainer = make_trainer()
    (chunk,) = trainer.model_chunks
    configuration.get_model_config(chunk).bias_dropout_fusion = True
    linear = type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})
    chunk.module.add_module("of_the_engine", linear())
    return {
        rerun: [
            phrase
            for phrase in configuration.not_covered(
                [chunk],
                trainer.optimizer,
                types.SimpleNamespace(level="boundaries", rerun=rerun, check_params=False),
            )
            if "TransformerEngine's kernels" in phrase or "Megatron compiles" in phrase
        ]
        for rerun in ("on_bad", "never")
    }


def test_a_rerun_names_kernels_and_the_operators_of_compiled_functions():
    (phrases,) = run_ranks(1, phrases_about_operators)
    (of_kernels,) = phrases["on_bad"]
    assert "places inside" in of_kernels and "names the kernel" in of_kernels
    assert any("a re-run would see them" in phrase for phrase in phrases["never"])
