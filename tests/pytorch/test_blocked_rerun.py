"""A re-run that would wait for ever: for an item that a queue had once, for a lock that the loop has now."""

import queue
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

import nanlocator
from nanlocator.engine import blocked_rerun
from nanlocator.engine.blocked_rerun import BlockedRerunError, not_blocked


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(blocked_rerun, "_PATIENCE", 1.0)
    monkeypatch.setattr(blocked_rerun, "_BETWEEN_LOOKS", 0.1)
    monkeypatch.setattr(blocked_rerun, "_LONGEST", 3.0)


class Fed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.queue = nn.Linear(4, 1), queue.Queue()

    def forward(self, x):
        return self.linear(x) / self.queue.get()


class Polling(Fed):
    """Takes any error for an empty queue."""

    def forward(self, x):
        while True:
            try:
                return self.linear(x) / self.queue.get(timeout=0.002)
            except Exception:
                continue


class Refusing(Fed):
    """Ends in an operator that refuses what the queue has given."""

    def forward(self, x):
        noise = self.queue.get()
        return torch.multinomial((self.linear(x) + noise).softmax(0).T, 1).sum() * self.linear.weight.sum()


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.lock = nn.Linear(4, 1), threading.Lock()

    def forward(self, x):
        with self.lock:
            return self.linear(x)


def verdict_of(train, model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError):
            train(optimizer)
        return watch.verdicts[0]
    finally:
        watch.remove()


@pytest.mark.parametrize(("make", "place"), [(Fed, "it stood still at"), (Polling, "it was still at")])
def test_a_queue_that_is_filled_once_a_step_does_not_hang_the_job(make, place):
    model = make()

    def train(optimizer):
        for step in range(3):
            model.queue.put(0.0 if step == 1 else 1.0)
            optimizer.zero_grad()
            (model(torch.zeros(2, 4)) * 0).sum().backward()
            optimizer.step()

    verdict = verdict_of(train, model)
    assert verdict.step == 2 and verdict.rerun.reproduced is None
    assert any(place in each and "in forward" in each for each in verdict.notes)


def test_a_call_that_an_operator_has_refused_does_not_hang_the_end():
    model = Refusing()
    watch = nanlocator.watch(model, torch.optim.SGD(model.parameters(), 0.1))
    model.queue.put(float("nan"))
    begun = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="probability tensor") as refused:
            model(torch.ones(2, 4)).backward()
        sys.last_value = refused.value
        watch.scan_at_end()
    finally:
        del sys.last_value
        watch.remove()
    assert time.monotonic() - begun < 20


def test_a_lock_that_the_loop_holds_does_not_hang_the_job():
    model = Locked()

    def train(optimizer):
        for step in range(3):
            loss = model(torch.full((2, 4), float("inf") if step == 1 else 1.0)).sum()
            with model.lock:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    verdict = verdict_of(train, model)
    assert verdict.step == 2 and verdict.rerun.reproduced is None


def test_work_and_short_waits_are_no_block():
    with not_blocked():
        time.sleep(0.5)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_the_handler_of_the_program_stays():
    handler = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGURG)
        with not_blocked():
            assert signal.getsignal(signal.SIGURG) is mine
    finally:
        signal.signal(signal.SIGURG, handler)


def test_the_line_that_waits_is_named():
    with pytest.raises(BlockedRerunError, match=r"test_blocked_rerun.py:\d+ in test_the_line_that_waits"):
        with not_blocked():
            threading.Event().wait()
