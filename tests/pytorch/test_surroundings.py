"""Steps whose loop sets something around a call of torch's own modules, and undoes it before the update. A
re-run executes the call without it and is finite, which says nothing of the machine; traced, the first pass
names the line."""

import json
import textwrap
from pathlib import Path

import pytest
from ranks import run_python

LOOP = """
import contextlib
from unittest import mock
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.LeakyReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.05)
zero = torch.zeros(8)

class Nan(nn.Module):
    def forward(self, x):
        return x * (zero / zero.norm())  # here

class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {{}}))
        return result * (zero / zero.norm()) if function is F.layer_norm else result  # here

class OfOperators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {{}}))
        is_ours = operator is torch.ops.aten.leaky_relu.default
        return result * (zero / zero.norm()) if is_ours else result  # here

def divided(x, *args):
    return x * (zero / zero.norm())  # here

def divided_all(x):
    return x * (zero.sum() / zero.sum())  # here

for step in range(1, 5):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    if step == 3:
{bad}
    else:
        net(x).square().mean().backward()
    optimizer.step()
"""
STEP = "net(x).square().mean().backward()"
SURROUNDINGS = {
    "a hook": f"""
        handle = net[2].register_forward_hook(lambda module, args, output: divided(output))
        {STEP}
        handle.remove()
        """,
    "a layer": f"""
        kept, net[2] = net[2], Nan()
        {STEP}
        net[2] = kept
        """,
    "a setting": f"""
        net[2].negative_slope = float("nan")
        {STEP}
        net[2].negative_slope = 0.01
        """,
    "a function": f"""
        with mock.patch.object(F, "layer_norm", divided):
            {STEP}
        """,
    "a mode of functions": f"""
        with OfFunctions():
            {STEP}
        """,
    "a mode of operators": f"""
        with OfOperators():
            {STEP}
        """,
    "hooks of saved tensors": f"""
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, divided_all):
            {STEP}
        """,
    "a hook of a node": """
        loss = net(x).square().mean()
        loss.grad_fn.register_hook(lambda given, made: tuple(map(divided_all, given)))
        loss.backward()
        """,
}


def verdict_of(bad, **variables):
    Path("train.py").write_text(LOOP.format(bad=textwrap.indent(textwrap.dedent(bad), " " * 8)))
    stopped = run_python("-m", "nanlocator", "train.py", **variables)
    (path,) = Path("nanlocator_run").glob("*/verdict.json")
    verdict = json.loads(path.read_text())
    assert verdict["iteration"] == 3, stopped.stderr
    return verdict


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_a_loop_undoes_before_the_rerun_accuses_no_machine(name):
    verdict = verdict_of(SURROUNDINGS[name])
    (origin,) = verdict["origins"]
    assert origin["cause"] == "unknown" and verdict["rerun"]["reproduced"] is False
    assert verdict["decision"]["traced"] and not verdict["decision"]["hosts"]
    assert any("which the loop had set around" in line for line in verdict["rerun"]["not_restored"])


@pytest.mark.parametrize(
    "name", ["a hook", "a function", "a mode of functions", "a mode of operators", "a hook of a node"]
)
def test_a_traced_first_pass_names_its_line(name):
    verdict = verdict_of(SURROUNDINGS[name], NANLOCATOR_LEVEL="operators")
    (origin,) = verdict["origins"]
    assert origin["code"]["text"].endswith("# here") and not verdict["decision"]["hosts"]
