"""Facts from a loop's calls other than its steps, with a LoopReading that no loop drives."""

import pytest
import torch

from nanlocator import _C
from nanlocator.loops.loop_reading import LoopReading

LOSS = torch.tensor(float("nan"))


def bad_among(tensors):
    return [tensor for tensor in tensors if not tensor.isfinite()]


def gradient_of_zeros():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    return parameter


@pytest.fixture
def loop():
    return LoopReading()


def test_a_bad_loss_that_was_read_before_gradients_were_zeroed_was_left(loop):
    loop.begin_computation()
    loop.zero_gradients([], had_backward=False)
    loop.begin_forward([torch.tensor(1.0), LOSS], bad_among)
    (left,), are_zeroed = loop.take_left_losses()
    assert left is LOSS and are_zeroed
    assert loop.take_left_losses()[0] == []  # reported once


def test_the_first_bad_loss_that_was_left_stays_the_one(loop):
    for loss in (LOSS, torch.tensor(float("inf"))):
        loop.zero_gradients([], had_backward=False)
        loop.begin_forward([loss], bad_among)
        loop.begin_computation()
    assert loop.take_left_losses() == ([LOSS], True)


@pytest.mark.parametrize("had_backward", [True, False])
def test_gradients_that_were_zeroed_in_a_step_that_goes_on_say_nothing(loop, had_backward):
    loop.zero_gradients([], had_backward=had_backward)
    if not had_backward:
        loop.begin_computation()  # of the step that reads it
    loop.begin_forward([LOSS], bad_among)
    assert loop.take_left_losses() == ([LOSS], False)


def test_nothing_is_looked_for_where_the_program_has_read_nothing(loop):
    loop.zero_gradients([], had_backward=False)
    loop.begin_forward([], lambda _: pytest.fail("scanned"))


def test_gradients_count_as_zero_until_they_are_scanned(loop):
    zero, none = gradient_of_zeros(), torch.nn.Parameter(torch.ones(2))
    loop.zero_gradients([zero, none], had_backward=False)
    assert loop.zeroed == {id(zero)}
    loop.scan_gradients()
    assert loop.zeroed == set()


def test_a_decision_holds_until_gradients_are_written(loop):
    loop.decision = _C.Decision.SKIP
    loop.zero_gradients([], had_backward=False)
    loop.begin_computation()
    assert loop.decision == _C.Decision.SKIP
    loop.write_gradients()
    assert loop.decision == _C.Decision.PROCEED


def test_an_exception_leaves_zeroed_gradients_zero_and_nothing_else(loop):
    zero = gradient_of_zeros()
    loop.zero_gradients([zero], had_backward=False)
    loop.begin_forward([LOSS], bad_among)
    loop.decision = _C.Decision.SKIP
    loop.forget()
    assert (loop.zeroed, loop.decision) == ({id(zero)}, _C.Decision.PROCEED)
    assert loop.take_left_losses()[0] == []
