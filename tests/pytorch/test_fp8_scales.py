"""TransformerEngine's delayed scaling and the re-run: an overflow from a stale scale repeats."""

import sys

import pytest
import torch
from delayed_scaling import ScaledLinear, install
from torch import nn

from nanlocator import LocatingOptimizer, NonFiniteGradientError


def train(state, magnitudes):
    """One step for each magnitude of the batch. Returns the verdict if a step was bad."""
    torch.manual_seed(5)
    model = nn.Sequential(ScaledLinear(4, 8, state), nn.Linear(8, 2))
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    try:
        for magnitude in magnitudes:
            batch = torch.full((3, 4), magnitude)

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    except NonFiniteGradientError as error:
        return error.verdict
    finally:
        optimizer.remove()
    return None


@pytest.mark.parametrize("layout", ["2.5", "head"])
@pytest.mark.parametrize("magnitudes", [[1.0, 1.0, 4.0], [1000.0]], ids=["later", "first step"])
def test_an_overflow_from_a_stale_scale_is_there_again_in_the_rerun(layout, magnitudes, monkeypatch):
    verdict = train(install(layout, monkeypatch), magnitudes)
    assert verdict["iteration"] == len(magnitudes)
    assert verdict["rerun"]["reproduced"] is True and verdict["rerun"]["not_restored"] == []
    (origin,) = verdict["origins"]
    assert origin["module"] == "0"
    assert origin["cause"] != "not_reproduced"


@pytest.mark.parametrize("layout", ["2.5", "head"])
def test_a_scale_that_fits_trains_on(layout, monkeypatch):
    assert train(install(layout, monkeypatch), [1.0, 1.0, 1.0]) is None


def test_a_release_whose_scales_are_kept_otherwise_is_named_and_no_machine_is_accused(monkeypatch):
    state = install("head", monkeypatch)
    manager = sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    monkeypatch.setattr(manager, "quantization_state", object())
    verdict = train(state, [1.0, 1.0, 4.0])
    assert verdict["rerun"]["reproduced"] is False
    (problem,) = verdict["rerun"]["not_restored"]
    assert problem.startswith("TransformerEngine's fp8 scales: ")
    for origin in verdict["origins"]:
        assert origin["cause"] != "not_reproduced"
        assert origin["owner"] != "cluster_operator"
