"""The states of Python's and numpy's generators are read from their memory, and are those that they tell."""

import random

import numpy as np
import pytest

from nanlocator.state import generators
from nanlocator.state.generators import GeneratorStates, ProgramGenerators


def draws():
    return [random.random(), random.gauss(0, 1), random.gauss(0, 1), np.random.rand(), np.random.randn()]


@pytest.mark.parametrize("has_memory", [True, False], ids=["memory", "state"])
@pytest.mark.parametrize("normals", [0, 1], ids=["", "a second normal number is kept"])
def test_what_was_saved_comes_again(has_memory, normals, monkeypatch):
    if not has_memory:
        monkeypatch.setattr(generators, "_has_memory", lambda _: False)
    random.seed(3)
    np.random.seed(4)
    for _ in range(normals):
        random.gauss(0, 1)
        np.random.randn()
    states = GeneratorStates()
    states.save()
    first = draws()
    states.restore()
    assert draws() == first


def test_this_interpreter_has_the_memory():
    assert generators._has_memory(generators._generator_of_python())
    random.seed(5)
    random.gauss(0, 1)
    assert generators._state_of_python()() == random.getstate()


def test_after_the_re_runs_the_program_goes_on_with_its_own():
    random.seed(6)
    state = ProgramGenerators()
    state.save()
    random.random()
    left = random.getstate()
    for _ in range(2):
        state.restore()
        random.random()
        random.random()
    assert state.were_restored
    state.leave()
    assert random.getstate() == left and not state.were_restored
