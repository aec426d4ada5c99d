"""Programs with a thread that uses the step's memory: in turns, or in any order.

Wherever the program does not wait, the thread comes a little later or a little earlier than the step.
"""

import itertools
import math
import queue
import threading
import time

import pytest
import torch
from torch import nn
from watched_steps import verdict_of_closure

import nanlocator

SHORT = 0.15  # seconds


class Filled(nn.Module):
    """A thread fills the buffer from which the step reads its batch."""

    line = "x = self.linear(3 * self.batch)"
    threads_line = "self.batch.copy_(torch.randn(3, 4))"
    accesses = ("read_beside_thread", "aten::copy_")

    def __init__(self, waits, late=lambda call: True):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.waits, self.late, self.calls = waits, late, itertools.count(1)
        self.batch = torch.empty(3, 4)

    def fill(self, is_late):
        if is_late:
            time.sleep(SHORT)
        self.batch.copy_(torch.randn(3, 4))

    def forward(self, logarithm=False):
        self.batch = torch.full((3, 4), math.nan)  # until the thread has filled it
        is_late = self.late(next(self.calls))
        thread = threading.Thread(target=self.fill, args=[is_late])
        thread.start()
        if self.waits:
            thread.join()
        elif not is_late:
            time.sleep(SHORT)
        x = self.linear(3 * self.batch)
        thread.join()
        return torch.log(-x.square()) if logarithm else x


class Emptied(nn.Module):
    """A thread takes back a buffer that the step still reads."""

    line = "x = self.linear(2 * self.batch)"
    threads_line = "self.batch.fill_(math.nan)"
    accesses = ("read_beside_thread", "aten::fill_.Scalar")

    def __init__(self, waits, early=lambda call: True):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.waits, self.early, self.calls = waits, early, itertools.count(1)
        self.has_read = threading.Event()

    def empty(self, is_early):
        if self.waits:
            self.has_read.wait(5.0)
        elif not is_early:
            time.sleep(SHORT)
        self.batch.fill_(math.nan)

    def forward(self, logarithm=False):
        self.batch = torch.randn(3, 4)
        self.has_read.clear()
        is_early = self.early(next(self.calls))
        thread = threading.Thread(target=self.empty, args=[is_early])
        thread.start()
        if is_early and not self.waits:
            time.sleep(SHORT)
        x = self.linear(2 * self.batch)
        self.has_read.set()
        thread.join()
        return torch.log(-x.square()) if logarithm else x


def verdict_of(model, logarithm=False, batches=None):
    torch.manual_seed(0)
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return verdict_of_closure(optimizer, lambda: model(logarithm).square().mean(), steps=3)


def line_of(text):
    with open(__file__) as file:
        [line] = [i for i, line in enumerate(file, 1) if line.strip() == text]
    return line


@pytest.mark.parametrize("kind", [Filled, Emptied])
def test_memory_for_which_step_and_thread_do_not_wait_is_a_race_at_both_lines(kind):
    verdict = verdict_of(kind(False))
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["cause_confidence"]) == ("race", "high")
    assert (origin["owner"], origin["action_kind"]) == ("model_author", "wait_for_thread")
    assert origin["code"]["line"] == line_of(kind.line)
    fact_kind, threads_operator = kind.accesses
    [fact] = [each for each in origin["facts"] if each["kind"] == fact_kind]
    assert fact["transfer"] == threads_operator
    assert fact["transfer_code"]["line"] == line_of(kind.threads_line)
    reordered = [each for each in verdict["rerun"]["variants"] if each["variant"] == "reordered"]
    assert reordered[-2:] == [{"variant": "reordered", "bad": False}] * 2


@pytest.mark.parametrize("kind", [Filled, Emptied])
def test_a_program_that_takes_turns_is_healthy(kind):
    assert verdict_of(kind(True)) is None


@pytest.mark.parametrize("kind", [Filled, Emptied])
def test_another_fault_of_a_program_that_takes_turns_keeps_its_cause(kind):
    verdict = verdict_of(kind(True), logarithm=True)
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")
    assert not [each for each in verdict["rerun"]["variants"] if each["variant"] == "reordered"]


@pytest.mark.parametrize("kind", [Filled, Emptied])
def test_another_fault_beside_a_race_keeps_its_cause(kind):
    verdict = verdict_of(kind(False, lambda call: False), logarithm=True)
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")


