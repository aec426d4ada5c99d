"""``nanlocator.guard`` and pytest's fixture of it; verdicts in a program's own log."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nanlocator


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(x).square().sqrt()


def test_a_gradient_that_is_nan_is_located():
    model = Root()
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised, nanlocator.guard(model):
        model(torch.ones(2, 4)).sum().backward()
    (origin,) = raised.value.verdict.origins
    assert (origin.detail, origin.phase) == ("derivative_at_pole", "backward")
    assert origin.code.text == "return self.linear(x).square().sqrt()"


def test_a_value_that_is_held_is_located_without_a_backward():
    model = nn.Linear(4, 1)
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised, nanlocator.guard(model):
        loss = torch.log(model(torch.ones(2, 4)) * 0 - 1).sum()
    assert raised.value.verdict.origins[0].detail == "log_of_negative"
    del loss


def test_what_is_finite_passes_and_weights_stay():
    model = nn.Linear(4, 1)
    before = [each.clone() for each in model.parameters()]
    with nanlocator.guard(model) as watch:
        model(torch.ones(2, 4)).sum().backward()
    assert watch.verdicts == []
    assert all(map(torch.equal, before, model.parameters()))


def test_an_error_of_the_block_is_the_blocks():
    model = nn.Linear(4, 1)
    with pytest.raises(KeyError), nanlocator.guard(model):
        model(torch.full((2, 4), float("nan"))).sum().backward()
        raise KeyError
    with nanlocator.guard(model):  # nothing is left of the one before
        pass


def test_a_model_without_parameters_is_refused():
    with pytest.raises(nanlocator.UsageError, match="needs a model with a parameter"):
        with nanlocator.guard(nn.ReLU()):
            pass


def test_the_fixture_fails_the_test_that_makes_a_nan():
    Path("test_loss.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "def test_good(nan_guard):\n"
        "    with nan_guard(model):\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "def test_bad(nan_guard):\n"
        "    with nan_guard(model):\n"
        "        (model(torch.ones(2, 4)) / torch.zeros(1)).sum().backward()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "nanlocator_pytest", "-q", "test_loss.py"],
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in done.stdout and "torch.zeros(1) is 0" in done.stdout, done.stdout


def test_the_plugin_does_not_import_torch():
    code = "import nanlocator_pytest, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_handler_of_the_logger_gets_the_verdict():
    records = []

    class Kept(logging.Handler):
        def emit(self, record):
            records.append((record.levelno, record.getMessage().splitlines()[0]))

    logger, handler = logging.getLogger("nanlocator"), Kept()
    logger.addHandler(handler)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError), nanlocator.guard(Root()) as watch:
            next(iter(watch._models.values()))(torch.ones(2, 4)).sum().backward()
    finally:
        logger.removeHandler(handler)
    ((level, line),) = records
    assert level == logging.ERROR and line.startswith("nanlocator ERROR[")
