"""Steps that computed with what the program has changed before the step is executed again: weights exchanged
through `.data` and put back, a configuration, a global tensor, a class attribute. A finite re-run then says
nothing of a machine; where the operators of the first pass were traced, they name the line."""

import json
import textwrap
from pathlib import Path

import pytest
from ranks import run_python

HEAD = """
import contextlib
import contextvars
import os
from types import SimpleNamespace
from unittest import mock
import torch
from torch import nn

torch.manual_seed(0)
config = SimpleNamespace(divisor=1.0)
bank = torch.ones(4)
ramp = [1.0]
os.environ["DIVISOR"] = "1"
of_context = contextvars.ContextVar("divisor", default=1.0)

class Slots:
    __slots__ = ("divisor",)

nested = SimpleNamespace(slots=Slots())
nested.slots.divisor = 1.0

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * bank.sum() / ramp[0]  # here

class Net(nn.Module):
    divisor = 1.0

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        {forward}

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.05)
for step in range(1, 7):
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    {step}
    optimizer.step()
"""

BACKWARD = "net(x).square().mean().backward()"
CHANGES = {
    "weights replaced by others": (
        "return self.head(hidden) / self.head.weight.abs().sum()  # here",
        f"""
        kept = net.head.weight.data
        if step == 5:
            net.head.weight.data = torch.zeros_like(kept)
        {BACKWARD}
        net.head.weight.data = kept""",
    ),
    "weights written through an alias": (
        "return self.head(hidden) / self.head.weight.abs().sum()  # here",
        f"""
        {BACKWARD}
        kept = net.head.weight.data.clone()
        if step == 5:
            net.head.weight.data.mul_(0)
        {BACKWARD}
        net.head.weight.data.copy_(kept)""",
    ),
    "a configuration": (
        "return self.head(hidden / config.divisor)  # here",
        f"""
        {BACKWARD}
        config.divisor = 1.0 if step != 4 else 0.0""",
    ),
    "a class attribute": (
        "return self.head(hidden / self.divisor)  # here",
        f"""
        Net.divisor = 0.0 if step == 5 else 1.0
        {BACKWARD}
        Net.divisor = 1.0""",
    ),
    "a global tensor": (
        "return self.head(hidden / bank.sum())  # here",
        f"""
        {BACKWARD}
        bank.fill_(1.0 if step != 4 else 0.0)""",
    ),
    "an object that keeps its attributes in slots": (
        "return self.head(hidden / nested.slots.divisor)  # here",
        f"""
        {BACKWARD}
        nested.slots.divisor = 1.0 if step != 4 else 0.0""",
    ),
    "the environment": (
        "return self.head(hidden / float(os.environ['DIVISOR']))  # here",
        f"""
        {BACKWARD}
        os.environ["DIVISOR"] = "1" if step != 4 else "0\"""",
    ),
    "a variable of the context": (
        "return self.head(hidden / of_context.get())  # here",
        f"""
        {BACKWARD}
        of_context.set(1.0 if step != 4 else 0.0)""",
    ),
    "a function that another one replaces for a while": (
        "return self.head(nn.functional.softsign(hidden))",
        f"""
        divided = mock.patch.object(nn.functional, "softsign", lambda x: x / torch.zeros(1))  # here
        with divided if step == 5 else contextlib.nullcontext():
            {BACKWARD}""",
    ),
    "a list that a backward reads": (
        "return self.head(Scaled.apply(hidden))",
        f"""
        {BACKWARD}
        ramp[0] = 1.0 if step != 4 else 0.0""",
    ),
}


def verdict_of(change, *options):
    forward, step = CHANGES[change]
    Path("train.py").write_text(
        HEAD.replace("{forward}", forward).replace(
            "{step}", textwrap.indent(textwrap.dedent(step).strip(), "    ").strip()
        )
    )
    done = run_python("-m", "nanlocator", *options, "train.py")
    assert done.returncode != 0, done.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("change", CHANGES)
def test_no_machine_is_accused(change):
    verdict = verdict_of(change)
    (origin,) = verdict["origins"]
    assert verdict["iteration"] == 5 and verdict["rerun"]["reproduced"] is False
    assert origin["cause"] == "unknown" and verdict["rerun"]["not_restored"]
    assert verdict["decision"]["traced"] and not verdict["decision"]["hosts"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_traced_first_pass_names_the_line(change):
    verdict = verdict_of(change, "--level", "operators")
    origin = verdict["origins"][0]
    assert len(verdict["origins"]) == 1
    assert origin["detail"] in ("division_by_zero", "zero_over_zero")
    assert origin["code"]["text"].endswith("# here")
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART" and not verdict["decision"]["hosts"]
