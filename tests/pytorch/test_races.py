"""Programs that use memory while a transfer between ranks still reads or writes it.

Rank 1 reaches the transfer after all other ranks have used the memory; or all ranks sleep until the transfer
has ended, but do not wait for it.
"""

import itertools
import math
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import nanlocator
from nanlocator.exchange import transfers


def gathered(parts, own, is_late):
    """With `is_late`, nothing is read or written before rank 1 arrives: gloo's two threads wait for it."""
    if is_late:
        if dist.get_rank() == 1:
            time.sleep(1.0)
        for _ in range(2):
            dist.all_reduce(torch.zeros(1), async_op=True)
    work = dist.all_gather_into_tensor(parts, own, async_op=True)
    if not is_late:
        time.sleep(0.6)
    return work


class Gathered(nn.Module):
    """Sums over all ranks; `late` says in which of its calls rank 1 is late."""

    def __init__(self, waits, late):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.waits, self.late, self.calls = waits, late, itertools.count(1)

    def forward(self, x):
        call = next(self.calls)
        parts = torch.full((2 * len(x), x.shape[1]), math.nan)  # until the parts have arrived
        work = gathered(parts, x.detach(), self.late(call))
        if self.waits:
            work.wait()
        total = parts[: len(x)] + parts[len(x) :]  # here
        work.wait()
        return self.linear(x + total)


class Averaged(nn.Module):
    """Itself averages its gradient over the ranks, through a buffer that it reuses."""

    def __init__(self, waits, late):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.waits, self.late, self.calls = waits, late, itertools.count(1)

    def forward(self, x):
        return self.linear(x)

    def average(self):
        call = next(self.calls)
        gradient = self.linear.weight.grad
        buffer = gradient.clone()
        parts = torch.empty(2 * len(buffer), buffer.shape[1])
        work = gathered(parts, buffer, self.late(call))
        if self.waits:
            work.wait()
        self.use(buffer)
        work.wait()
        gradient.copy_((parts[: len(buffer)] + parts[len(buffer) :]) / 2)

    def use(self, buffer):
        buffer.fill_(math.nan)  # here


class Copied(Averaged):
    def use(self, buffer):
        buffer.copy_(torch.full_like(buffer, math.nan))  # here


LATE = {"always": lambda call: True, "once": lambda call: call == 2, "never": lambda call: False}


def train(rank, world_size, kind, waits, late, fault=False):
    torch.manual_seed(0)
    model = kind(waits, LATE[late])
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.manual_seed(rank)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        if fault:
            loss = loss + torch.log(0 * loss)
        loss.backward()
        if issubclass(kind, Averaged):
            model.average()
        return loss

    try:
        for _ in range(3):
            optimizer.step(closure)
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    return None


def line_of(kind):
    with open(__file__) as file:
        lines = file.read().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    return next(i + 1 for i in range(start, len(lines)) if lines[i].endswith("# here"))


ACCESS = {
    Gathered: ("read_during_transfer", "aten::add.Tensor", "c10d::_allgather_base_"),
    Averaged: ("wrote_during_transfer", "aten::fill_.Scalar", "c10d::_allgather_base_"),
    Copied: ("wrote_during_transfer", "aten::copy_", "c10d::_allgather_base_"),
}


# copy_ is just another operator that writes.
KINDS = [Gathered, Averaged, pytest.param(Copied, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("kind", ACCESS)
def test_memory_that_is_used_before_its_transfer_has_ended_is_a_race_at_that_line(kind):
    verdict = run_ranks(2, train, kind, False, "always")[0]
    [origin] = verdict["origins"]
    assert origin["cause"] == "race" and origin["cause_confidence"] == "high"
    assert origin["code"]["line"] == line_of(kind)
    assert origin["owner"] == "model_author"
    assert origin["action_kind"] == "wait_for_transfer"
    expected = ACCESS[kind]
    [fact] = [each for each in origin["facts"] if each["kind"] == expected[0]]
    assert (fact["operator"], fact["transfer"]) == expected[1:]
    assert fact["code"]["line"] == line_of(kind)
    assert "async_op=True" in fact["transfer_code"]["text"]
    assert {"variant": "serialised", "bad": False} in verdict["rerun"]["variants"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_waits_has_no_race(kind):
    assert run_ranks(2, train, kind, True, "always") == [None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_race_that_is_gone_in_the_rerun_is_looked_for_at_its_line_before_a_machine_is(kind):
    verdict = run_ranks(2, train, kind, False, "once")[0]
    [origin] = verdict["origins"]
    assert origin["cause"] in ("race", "not_reproduced") and origin["cause_confidence"] != "high"
    assert (origin["action_kind"], origin["owner"]) == ("wait_for_transfer", "model_author")
    [fact] = [each for each in origin["facts"] if each["kind"] == ACCESS[kind][0]]
    assert fact["code"]["line"] == line_of(kind)


def test_another_fault_beside_a_transfer_that_nobody_waits_for_keeps_its_cause():
    verdict = run_ranks(2, train, Gathered, False, "never", True)[0]
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")
    assert not [fact for fact in origin["facts"] if fact["kind"].endswith("during_transfer")]
    assert {"variant": "serialised", "bad": True} in verdict["rerun"]["variants"]


def damage_once(rank, world_size, is_own):
    """Damages an element of rank 1's gradient in the first pass, while an operator runs and this gradient, or
    another tensor, is reduced."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    calls = itertools.count()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        gradient = model.bias.grad
        work = dist.all_reduce(gradient if is_own else gradient.clone(), async_op=True)
        torch.ones(3) + 1
        work.wait()
        if next(calls) == 0 and rank == 1:
            gradient.numpy()[2] = math.nan
        return loss

    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        optimizer.step(closure)
    return raised.value.verdict


@pytest.mark.parametrize("is_own", [True, False])
def test_a_device_is_suspected_after_a_race_only_where_a_transfer_used_that_memory(is_own):
    verdict = run_ranks(2, damage_once, is_own)[0]
    [origin] = verdict["origins"]
    assert origin["cause"] == "not_reproduced"
    assert origin["action_kind"] == ("find_race" if is_own else "test_device")
    assert origin["owner"] == ("unknown" if is_own else "cluster_operator")
    assert [fact["names"] for fact in origin["facts"] if fact["kind"] == "ran_beside"] == (
        [["transfer"]] if is_own else []
    )


class NeverOver:
    """A transfer that the peer begins only after another transfer, which this rank has not begun yet."""

    def __init__(self):
        self.looks = 0

    def is_completed(self):
        self.looks += 1
        return False


def test_transfers_that_cross_are_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(transfers, "_LONGEST_WAIT", 0.03)
    monkeypatch.setattr(transfers, "_LONGEST_IN_VAIN", 0.12)
    begun = [NeverOver() for _ in range(8)]
    remaining = iter(begun)
    monkeypatch.setattr(dist.ProcessGroup, "recv", lambda *_: next(remaining))
    serialised = transfers.SerialisedTransfers()
    try:
        for _ in begun:
            dist.ProcessGroup.recv(None, [], 0, 0)
    finally:
        serialised.remove()
    assert [work.looks > 1 for work in begun] == [True] * 4 + [False] * 4
