"""Folders as the real libraries write them: each rank's, each framework's, and a run's with several."""

import json
import math
import os
import shutil

import pytest
import saved_shards
import torch
import transformers
from checkpoints import contents, found, trained
from ranks import RankServer
from safetensors.torch import save_file
from tiny_models import language_model

from nanlocator import check_checkpoint

_shards = RankServer("saved_shards")
_megatron = RankServer("saved_megatron")


def unread(path):
    return [f"{each.what}: {each.reason}" for each in check_checkpoint(path).checkpoints[0].unread]


def unfailed(results):
    assert results == [None] * len(results)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for world_size in (1, 2):
        for is_bad in (True, False):
            path = str(folder / f"{world_size}{'bad' if is_bad else 'good'}")
            unfailed(_shards.run_ranks(world_size, saved_shards.save, path, is_bad))
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_are_joined_and_elements_have_the_whole_tensors_index(sharded, world_size):
    assert found(sharded / f"{world_size}good") == set()
    assert contents(sharded / f"{world_size}good") == ("finite", "finite")
    assert found(sharded / f"{world_size}bad") == {
        ("nonfinite", "model.2.weight", (6, 1)),
        ("nonfinite", "optim.state.0.weight.exp_avg", (7, 7)),
    }
    (checkpoint,) = check_checkpoint(sharded / f"{world_size}bad", parameters=["model.2.weight"]).checkpoints
    (row,) = (each for each in checkpoint.tensors if each.is_selected)
    model, _ = trained()
    expected = model[2].weight.detach().double()
    expected[6, 1] = 0
    assert row.statistics.numel == 64
    assert row.statistics.sum_of_squares == pytest.approx(float(expected.square().sum()))


