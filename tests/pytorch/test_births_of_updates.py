"""An optimizer of the program's own whose update makes NaN of finite gradients: traced, its operator and line
are named, and one update is one origin."""

from pathlib import Path

import pytest
import torch
from torch import nn

import nanlocator

HERE = Path(__file__).name


class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"])


class Adaptive(Own):
    def update(self, p, rate):
        p.addcdiv_(p.grad, p.grad.square().sqrt(), value=-rate)  # the fault


class Orthogonal(Own):
    def update(self, p, rate):
        direction = p.grad / p.grad.norm()  # the fault
        p.add_(direction, alpha=-rate)


class Trusting(Own):
    def update(self, p, rate):
        ratio = p.norm() / p.grad.norm()  # the fault
        p.add_(p.grad * ratio, alpha=-rate)


def line_of(kind):
    lines = Path(__file__).read_text().splitlines()
    begin = lines.index(f"class {kind.__name__}(Own):")
    return next(i for i, line in enumerate(lines, 1) if i > begin and line.endswith("# the fault"))


def train(kind, bad_step, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = kind(net.parameters())
    watch = nanlocator.watch(net, optimizer, **options)
    try:
        for step in range(1, 5):
            loss = net(torch.randn(8, 4)).square().mean() * (step != bad_step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


@pytest.mark.host
@pytest.mark.parametrize("kind", [Adaptive, Orthogonal, Trusting])
def test_a_traced_update_names_its_operator_and_line(kind, capfd):
    verdict = train(kind, 3, level="operators", check_params=True)
    assert verdict is not None and verdict["iteration"] == 3
    (origin,) = verdict["origins"]
    assert origin["cause"] == "optimizer_update"
    assert origin["detail"] in ("zero_over_zero", "division_by_zero")
    assert (Path(origin["code"]["file"]).name, origin["code"]["line"]) == (HERE, line_of(kind))
    said = " ".join(capfd.readouterr().err.split())
    assert "find what made" in said and "torch.where" not in said
    assert "p is 0" not in said  # what is overwritten has no value


@pytest.mark.host
def test_an_update_that_nobody_saw_is_named_where_every_element_is_bad(capfd):
    verdict = train(Adaptive, 3)
    assert verdict is not None and verdict["iteration"] == 4
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["alternatives"]) == ("bad_weight", ["writer"])
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART"
    said = " ".join(capfd.readouterr().err.split())
    assert "the optimizer's update in step 3 made 0.bias NaN" in said
    assert "NANLOCATOR_CHECK_PARAMS=1 and NANLOCATOR_LEVEL=operators" in said


@pytest.mark.parametrize("kind", [Adaptive, Orthogonal, Trusting])
def test_updates_of_gradients_that_are_not_zero_are_no_finding(kind):
    assert train(kind, None, level="operators", check_params=True) is None


class Mixed(Own):
    def update(self, p, rate):
        size = p.grad.norm()
        p.sub_((p.grad / size if p.dim() > 1 else (size * 1e9 - 2).log1p()) * rate)  # the fault


def test_an_update_counts_all_weights_that_it_has_made_bad(capfd):
    verdict = train(Orthogonal, 3, level="operators", check_params=True)
    (origin,) = verdict["origins"]
    (further,) = [each for each in origin["facts"] if each["kind"] == "further_weights_bad"]
    assert further["count"] == 3 and origin["parameter"] not in further["names"]


def test_two_operators_of_one_line_are_two_origins():
    verdict = train(Mixed, 3, level="operators", check_params=True)
    assert {each["operator"] for each in verdict["origins"]} >= {"aten::div.Tensor", "aten::log1p"}
