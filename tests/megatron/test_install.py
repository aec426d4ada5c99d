"""install(): names and ids against Megatron's own groups, wrong calls, removal. Two or four gloo ranks."""

import json
import os
from pathlib import Path

import pytest
from fixtures import run_in_tmp_path  # noqa: F401
from ranks import RankServer

# gpt_training redirects Megatron's CUDA to the CPU before it imports it.
run_ranks = RankServer("torch._dynamo", "gpt_training").run_ranks
SMALL = {"hidden": 32, "sequence": 16, "num_microbatches": 2}


def make_trainer(**training):
    from gpt_training import Trainer, TrainingConfig

    return Trainer(TrainingConfig(**{**SMALL, **training}))


LAYOUTS = {
    "fp32": {"tp": 2, "pp": 2},
    "bf16": {"pp": 2, "precision": "bf16"},
    "distributed_in_megatron_fsdp": {
        "use_distributed_optimizer": True,
        "megatron_fsdp": "optim_grads_params",
    },
    "distributed_optimizer": {"pp": 2, "precision": "bf16", "use_distributed_optimizer": True},
}


def ids_and_megatrons_groups(rank, world_size, training):
    trainer = make_trainer(**training)
    from megatron.core.optimizer import _get_param_groups

    import nanlocator.megatron

    locator = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer)
    groups = _get_param_groups(trainer.model_chunks, trainer.optimizer.config, None)
    raw_names = {p: n for chunk in trainer.model_chunks for n, p in chunk.named_parameters()}
    global_names = {p: n for n, p in trainer.parameters.items()}  # the trainer numbers layers itself
    in_order = [p for group in groups for p in group["params"]]
    c = trainer.coordinates
    suffix = f"tp{c['tp']}pp{c['pp']}dp{c['dp']}.json"
    return {
        "raw_names": [raw_names[p] for p in in_order],
        "names": [global_names[p] for p in in_order],
        "shapes": [list(p.shape) for p in in_order],
        "numels": [p.numel() for p in in_order],
        "duplicates": [not getattr(p, "tensor_model_parallel", False) for p in in_order],
        "map": (Path(locator.run_dir) / f"param_id_name_map_{suffix}").read_text(),
        "manifest": json.loads((Path(locator.run_dir) / f"param_manifest_{suffix}").read_text()),
        "replica": (c["tp"], c["pp"]),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_are_positions_in_megatrons_groups_and_the_map_is_what_json_dumps_writes(name):
    ranks = run_ranks(4, ids_and_megatrons_groups, LAYOUTS[name])
    owned: dict[tuple, list[int]] = {}
    for rank in ranks:
        assert rank["map"] == json.dumps({str(i): n for i, n in enumerate(rank["names"])})
        entries = rank["manifest"]["parameters"]
        assert [e["id"] for e in entries] == list(range(len(rank["names"])))
        assert [e["raw_name"] for e in entries] == rank["raw_names"]
        assert [e["shape"] for e in entries] == rank["shapes"]
        if LAYOUTS[name].get("tp", 1) > 1:
            assert [e["is_tp_duplicate"] for e in entries] == rank["duplicates"]
        for e, numel in zip(entries, rank["numels"], strict=True):
            shard = e["shard"]
            begin, end = (shard["begin"], shard["end"]) if shard else (0, numel)
            owned.setdefault((rank["replica"], e["name"]), []).extend(range(begin, end))
    for (_, parameter), elements in owned.items():
        copies = 2 if LAYOUTS[name].get("tp", 1) == 1 and "distributed" not in name else 1
        assert len(elements) == copies * len(set(elements)), parameter
        assert set(elements) == set(range(len(set(elements)))), parameter


def wrong_calls(rank, world_size):
    trainer = make_trainer()
    import nanlocator.megatron

    install = nanlocator.megatron.install
    texts = []
    for call in (
        lambda: install(trainer.model_chunks, trainer.optimizer, level="everything"),
        lambda: install(trainer.model_chunks, trainer.optimizer, rerun="often"),
        lambda: install(trainer.model_chunks, trainer.optimizer, on_bad="recover", rerun=False),
        lambda: install(trainer.model_chunks[0].module, trainer.optimizer),
        lambda: install(trainer.model_chunks, trainer.optimizer.chained_optimizers[0]),
        lambda: install(trainer.model_chunks, trainer.optimizer, on_bad="explode"),
        lambda: nanlocator.watch(trainer.model_chunks, trainer.optimizer),
        lambda: nanlocator.LocatingOptimizer(trainer.optimizer, trainer.model_chunks[0]),
        lambda: [install(trainer.model_chunks, trainer.optimizer) for _ in range(2)],
    ):
        try:
            call()
            texts.append("")
        except nanlocator.UsageError as error:
            texts.append(str(error))
    return texts


def test_wrong_calls_explain_themselves_on_every_rank_alike():
    first, second = run_ranks(2, wrong_calls)
    assert first == second
    expected = (
        "'everything'",
        "'often'",
        "needs rerun=True",
        "DistributedDataParallel",
        "ChainedOptimizer",
        "'explode'",
        "nanlocator.megatron.install(model_chunks, optimizer)",
        "wraps a torch.optim.Optimizer",
        "already",
    )
    assert all(words in text for words, text in zip(expected, first, strict=True)), first


def options_that_differ(rank, world_size):
    trainer = make_trainer()
    import nanlocator.megatron

    os.environ["NANLOCATOR_CHECK_PARAMS"] = str(rank)
    nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer)


