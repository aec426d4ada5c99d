"""Parameters that are wrapper subclasses, in plain training: scanned after dequantising, or reported as left
out, and never an error."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from wrapper_tensors import Quantized, Sealed, replace_weight

from nanlocator import LocatingOptimizer, NonFiniteGradientError


def make_model(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    return model, replace_weight(model[1], kind)


def stopped(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    return raised.value.verdict


def ids_scanned(phase):
    lines = Path("nanlocator_run/a0/ledger_tp0pp0dp0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (coverage,) = [r for r in records if r["record"] == "coverage" and r["phase"] == phase]
    notes = [r["text"] for r in records if r["record"] == "note"]
    return coverage["parameters"], notes


@pytest.mark.parametrize("kind", [Quantized, Sealed])
@pytest.mark.parametrize("level", ["grads", "modules", "operators"])
def test_healthy_training_goes_on_and_finds_nothing(kind, level):
    model, weight = make_model(kind)
    optimizer = LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), model, check_params=True, level=level
    )
    before = weight._values()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.clip_grad_norm(10.0)
        optimizer.step()
    assert optimizer.verdicts == []
    assert not torch.equal(weight._values(), before)
    optimizer.remove()


def test_a_bad_value_of_a_weight_that_can_be_dequantised_is_found_with_its_element():
    model, weight = make_model(Quantized)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model)
    weight.payload[5, 2] = float("nan")
    verdict = stopped(model, optimizer, torch.randn(5, 4))
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "1.weight")
    assert origin["tensor"]["first_bad_index"] == [5, 2]
    scanned, notes = ids_scanned("params_before")
    assert scanned == list(range(6))
    assert sum("scanned after dequantising" in note and "1.weight" in note for note in notes) == 1


def test_a_weight_that_nothing_can_dequantise_is_left_out_of_the_coverage_and_named():
    model, _ = make_model(Sealed)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model)
    verdict = stopped(model, optimizer, torch.full((5, 4), float("nan")))
    assert verdict["origins"]
    scanned, notes = ids_scanned("params_before")
    assert scanned == [0, 1, 3, 4, 5]
    assert sum("not scanned" in note and "1.weight" in note for note in notes) == 1
    assert any("not scanned" in note for note in verdict["notes"])