def test_a_missing_and_a_truncated_file_of_shards_leave_their_tensors_unread(sharded, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sharded / "2good", folder)
    first, second = sorted(folder.glob("*.distcp"))
    os.truncate(second, second.stat().st_size // 2)
    os.unlink(first)
    texts = unread(folder)
    assert any("cannot be opened" in text for text in texts) and any("truncated" in text for text in texts)
    assert check_checkpoint(folder).exit_code == 3


def test_shards_without_metadata_are_an_unfinished_save(sharded, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sharded / "2good", folder)
    os.unlink(folder / ".metadata")
    assert all("the save did not finish" in text for text in unread(folder))


def test_metadata_that_names_a_file_elsewhere_is_refused(sharded, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sharded / "1good", folder)
    content = (folder / ".metadata").read_bytes()
    assert b"__0_0.distcp" in content
    (folder / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../../passwd"))
    assert all("outside of its folder" in text for text in unread(folder))


def test_metadata_with_foreign_classes_is_refused_and_not_imported(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    (text,) = unread(tmp_path / "c")
    assert "posix.mkdir where Metadata is expected" in text and not (tmp_path / "executed").exists()


# --- Megatron-Core --------------------------------------------------------------------------------


def _save_megatron(*arguments):
    import saved_megatron

    saved_megatron.save(*arguments)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Checkpoints of two tensor-parallel ranks: healthy, with a NaN in layer 2, with a flipped bit in
    layer 1."""
    root = tmp_path_factory.mktemp("megatron")
    faults = {
        "healthy": [],
        "nan": [("decoder.layers.2.mlp.linear_fc1.weight", [3, 4], math.nan)],
        "flipped": [("decoder.layers.1.mlp.linear_fc2.weight", [0, 0], 1e30)],
    }
    unfailed(_megatron.run_ranks(2, _save_megatron, str(root), faults))
    return root


@pytest.mark.megatron
def test_megatrons_checkpoints_are_read_in_both_layouts(megatron):
    for layout in ("torch_dist", "legacy"):
        assert found(megatron / "healthy" / layout) == set(), layout
        assert contents(megatron / "healthy" / layout) == ("finite", "finite"), layout
        (checkpoint,) = check_checkpoint(megatron / "healthy" / layout).checkpoints
        assert checkpoint.iteration == 20 and "latest_checkpointed_iteration.txt" in checkpoint.chosen
        assert check_checkpoint(megatron / "healthy" / layout / "iter_0000020").is_safe


@pytest.mark.megatron
def test_megatrons_stacked_layers_have_the_layer_in_the_index(megatron):
    """The fault is in the second half of the tensor's 64 rows, which are divided over the ranks."""
    expected = {("nonfinite", "decoder.layers.mlp.linear_fc1.weight", (2, 35, 4))}
    assert found(megatron / "nan" / "torch_dist") == expected


@pytest.mark.megatron
def test_megatrons_legacy_layout_names_the_ranks_file(megatron):
    (checkpoint,) = check_checkpoint(megatron / "nan" / "legacy").checkpoints
    (finding,) = checkpoint.findings
    assert finding.tensor.name == "model.decoder.layers.2.mlp.linear_fc1.weight"
    assert finding.tensor.file == "mp_rank_01/model_optim_rng.pt" and finding.tensor.statistics.first_bad == (
        3,
        4,
    )


@pytest.mark.megatron
def test_a_flipped_bit_stands_out_among_the_layers(megatron):
    (checkpoint,) = check_checkpoint(megatron / "flipped" / "torch_dist").checkpoints
    (finding,) = checkpoint.findings
    assert (finding.kind, finding.layer) == ("outlier", 1)
    assert finding.tensor.name == "decoder.layers.mlp.linear_fc2.weight"
    (checkpoint,) = check_checkpoint(megatron / "flipped" / "legacy").checkpoints
    (finding,) = checkpoint.findings
    assert (finding.kind, finding.tensor.name) == ("outlier", "model.decoder.layers.1.mlp.linear_fc2.weight")
    assert checkpoint.contents["weights"] == "suspect" and not checkpoint.is_safe


@pytest.mark.megatron
def test_a_tracker_without_its_checkpoint_is_said(megatron, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(megatron / "healthy" / "legacy", root)
    (root / "latest_checkpointed_iteration.txt").write_text("30\n")
    report = check_checkpoint(root)
    assert report.exit_code == 3
    assert "names iter_0000030, which is not there: there is iter_0000020" in report.problem
    (root / "latest_checkpointed_iteration.txt").write_text("20\n")
    (root / "iter_0000040").mkdir()
    (checkpoint,) = check_checkpoint(root).checkpoints
    assert checkpoint.iteration == 20 and "iter_0000040 is newer" in checkpoint.notes[0]


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory):
    """Two checkpoints of the real Trainer."""
    folder = tmp_path_factory.mktemp("trainer")
    model = language_model("gpt2")
    data = [{"input_ids": torch.arange(8) % 60, "labels": torch.arange(8) % 60} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
    )
    transformers.Trainer(model, arguments, train_dataset=data).train()
    return folder


def test_the_trainers_checkpoints_are_finite(trainer_run):
    report = check_checkpoint(trainer_run)
    (checkpoint,) = report.checkpoints
    assert checkpoint.path.endswith("checkpoint-4") and checkpoint.layout == "Hugging Face Trainer"
    assert checkpoint.contents == {"weights": "finite", "optimizer": "finite"}
    assert not checkpoint.unread and not checkpoint.findings and report.exit_code == 0
    assert report.others == ["checkpoint-2"]
    assert checkpoint.largest_before.checkpoint.endswith("checkpoint-2")


def test_a_bad_moment_of_the_trainers_is_the_optimizers(trainer_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trainer_run, folder)
    file = folder / "checkpoint-4" / "optimizer.pt"
    state = torch.load(file)
    state["state"][3]["exp_avg_sq"].view(-1)[5] = math.nan
    torch.save(state, file)
    assert contents(folder) == ("finite", "bad")
    report = check_checkpoint(folder, which="all")
    assert [each.is_safe for each in report.checkpoints] == [False, True] and report.exit_code == 1
    assert check_checkpoint(folder / "checkpoint-2").exit_code == 0


def test_a_weight_that_grew_a_hundredfold_is_found_beside_the_checkpoint_before(trainer_run, tmp_path):
    from safetensors.torch import load_file

    folder = tmp_path / "run"
    shutil.copytree(trainer_run, folder)
    file = folder / "checkpoint-4" / "model.safetensors"
    weights = load_file(file)
    weights["transformer.h.0.mlp.c_fc.weight"] *= 1000
    save_file(weights, file, metadata={"format": "pt"})
    assert found(folder) == {("grew", "transformer.h.0.mlp.c_fc.weight", None)}
    assert found(folder, compare=None) == set()
    assert found(folder / "checkpoint-4", compare=folder / "checkpoint-2") == found(folder)


def test_a_missing_shard_of_an_index_is_said(tmp_path):
    model = language_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and check_checkpoint(tmp_path).exit_code == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    names = [name for name, of in index.items() if of == shards[1].name]
    os.unlink(shards[1])
    (text,) = unread(tmp_path)
    assert names[0] in text and f"it is in {shards[1].name}, which is not there" in text


# --- DeepSpeed, Lightning, accelerate -------------------------------------------------------------


def _save_deepspeed(rank, world_size, folder, stage):
    """Two checkpoints: in the second, one of rank 1's master weights is bad."""
    from engine_training import Training

    training = Training(rank, f"zero{stage}_bf16", watched=False)
    x = torch.randn(6, 4, dtype=torch.bfloat16)
    for _ in range(2):
        training.engine.backward(training.engine(x).float().sum())
        training.engine.step()
    training.engine.save_checkpoint(folder)
    optimizer = training.engine.optimizer
    masters = (
        optimizer.single_partition_of_fp32_groups if stage == 1 else optimizer.fp32_partitioned_groups_flat
    )
    if rank == 1:
        masters[0].data.view(-1)[3] = math.nan
    training.engine.save_checkpoint(folder, tag="bad")


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_checkpoints_are_read(tmp_path, stage):
    import on_cpu

    if not (on_cpu.PACKAGES / "deepspeed").is_dir():
        pytest.skip("needs what tools/setup fetches into .setup/deepspeed")
    folder = tmp_path / "run"
    unfailed(on_cpu.run_ranks(2, _save_deepspeed, str(folder), stage))
    (checkpoint,) = check_checkpoint(folder / "global_step2").checkpoints
    assert checkpoint.contents == {"weights": "finite", "optimizer": "finite"}, checkpoint.unread
    assert checkpoint.layout == "DeepSpeed" and not checkpoint.unread
    (checkpoint,) = check_checkpoint(folder).checkpoints
    assert checkpoint.path.endswith("bad") and "latest" in checkpoint.chosen
    assert checkpoint.contents == {"weights": "bad", "optimizer": "finite"}
    (finding,) = checkpoint.findings
    assert "fp32" in finding.tensor.name and "zero_pp_rank_1_" in finding.tensor.file
    assert finding.tensor.statistics.first_bad == (3,)


def test_of_a_folder_of_lightnings_the_last_is_chosen(tmp_path):
    """Its layout: state_dict, optimizer_states, callbacks, loops."""
    model, optimizer = trained()

    def save(name):
        state = {
            "epoch": 1,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": model.state_dict(),
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{}": {"best_model_score": torch.tensor(math.inf)}},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [{"last_epoch": 2, "_last_lr": [1e-3]}],
        }
        torch.save(state, tmp_path / name)

    save("epoch=0-step=1.ckpt")
    model[1].weight.data[0, 0] = math.nan
    save("last.ckpt")
    report = check_checkpoint(tmp_path)
    (checkpoint,) = report.checkpoints
    assert checkpoint.path.endswith("last.ckpt") and "last.ckpt" in checkpoint.chosen
    assert checkpoint.contents == {"weights": "bad", "optimizer": "finite"}
    assert report.others == ["epoch=0-step=1.ckpt"]
    assert [each.is_safe for each in check_checkpoint(tmp_path, which="all").checkpoints] == [False, True]


def test_accelerates_state_is_read(tmp_path):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    _, optimizer = accelerator.prepare(*trained())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.save_state(str(tmp_path / "state"))
    assert contents(tmp_path / "state") == ("finite", "finite")
    assert check_checkpoint(tmp_path / "state").exit_code == 0, unread(tmp_path / "state")
