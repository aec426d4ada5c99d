"""The restart script of the drills knows a verdict's decision alone: it must end each drill right. The other
combinations are in drills.py, which prints a table."""

import pytest
from drills import KINDS, RIGHT, Outcome, drill


def marks_of(seed):
    return [] if seed == 2 else [pytest.mark.exhaustive]  # one of each kind in a usual run


@pytest.mark.parametrize(
    ("kind", "seed"),
    [pytest.param(kind, seed, marks=marks_of(seed)) for kind in KINDS for seed in range(25)],
)
def test_a_job_that_is_restarted_as_decided_trains_or_stays_down(kind, seed):
    assert drill(kind, seed).problem(kind) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_decision_is_noticed(kind):
    first, end = RIGHT[kind]
    right = Outcome([sorted(first)[0]], end=end)
    assert right.problem(kind) == ""
    other = "RESTART_AS_IS" if end == "down" else "DO_NOT_RESTART"
    assert Outcome([other], end="trained" if end == "down" else "down").problem(kind)
    assert Outcome([], end="trained").problem(kind)
    assert Outcome(right.decisions, end="attempts spent").problem(kind)
