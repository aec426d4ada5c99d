"""Values that the program computes and leaves out of its loss, and whose derivative is NaN all the same: the
verdict says so, and its advice, executed, cures the program."""

import re

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
    # Their derivatives compute the NaN anew, from the argument.
    **{
        function.__name__: (function, bad, lambda y, keep: torch.where(keep, y, 0.0).sum())
        for function, bad in [
            (torch.acos, 2.0),
            (torch.asin, 2.0),
            (torch.erfinv, 2.0),
            (torch.logit, 2.0),
            (torch.Tensor.acos_, 2.0),
        ]
    },
}


class Chooses(nn.Module):
    def __init__(self, function, bad, choose, *, instead):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.function, self.bad, self.choose, self.instead = function, bad, choose, instead

    def forward(self, is_bad):
        x = self.weight + 0.25
        if is_bad:
            x = x + torch.tensor([0.0, 0.0, self.bad, 0.0])
        keep = (x - 0.75).abs() < 0.2
        if self.instead is not None:
            x = torch.where(keep, x, self.instead)
        return self.choose(self.function(x), keep)


def verdict_of(name, *, instead=None, adds_result=False):
    model = Chooses(*PROGRAMS[name], instead=instead)
    steps = iter(range(9))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    add = (lambda loss: loss + loss * float("nan")) if adds_result else (lambda loss: loss)
    return verdict_of_steps(model, lambda: add(model(next(steps) == 1)), optimizer=optimizer)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_that_are_left_out_of_the_loss_are_said_to_be(name):
    (origin,) = verdict_of(name)["origins"]
    function = PROGRAMS[name][0]
    assert f"aten::{function.__name__}" in (origin["operator"], origin["forward_operator"])
    assert "discarded" in [fact["kind"] for fact in origin["facts"]]
    assert "replace such values before" in origin["action"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_advice_cures_the_program(name):
    advice = verdict_of(name)["origins"][0]["action"]
    instead = float(re.search(r"torch\.where\(keep, x, ([0-9.]+)\)", advice)[1])
    assert verdict_of(name, instead=instead) is None


def test_values_of_a_bad_loss_are_not_left_out():
    origins = verdict_of("where", adds_result=True)["origins"]
    assert all("discarded" not in [fact["kind"] for fact in origin["facts"]] for origin in origins)
