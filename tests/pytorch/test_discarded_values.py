"""Values that the program computes and leaves out of its loss, and whose derivative is NaN all the same: the
verdict says so, and its advice, executed, cures the program."""

import pytest
import torch
from torch import nn
from watched_steps import verdict_of_steps

PROGRAMS = {
    # The function, what it must not see, and a choice after it; the program that is cured has one before it.
    "where": (torch.sqrt, -100.0, lambda y, keep: torch.where(keep, y, 0.0).sum()),
    "index": (torch.sqrt, -100.0, lambda y, keep: y[keep].sum()),
    "masked_fill": (torch.rsqrt, -100.0, lambda y, keep: y.masked_fill(~keep, 0.0).sum()),
    "overflow": (torch.exp, 200.0, lambda y, keep: torch.where(keep, y, 0.0).sum()),
}


class Chooses(nn.Module):
    def __init__(self, function, bad, choose, *, is_cured):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.function, self.bad, self.choose, self.is_cured = function, bad, choose, is_cured

    def forward(self, is_bad):
        x = self.weight + 0.25
        if is_bad:
            x = x + torch.tensor([0.0, 0.0, self.bad, 0.0])
        keep = (x - 0.75).abs() < 0.2
        if self.is_cured:
            x = torch.where(keep, x, 1)
        return self.choose(self.function(x), keep)


def verdict_of(name, *, is_cured=False, adds_result=False):
    model = Chooses(*PROGRAMS[name], is_cured=is_cured)
    steps = iter(range(9))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    add = (lambda loss: loss + loss * float("nan")) if adds_result else (lambda loss: loss)
    return verdict_of_steps(model, lambda: add(model(next(steps) == 1)), optimizer=optimizer)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_that_are_left_out_of_the_loss_are_said_to_be(name):
    (origin,) = verdict_of(name)["origins"]
    function = PROGRAMS[name][0]
    assert origin["operator"] == f"aten::{function.__name__}"
    assert "discarded" in [fact["kind"] for fact in origin["facts"]]
    assert "choose in front of" in origin["action"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_advice_cures_the_program(name):
    assert verdict_of(name, is_cured=True) is None


def test_values_of_a_bad_loss_are_not_left_out():
    origins = verdict_of("where", adds_result=True)["origins"]
    assert all("discarded" not in [fact["kind"] for fact in origin["facts"]] for origin in origins)