def test_options_that_differ_between_ranks_are_refused_on_both():
    first, second = run_ranks(2, options_that_differ)
    assert first == second
    assert first[0] == "AgreementError" and "check_params" in first[1]


def install_remove_install(rank, world_size, level, training):
    trainer = make_trainer(check_for_nan_in_grad=False, **training)
    from megatron.core import rerun_state_machine
    from megatron.core.pipeline_parallel import schedules
    from torch.distributed import ProcessGroup

    import nanlocator.megatron

    def hooks():
        modules = [module for chunk in trainer.model_chunks for module in chunk.modules()]
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        on_parameters = [len(p._post_accumulate_grad_hooks or {}) for p in trainer.parameters.values()]
        return [[len(getattr(module, kind)) for kind in kinds] for module in modules], on_parameters

    machine = rerun_state_machine.get_rerun_state_machine()
    targets = [trainer.optimizer, *trainer.model_chunks]
    if trainer.config.megatron_fsdp:
        (chunk,) = trainer.model_chunks
        targets += [chunk.module, chunk.module.grad_reduce_pipeline, chunk.param_and_grad_buffer]
    else:
        targets += trainer.bucket_groups()
    targets += [schedules, ProcessGroup, machine]
    before, hooks_before = [dict(vars(target)) for target in targets], hooks()
    is_changed = []
    for _ in range(2):  # new ones, and after steps
        locator = nanlocator.megatron.install(
            trainer.model_chunks, trainer.optimizer, level=level, check_params=True
        )
        is_changed.append(any(vars(t) != old for t, old in zip(targets, before, strict=True)))
        locator.remove()
        assert [set(vars(target)) for target in targets] == [set(old) for old in before]
        for target, old in zip(targets, before, strict=True):
            assert [key for key, value in old.items() if vars(target)[key] is not value] == []
        assert hooks() == hooks_before
        trainer.train(2)
        before, hooks_before = [dict(vars(target)) for target in targets], hooks()
    again = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer, level=level)
    trainer.train(2)
    return is_changed, Path(again.run_dir).name, again.verdicts


@pytest.mark.parametrize(
    ("level", "training"),
    [
        ("grads", {}),
        ("boundaries", {}),
        ("modules", {}),
        ("boundaries", {"use_distributed_optimizer": True, "megatron_fsdp": "optim_grads_params"}),
    ],
    ids=["grads", "boundaries", "modules", "megatron_fsdp"],
)
def test_remove_puts_everything_back_and_it_can_be_installed_again(level, training):
    assert run_ranks(2, install_remove_install, level, training) == [([True, True], "a2", [])] * 2
