"""A watch that sees nothing reports that after the first step, and a healthy one reports nothing: real
Megatron-Core, two to four ranks of gloo."""

import json
from functools import partial
from pathlib import Path

import pytest
from fixtures import run_in_tmp_path  # noqa: F401
from ranks import RankServer
from torch._C._distributed_c10d import ProcessGroup

# gpt_training redirects Megatron's CUDA to the CPU before it imports it.
run_ranks = RankServer("torch._dynamo", "gpt_training").run_ranks
SMALL = {"hidden": 32, "sequence": 16, "num_microbatches": 2, "layers": 2}
SAID = "expected in the first step but not seen"


def first_steps(rank, world_size, training, blind=None, fault=None):
    """The reports of two steps; `blind` makes nanlocator miss something, `fault` spoils the second step."""
    import contextlib
    import io

    from faults import attach, make_fault
    from gpt_training import Trainer, TrainingConfig
    from megatron.core.pipeline_parallel import schedules

    import nanlocator.megatron

    trainer = Trainer(TrainingConfig(**SMALL | training))
    watched = [ProcessGroup, schedules, type(trainer.optimizer), trainer.optimizer]
    watched += trainer.model_chunks
    if not trainer.config.megatron_fsdp:
        watched += trainer.bucket_groups()
    before = [dict(vars(each)) for each in watched]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if blind is not None:
            blind(trainer)
        locator = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer, on_bad="report")
        if fault is not None:
            attach([make_fault(**fault)], trainer)
        trainer.train(2)
        run_dir, verdicts = Path(locator.run_dir), list(locator.verdicts)
        locator.remove()
    added = [set(vars(each)) ^ set(held) for each, held in zip(watched, before, strict=True)]
    changed = [
        name
        for each, held in zip(watched[:3], before, strict=False)  # the classes and the module
        for name, value in held.items()
        if vars(each).get(name) is not value
    ]
    hooks = [name for names in added for name in names if "grad_sync" in name or name.startswith("_nan")]
    run = json.loads((run_dir / "run.json").read_text())
    lines = [line for line in said.getvalue().splitlines() if SAID in line]
    return {"lines": lines, "not_covered": run["not_covered"], "verdicts": verdicts, "left": changed + hooks}


HEALTHY = {
    "data_parallel": (2, {}),
    "overlapped_distributed_optimizer": (
        2,
        {
            "use_distributed_optimizer": True,
            "precision": "bf16",
            "overlap_grad_reduce": True,
            "bucket_size": 3000,
        }
        | {"overlap_param_gather": True},
    ),
    "fp16": (2, {"tp": 2, "precision": "fp16", "initial_loss_scale": 1.0}),
    "tensor_and_pipeline_parallel": (4, {"tp": 2, "pp": 2}),
    "sequence_parallel_recomputed": (2, {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    "context_parallel": (2, {"cp": 2, "rope": True, "cp_comm_type": "p2p"}),
    "megatron_fsdp": (2, {"use_distributed_optimizer": True, "megatron_fsdp": "optim_grads_params"}),
    "interleaved_pipeline": (2, {"pp": 2, "vp": 2, "layers": 4}),
    "experts_alltoall": (2, {"num_experts": 4, "ep": 2}),
    "experts_allgather": (
        4,
        {"num_experts": 4, "ep": 2, "tp": 2, "sequence_parallel": True, "token_dispatcher": "allgather"},
    ),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("layout", HEALTHY)
def test_in_a_healthy_step_nothing_is_missed_and_the_process_is_left_as_it_was(layout):
    ranks, training = HEALTHY[layout]
    for result in run_ranks(ranks, first_steps, training):
        assert result["lines"] == [], result["lines"]
        assert not [text for text in result["not_covered"] if "reduction" in text or "group" in text]
        assert result["left"] == []


def hide(names, trainer):
    """Imitates a torch whose distributed functions call unknown methods of ProcessGroup."""
    from nanlocator.exchange import boundaries

    for name in names:
        boundaries.COLLECTIVES.pop(name, None)


def without_the_hook_of_the_first_bucket(trainer):
    """Imitates a Megatron-Core that starts the reduction under another name."""
    group = trainer.bucket_groups()[0]
    start = type(group).start_grad_sync
    finish = type(group).finish_grad_sync

    class Renamed(type(group)):
        def begin(self, *args, **kwargs):
            return start(self, *args, **kwargs)

        def finish_grad_sync(self, *args, **kwargs):
            self.start_grad_sync = self.begin
            return finish(self, *args, **kwargs)

    group.__class__ = Renamed


BLIND = {
    "reduce_scatter": (
        2,
        {"tp": 2, "sequence_parallel": True},
        partial(hide, ["_reduce_scatter_base", "reduce_scatter_single"]),
        "the reduce-scatters of sequence parallelism (group tp)",
    ),
    "all_gather": (
        2,
        {"tp": 2, "sequence_parallel": True},
        partial(hide, ["_allgather_base", "all_gather_single"]),
        "the all-gathers of sequence parallelism (group tp)",
    ),
    "all_reduce": (
        2,
        {"tp": 2},
        partial(hide, ["allreduce"]),
        "the all-reduces of tensor parallelism (group tp)",
    ),
    "all_to_all": (
        2,
        {"num_experts": 4, "ep": 2},
        partial(hide, ["alltoall_base", "all_to_all_single"]),
        "the token exchanges between experts (group ep or tp_ep)",
    ),
    "context_parallel": (
        2,
        {"cp": 2, "rope": True, "cp_comm_type": "a2a"},
        partial(hide, ["alltoall_base", "all_to_all_single"]),
        "the exchanges of context parallelism (group cp or hcp or tp_cp)",
    ),
    "bucket": (
        2,
        {"overlap_grad_reduce": False},
        without_the_hook_of_the_first_bucket,
        " before their data-parallel reduction",
    ),
}


@pytest.mark.parametrize("case", BLIND)
def test_what_was_not_seen_is_said_once_and_stands_in_the_run_and_in_later_verdicts(case):
    ranks, training, blind, words = BLIND[case]
    fault = {"name": "forward_operator", "kind": "log", "region": "attention"} | {
        "rank": 1,
        "layer": 1,
        "iteration": 2,
    }
    first, *others = run_ranks(ranks, first_steps, training, blind, fault)
    (line,) = first["lines"]
    assert words in line
    assert all(result["lines"] == [] for result in others)  # of the same pipeline stage
    assert any(words in text for text in first["not_covered"])
    for result in (first, *others):
        (verdict,) = result["verdicts"]
        assert any(words in note for note in verdict["notes"]), verdict["notes"]
