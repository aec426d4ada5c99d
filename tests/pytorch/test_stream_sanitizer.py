"""GPU streams that do not wait for each other, simulated without a GPU: host memory replaces device memory,
and the test sets the current stream."""

import contextlib
import itertools
import math
import types

import pytest
import torch
from torch import nn
from torch.cuda import _gpu_trace
from torch.utils import checkpoint

import nanlocator
from nanlocator import _C
from nanlocator.engine.driver import Adapter
from nanlocator.exchange import stream_sanitizer

MAIN, SIDE = 1, 2
# Keeps host memory alive: the sanitizer does not see that it is freed and reused. By a function, as a list
# that the model names would count as its state.
keep = [].extend


class Device:
    """Streams that the test enters, and events that it records."""

    def __init__(self):
        self.stream = MAIN

    @contextlib.contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def wait(self, stream, for_stream, event=7):
        _gpu_trace.EventRecordCallbacks.fire_callbacks(event, for_stream)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(event, stream)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=device.stream)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    # With a GPU it stays changed; here it is restored.
    monkeypatch.setattr(checkpoint, "_enable_checkpoint_early_stop", checkpoint._enable_checkpoint_early_stop)
    return device


def test_what_two_streams_use_in_no_order_is_found_with_both_lines(device):
    with stream_sanitizer.sanitised_streams() as accesses:
        x = torch.ones(3)
        with device.on(SIDE):
            x.mul_(2)  # nobody waits
        y = x + 1  # reads
    places = [(each.is_write, each.operator, each.line[3], each.other_line[3]) for each in accesses]
    assert (True, "aten::mul_.Tensor", "x.mul_(2)  # nobody waits", "x = torch.ones(3)") in places
    assert (False, "aten::add.Tensor", "y = x + 1  # reads", "x.mul_(2)  # nobody waits") in places
    assert y.tolist() == [3, 3, 3]


def test_streams_that_wait_for_each_other_are_in_order(device):
    with stream_sanitizer.sanitised_streams() as accesses:
        x = torch.ones(3)
        device.wait(SIDE, MAIN)
        with device.on(SIDE):
            x.mul_(2)
        device.wait(MAIN, SIDE)
        x + 1
    assert accesses == []


def test_the_callbacks_are_taken_off_again(device):
    registries = [each for each in vars(_gpu_trace).values() if hasattr(each, "callback_list")]
    before = [list(registry.callback_list) for registry in registries]
    with pytest.raises(RuntimeError, match="the program's"), stream_sanitizer.sanitised_streams():
        raise RuntimeError("the program's")
    assert len(registries) >= 10
    assert [list(registry.callback_list) for registry in registries] == before


def test_no_exception_ends_a_second_computation_from_then_on(device):
    """While an exception releases tensors, torch's callbacks cannot import their modules."""
    ends = []

    def region(x):
        y = x.exp()
        ends.append(x)
        return y

    def train():
        x = torch.ones(3, requires_grad=True)
        checkpoint.checkpoint(region, x, use_reentrant=False).sum().backward()

    train()
    assert len(ends) == 1  # one, from the first computation
    with stream_sanitizer.sanitised_streams():
        train()
    train()
    assert len(ends) == 5


class Shared(nn.Module):
    """A side stream fills a tensor that the step reads; `wait` says whether the step waits for it."""

    def __init__(self, device, wait):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.device, self.wait = device, wait

    def forward(self):
        batch, filling = torch.empty(3, 4), torch.randn(3, 4)
        keep((batch, filling))
        self.device.wait(SIDE, MAIN)
        with self.device.on(SIDE):
            batch.copy_(filling)
        if self.wait:
            self.device.wait(MAIN, SIDE)
        return self.linear(batch * 3)


def verdict_of_step(model, output_dir, corrupt=lambda: None):
    """``corrupt`` runs after each backward, also in the re-run."""
    optimizer = nanlocator.LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, output_dir=output_dir
    )

    def closure():
        optimizer.zero_grad()
        loss = model().square().mean()
        loss.backward()
        corrupt()
        return loss

    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        optimizer.step(closure)
    return raised.value.verdict


@pytest.mark.parametrize("waits", [True, False])
def test_a_fault_that_is_gone_in_the_rerun_is_no_machines_where_streams_race(
    device, waits, tmp_path, monkeypatch
):
    monkeypatch.setattr(Adapter, "has_streams", lambda self: True)
    model = Shared(device, waits)
    calls = itertools.count()

    def corrupt():
        if next(calls) == 0:
            model.linear.bias.grad[2] = math.nan

    verdict = verdict_of_step(model, tmp_path, corrupt)
    (origin,) = verdict["origins"]
    assert {"variant": "sanitised", "bad": False} in verdict["rerun"]["variants"]
    facts = [fact for fact in origin["facts"] if fact["kind"] == "read_beside_stream"]
    if waits:
        assert facts == [] and origin["action_kind"] == "test_device"
        return
    assert origin["action_kind"] == "wait_for_stream"
    (fact,) = facts
    assert fact["code"]["text"] == "return self.linear(batch * 3)"
    assert fact["transfer_code"]["text"] == "batch.copy_(filling)"


class Waits:
    """Replaces the object that waits for the GPU; counts the live ones."""

    alive = 0

    def __init__(self, *_):
        type(self).alive += 1

    def __del__(self):
        type(self).alive -= 1


TRACED = (1, 2)  # passes of a bad step: unchanged, and with NaN in fresh memory


class Early(nn.Module):
    """Its output is bad in passes that do not wait for the device. A trace waits at each operator."""

    def __init__(self, passes, is_race):
        super().__init__()
        self.linear, self.passes, self.is_race = nn.Linear(4, 4), passes, is_race

    def forward(self):
        is_waited_for = next(self.passes) in TRACED or (self.is_race and Waits.alive)
        return self.linear(torch.ones(3, 4)) * (1.0 if is_waited_for else math.nan)


@pytest.mark.parametrize("is_race", [True, False])
def test_what_is_finite_only_where_each_operator_is_waited_for_is_a_race(
    is_race, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(Adapter, "has_streams", lambda self: True)
    monkeypatch.setattr(_C, "SerialisedOperators", Waits)
    verdict = verdict_of_step(Early(itertools.count(), is_race), tmp_path)
    (origin,) = verdict["origins"]
    serialised = [each["bad"] for each in verdict["rerun"]["variants"] if each["variant"] == "serialised"]
    assert serialised == ([False, False] if is_race else [True])
    assert (origin["cause"] == "race") is is_race
    assert Waits.alive == 0
