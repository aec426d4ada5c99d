"""The checkpoints that a loop saves and loads by itself: the block names the one to load."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import nanlocator

SAVE, LOAD = torch.save, torch.load


def train(save, first=1, *, bad_step=6, poison=None, before=None):
    """Calls ``save(model, number)`` after each second update, with the loop's own number of the step. Returns
    the verdict of ``bad_step``; ``poison`` makes the weights bad after it instead of its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        if before is not None:
            before(model)
        for step in range(1, 12):
            data = torch.randn(4, 4)
            if step == bad_step and poison is None:
                data[0, 0] = float("nan")
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == bad_step and poison is not None:
                poison(model)
            if step % 2 == 0:
                save(model, first - 1 + step)
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    pytest.fail("nothing was found")


def row(verdict, name):
    return " ".join(dict(verdict["narrative"]["rows"])[name].split())


def by_torch(model, number):
    Path("saved").mkdir(exist_ok=True)
    torch.save(model.state_dict(), f"saved/model_step{number}.pt")


def by_folder(model, number):
    folder = Path("saved", f"checkpoint-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.pt").open("wb") as file:
        torch.save(model.state_dict(), file)


def by_dcp(model, number):
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"saved/step_{number}")


def by_safetensors(model, number):
    folder = Path("saved", f"checkpoint-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")


def test_a_name_without_a_step_is_told_as_it_is():
    verdict = train(lambda model, number: torch.save(model.state_dict(), f"model_{number}.pt"))
    assert f"its latest, by a name without a step, is {Path.cwd() / 'model_4.pt'}" in row(
        verdict, "checkpoint"
    )
    assert verdict["launch"]["saved"] == str(Path.cwd() / "model_4.pt")


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (by_torch, "model_step4.pt"),
        (by_folder, "checkpoint-4"),
        (by_dcp, "step_4"),
        (by_safetensors, "checkpoint-4"),
    ],
)
def test_the_newest_that_it_saved_is_named(save, name):
    verdict = train(save)
    assert row(verdict, "checkpoint").startswith(
        f"LOAD {Path.cwd() / 'saved' / name} (after step 4, the newest)"
    )
    assert (torch.save, torch.load) == (SAVE, LOAD)


def test_what_has_no_weights_is_no_checkpoint():
    def save(model, number):
        by_torch(model, number)
        Path("samples").mkdir(exist_ok=True)
        torch.save({"outputs": torch.zeros(4)}, f"samples/outputs_step{number}.pt")

    assert "saved/model_step4.pt" in row(train(save), "checkpoint")


def test_numbers_that_count_no_updates_are_not_compared_with_them():
    verdict = train(
        lambda model, number: by_torch(model, 8 * number),
        bad_step=8,
        poison=lambda model: model[0].weight.data.fill_(float("nan")),
    )
    assert verdict["launch"]["steps_before"] is None
    assert "model_step64.pt" not in row(verdict, "checkpoint").replace("NEVER LOAD model_step64.pt", "")


def test_torch_save_can_be_sent_to_another_process():
    model = nn.Linear(2, 2)
    watch = nanlocator.watch(model, torch.optim.SGD(model.parameters(), 0.1))
    try:
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    finally:
        watch.remove()


@pytest.mark.parametrize("first", [0, 801])
def test_names_that_count_otherwise_are_compared_by_when_they_were_saved(first):
    """From 0, or on from a run whose checkpoint was loaded before the watch."""
    verdict = train(
        by_torch, first, bad_step=8, poison=lambda model: model[0].weight.data.fill_(float("nan"))
    )
    assert verdict["launch"]["steps_before"] == first - 1
    said = row(verdict, "checkpoint")
    assert f"NEVER LOAD model_step{first + 7}.pt" in said  # written after the update of step 8
    assert f"LOAD {Path.cwd()}/saved/model_step{first + 5}.pt" in said


def test_what_was_saved_with_weights_that_had_grown_is_never_to_be_loaded():
    verdict = train(by_torch, bad_step=8, poison=lambda model: model[2].weight.data.mul_(1e38))
    said = row(verdict, "checkpoint")
    assert "NEVER LOAD model_step8.pt (its weights have grown)" in said
    assert "model_step6.pt (after step 6): finite, and its largest weight" in said


def test_a_bad_checkpoint_that_was_loaded_before_anything_was_saved_is_named():
    def load(model):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        Path("old").mkdir()
        SAVE(weights, "old/step_600.pt")
        weights["2.bias"][0] = float("nan")
        SAVE(weights, "old/step_700.pt")
        model.load_state_dict(torch.load("old/step_700.pt"))

    verdict = train(lambda model, number: None, bad_step=1, poison=lambda model: None, before=load)
    assert "step_700.pt, which this run had loaded: 2.bias holds NaN" in row(verdict, "cause")
    assert "old/step_600.pt" in row(verdict, "checkpoint")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_checkpoint_that_it_loaded_is_the_one_that_is_looked_at(is_sharded):
    def load(model):
        weights = {"model": {name: value.clone() for name, value in model.state_dict().items()}}
        weights["model"]["2.bias"][0] = float("nan")
        if is_sharded:
            dcp.save(weights, checkpoint_id="old/step_700")
            dcp.load(weights, checkpoint_id="old/step_700")
        else:
            Path("old").mkdir()
            torch.save(weights, "old/step_700.pt")
            weights = torch.load("old/step_700.pt")
        model.load_state_dict(weights["model"])

    verdict = train(by_torch, bad_step=1, poison=lambda model: None, before=load)
    assert verdict["launch"]["loaded"] == ("step_700" if is_sharded else "step_700.pt")
    assert "which this run had loaded: " in row(verdict, "cause")
