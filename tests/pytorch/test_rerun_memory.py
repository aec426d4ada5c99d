"""The memory that the re-run of a bad step needs, and what it omits if there is not enough."""

import json
from pathlib import Path

import pytest
import torch
from allocated import LIBRARY, Allocated
from torch import nn

from nanlocator import LocatingOptimizer, replay

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(not LIBRARY.exists(), reason=f"{LIBRARY.name} is built with the C++ tests"),
]

MIB = 2**20


@pytest.fixture(scope="module")
def allocated():
    return Allocated()


class Layers(nn.Module):
    """Linear layers, with a logarithm after the first; the last result is written in place."""

    def __init__(self, width: int = 512, layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.first_is_bad = False
        self.last_is_bad = False
        self.before_the_last = lambda: None
        self.after_the_last = lambda: None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 0:  # of positive numbers, except for the fault
                x = torch.log(x.abs() + (-2 if self.first_is_bad else 1))
        last = x + 3
        self.before_the_last()
        last.mul_(3e38 if self.last_is_bad else 1.0)
        self.after_the_last()
        return last


def bad_step(model, batch, allocated):
    """Peak memory of a healthy step and of a bad step, and the bad step's verdict."""
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, on_bad="skip")

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    def peak_of_step():
        allocated.restart_peak()
        optimizer.step(closure)
        return allocated.peak()

    planted = model.first_is_bad, model.last_is_bad
    model.first_is_bad = model.last_is_bad = False
    peak_of_step()
    healthy = peak_of_step()
    model.first_is_bad, model.last_is_bad = planted
    bad = peak_of_step()
    (verdict,) = optimizer.verdicts
    optimizer.remove()
    return healthy, bad, verdict


def test_where_all_is_bad_after_the_first_layer_the_re_run_peaks_where_the_step_does(allocated):
    model = Layers()
    model.first_is_bad = True
    batch = torch.randn(4096, 512)  # 8 MiB an activation
    healthy, bad, verdict = bad_step(model, batch, allocated)
    (origin,) = verdict["origins"]
    assert origin["operator"] == "aten::log"
    # In addition to the step's own: argument and output of the operator's call and of its module's.
    assert bad <= 1.05 * healthy + (2 + 2) * 8 * MIB


def test_an_operator_whose_argument_cannot_be_copied_is_named_without_its_bundle(allocated):
    model = Layers()
    model.last_is_bad = True
    batch = torch.randn(4096, 512)
    limits = []

    def allow_no_copy():  # the tensor that is written in place takes 8 MiB
        limits.append(allocated.at_most(2 * MIB))
        limits[-1].__enter__()

    model.before_the_last = allow_no_copy
    model.after_the_last = lambda: limits.pop().__exit__(None, None, None)
    _, _, verdict = bad_step(model, batch, allocated)
    (origin,) = verdict["origins"]
    assert origin["operator"].startswith("aten::mul_")
    assert origin["bundle"] is None
    assert verdict["rerun"]["reproduced"] is True
    assert any("not kept" in note and "aten::mul_" in note for note in verdict["notes"]), verdict["notes"]


class Twice(nn.Module):
    """A shared block, whose second call in a pass is bad."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        good = self.block(x.abs() + 1)
        return self.head(self.block(good * 0 - 1) + self.block(good + 2))


class Block(nn.Module):
    def forward(self, x):
        return x.log()


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class BackwardTwice(nn.Module):
    """A root whose derivative is infinite in its second call, at zeros."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.root = Root()

    def forward(self, x):
        x = self.inner(x)
        return self.root(x.abs() + 1) + self.root(x.abs() * 0) + self.root(x.abs() + 2)


def module_call_of(model):
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, on_bad="skip")
    batch = torch.randn(4, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    (verdict,) = optimizer.verdicts
    optimizer.remove()
    (origin,) = verdict["origins"]
    run = Path("nanlocator_run") / "a0"
    return origin, replay.load(run / origin["bundle"])


def test_of_a_module_that_is_called_often_its_first_bad_call_is_kept():
    origin, call = module_call_of(Twice())
    assert origin["module"] == "block"
    (argument,) = call.arguments
    assert torch.equal(argument, torch.full((4, 8), -1.0))
    assert call.outputs.isnan().all()


def test_a_call_that_goes_bad_in_backward_is_kept_as_its_forward_found_it():
    origin, call = module_call_of(BackwardTwice())
    assert origin["module"] == "root"
    assert origin["direction"] == "backward"
    (argument,) = call.arguments
    assert torch.equal(argument, torch.zeros(4, 8))
    assert torch.equal(call.outputs, torch.zeros(4, 8))
    assert [gradient.isfinite().all() for gradient in call.grad_outputs] == [True]
    assert any(not gradient.isfinite().all() for gradient in call.grad_inputs)


class InPlace(nn.Module):
    def forward(self, x):
        return x.sub_(3).log_()


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.body = InPlace()

    def forward(self, x):
        return self.body(torch.sigmoid(self.first(x)) * 1)


def test_an_argument_that_its_module_overwrites_is_kept_as_it_was():
    origin, call = module_call_of(WritesItsInput())
    assert (origin["module"], origin["operator"]) == ("body", "aten::log_")
    (argument,) = call.arguments
    assert ((argument > 0) & (argument < 1)).all()


def test_only_the_calls_of_origins_are_kept(monkeypatch):
    from nanlocator.calls.module_calls import KeptModuleCalls

    wanted = []
    begin = KeptModuleCalls.begin
    monkeypatch.setattr(
        KeptModuleCalls, "begin", lambda self, modules: wanted.append(modules) or begin(self, modules)
    )

    class Overflow(nn.Module):
        def forward(self, x):
            return (x.abs() + 1) * 3e38 * 3e38

    class Difference(nn.Module):
        def forward(self, x):
            return x - x

    model = nn.Sequential(nn.Linear(8, 8), Overflow(), Difference())
    origin, _ = module_call_of(model)
    assert origin["module"] == "1"
    assert ["1"] in wanted  # "2" made NaN of an Inf in its input
    assert json.dumps(wanted).count('"2"') == 0