@pytest.mark.parametrize("kind", [Filled, Emptied])
def test_a_race_that_is_gone_in_the_rerun_is_brought_back_by_the_other_order(kind):
    verdict = verdict_of(kind(False, lambda call: call == 2))
    [origin] = verdict["origins"]
    assert verdict["rerun"]["reproduced"] is False
    reordered = [each for each in verdict["rerun"]["variants"] if each["variant"] == "reordered"]
    assert reordered[-2:] == [{"variant": "reordered", "bad": True}] * 2
    assert (origin["cause"], origin["action_kind"]) == ("race", "wait_for_thread")
    assert origin["code"]["line"] == line_of(kind.line)


class TwoBuffers(nn.Module):
    """A loader's thread fills one buffer while the step reads the other; the two signal each other."""

    def __init__(self, bad_batch):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.free, self.full = queue.Queue(), queue.Queue()
        for _ in range(2):
            self.free.put(torch.empty(3, 4))
        self.bad_batch = bad_batch
        threading.Thread(target=self.load, daemon=True).start()

    def load(self):
        for batch in range(1000):
            buffer = self.free.get()
            buffer.copy_(torch.full((3, 4), math.nan if batch >= self.bad_batch else 1.0))
            self.full.put(buffer)

    def forward(self, logarithm=False):
        buffer = self.full.get()
        x = self.linear(2 * buffer)
        self.free.put(buffer)
        return x


def test_a_bad_batch_of_a_loader_with_two_buffers_is_no_race():
    verdict = verdict_of(TwoBuffers(bad_batch=1))
    [origin] = verdict["origins"]
    assert origin["cause"] != "race"
    assert not [each for each in verdict["rerun"]["variants"] if each["variant"] == "reordered"]


def test_what_a_race_has_made_bad_once_is_not_applied_by_recover():
    torch.manual_seed(0)
    model = Filled(False, lambda call: call == 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = nanlocator.LocatingOptimizer(inner, model, on_bad="recover")

    def closure():
        optimizer.zero_grad()
        loss = model().square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert len(optimizer.verdicts) == 1


class Flaky(nn.Module):
    """Bad in some calls, whatever its thread does: the result does not use the tensor that it writes."""

    def __init__(self, bad_calls):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bad_calls, self.calls = bad_calls, torch.zeros(())
        self.shown = torch.zeros(4)

    def forward(self, logarithm=False):
        self.calls += 1
        thread = threading.Thread(target=lambda: self.shown.fill_(1.0))
        thread.start()
        time.sleep(0.02)
        x = self.linear(torch.randn(3, 4)) + 0 * self.shown
        thread.join()
        return x * (math.nan if self.calls.item() in self.bad_calls else 1.0)


@pytest.mark.parametrize("bad_calls", [{2}, {2, 3}, {2, 3, 5}, {2, 4}, {2, 4, 5, 6}, {2, 3, 5, 6}])
def test_a_fault_that_comes_and_goes_beside_a_thread_is_no_race(bad_calls):
    verdict = verdict_of(Flaky(bad_calls))
    [origin] = verdict["origins"]
    assert origin["cause"] != "race" and origin["action_kind"] != "wait_for_thread"


class Slots(nn.Module):
    """A thread fills several buffers; the step waits for all but one of them."""

    def __init__(self, forgotten):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forgotten = forgotten

    def forward(self, logarithm=False):
        slots = torch.full((3, 3, 4), math.nan)
        filled = [threading.Event() for _ in slots]

        def fill():
            for i, slot in enumerate(slots):
                if i == self.forgotten:
                    time.sleep(SHORT)
                slot.copy_(torch.ones(3, 4))
                filled[i].set()

        thread = threading.Thread(target=fill)
        thread.start()
        x = 0.0
        for i, slot in enumerate(slots):
            if i != self.forgotten:
                filled[i].wait()
            x = x + self.linear(2 * slot)  # the slots
        thread.join()
        return x


@pytest.mark.parametrize("forgotten", [0, 1, 2])
def test_a_race_is_found_in_each_round_of_a_loop(forgotten):
    verdict = verdict_of(Slots(forgotten))
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["action_kind"]) == ("race", "wait_for_thread")
    assert origin["code"]["line"] == line_of("x = x + self.linear(2 * slot)  # the slots")
