"""One wrapper at each point: the order of its subscribers, and what removal restores."""

import copy
import threading

import pytest
import torch
from torch import nn

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches


class Owner:
    def step(self, value):
        return [("step", value)]


POINT = points.Point("nowhere", "step", ("outer", "middle", "inner"), "steps")


def saying(name):
    def wrapper(original, *args, **kwargs):
        return [name, *original(*args, **kwargs)]

    return wrapper


def subscribed(by, target, name=""):
    patches = Patches(f"nanlocator.{by}")
    patches.wrap(POINT, saying(name or by), of=target)
    return patches


def test_subscribers_are_called_in_the_order_of_the_row_whoever_came_first():
    owner = Owner()
    everybody = [subscribed(by, Owner) for by in ("inner", "outer", "middle")]
    everybody.append(subscribed("middle", Owner, "later"))
    assert owner.step(1) == ["outer", "later", "middle", "inner", ("step", 1)]
    for each in everybody:
        each.remove()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("make", [lambda: Owner, Owner])
def test_the_very_object_is_restored_in_whatever_order_they_leave(make, order):
    target = make()
    before = vars(target).get("step")
    subscribers = [subscribed(by, target) for by in ("inner", "outer", "middle")]
    wrapper = vars(target)["step"]
    for number in order:
        assert vars(target)["step"] is wrapper
        subscribers[number].remove()
    assert vars(target).get("step") is before


def test_a_wrapper_inside_of_somebody_elses_passes_calls_on_and_is_used_again():
    owner = Owner()
    first = subscribed("inner", owner)
    ours = owner.step
    owner.step = lambda value: ["theirs", *ours(value)]
    first.remove()
    assert owner.step(1) == ["theirs", ("step", 1)]
    second = subscribed("outer", owner)
    assert owner.step(1) == ["outer", "theirs", ("step", 1)]
    second.remove()
    assert owner.step(1) == ["theirs", ("step", 1)]
    owner.step = ours
    third = subscribed("middle", owner)
    assert owner.step(1) == ["middle", ("step", 1)]
    third.remove()
    assert "step" not in vars(owner)


def test_a_copy_of_a_watched_object_is_not_watched_and_acts_on_itself():
    class Counts:
        number = 0

        def step(self):
            self.number += 1
            return self.number

    original = Counts()
    seen = []
    patches = Patches("nanlocator.inner")
    patches.wrap(POINT, lambda step: (seen.append(1), step())[1], of=original)
    copied = copy.deepcopy(original)
    assert copied.step() == 1 and copied.step() == 2 and original.number == 0 and not seen
    assert original.step() == 1 and seen == [1]


def test_one_may_leave_within_its_own_call():
    owner = Owner()
    patches = Patches("nanlocator.outer")

    def leaves(original, *args):
        patches.remove()
        return original(*args)

    patches.wrap(POINT, leaves, of=owner)
    assert owner.step(1) == [("step", 1)] and "step" not in vars(owner)


def test_threads_may_call_while_subscribers_come_and_go():
    is_over = threading.Event()
    results = set()

    def call():
        owner = Owner()
        while not is_over.is_set():
            results.add(tuple(map(str, owner.step(1))))

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(300):
        outer, inner = subscribed("outer", Owner), subscribed("inner", Owner)
        outer.remove()
        inner.remove()
    is_over.set()
    thread.join()
    end = "('step', 1)"
    assert results <= {(end,), ("outer", end), ("outer", "inner", end), ("inner", end)}


def test_an_error_and_an_interrupt_pass_and_leave_it_usable():
    class Fails(nn.Module):
        def forward(self, error):
            raise error

    seen = []

    def around(original):
        def call(module, args, kwargs):
            seen.append("in")
            try:
                return original(module, *args, **kwargs)
            finally:
                seen.append("out")

        return call

    before = nn.Module.__call__
    with Patches("nanlocator.loops.recorder") as patches:
        patches.wrap(points.MODULE_CALL, around)
        for error in (KeyboardInterrupt, ValueError):
            with pytest.raises(error):
                Fails()(error())
        assert torch.equal(nn.Identity()(torch.ones(1)), torch.ones(1))
    assert seen == ["in", "out"] * 3 and nn.Module.__call__ is before


def test_a_point_that_is_not_there_is_a_note_and_no_error():
    patches = Patches("nanlocator.outer")
    patches.wrap(points.Point("torch.nn:Module", "no_such", ("outer",), "what it does"), saying("outer"))
    patches.put(points.Point("torch.no_such", "step", ("outer",), "what that does"), None)
    assert patches.lost == [
        "what it does (this torch has no torch.nn.Module.no_such)",
        "what that does (this torch has no torch.no_such.step)",
    ]
    future = points.Point("torch.nn:Module", "no_such", ("outer",), "what it does", since="99.0")
    patches.wrap(future, saying("outer"))
    assert len(patches.lost) == 2


def test_an_unknown_subscriber_is_refused():
    with pytest.raises(ValueError):
        Patches("nanlocator.elsewhere").wrap(POINT, saying("x"), of=Owner())
