"""The contract of a step: what every adapter does, whichever framework drives it.

tests/step/contract_test.cpp holds the C++ adapter to the same cases. Each case gets a function that makes a
Loop (loops.py)."""

import pytest
import torch

from nanlocator import NonFiniteGradientError

FIRST = (1,)  # the fault is gone when the step is executed again


def healthy(make):
    watched, alone = make(), make(watched=False)
    watched.run(4)
    alone.run(4)
    assert torch.equal(watched.weights(), alone.weights())
    assert watched.found == []


def bad(make):
    loop = make()
    loop.bad_in(2)
    loop.run(1)
    before = loop.weights()
    with pytest.raises(NonFiniteGradientError) as raised:
        loop.run(1)
    (origin,) = raised.value.verdict["origins"]
    assert origin["parameter"].endswith("weight") and origin["tensor"]["nan"] == 1
    assert loop.found == [2]
    assert torch.equal(loop.weights(), before)


def bad_twice_in_a_row(make):
    loop = make(on_bad="skip")
    loop.bad_in(2, 3)
    loop.run(4)
    assert loop.found == [2, 3]
    assert loop.weights().isfinite().all()


def policy_stop(make):
    loop = make()
    loop.bad_in(1, 3)
    with pytest.raises(NonFiniteGradientError):
        loop.run(1)
    before = loop.weights()
    loop.run(1)  # a caller that goes on is in a fresh step
    assert not torch.equal(loop.weights(), before)
    with pytest.raises(NonFiniteGradientError):
        loop.run(1)
    assert loop.found == [1, 3]


def policy_report(make):
    """What the framework does with bad gradients, it does."""
    loop, alone = make(on_bad="report"), make(watched=False)
    for each in (loop, alone):
        each.bad_in(2)
        each.run(2)
    assert loop.found == [2]
    assert torch.allclose(loop.weights(), alone.weights(), rtol=0, atol=0, equal_nan=True)


def policy_skip(make):
    loop, shorter = make(on_bad="skip"), make(watched=False)
    loop.bad_in(3)
    loop.run(3)
    shorter.run(2)
    assert torch.equal(loop.weights(), shorter.weights())
    before = loop.weights()
    loop.run(1)
    assert not torch.equal(loop.weights(), before)
    assert loop.found == [3]


def policy_recover(make):
    recovered, alone = make(on_bad="recover"), make(watched=False)
    recovered.bad_in(2, executions=FIRST)
    recovered.run(4)
    alone.run(4)
    assert torch.equal(recovered.weights(), alone.weights())
    assert recovered.found == [2]


def policy_recover_stops_where_it_repeats(make):
    loop = make(on_bad="recover")
    loop.bad_in(1)
    with pytest.raises(NonFiniteGradientError):
        loop.run(1)


def exception_in_the_pass(make):
    loop = make()
    loop.run(1)

    def fail(step, execution):
        if step == 2:
            raise KeyError("the user's own")

    loop.fault = fail
    with pytest.raises(KeyError, match="the user's own"):
        loop.run(1)
    loop.bad_in(4)
    before = loop.weights()
    loop.run(1)
    assert not torch.equal(loop.weights(), before)
    with pytest.raises(NonFiniteGradientError):
        loop.run(1)
    assert loop.found == [4]


def routine_overflow(make):
    loop = make(scaler=True)
    before = loop.weights()
    loop.run(30)
    assert loop.dismissed() > 0 and loop.found == []
    assert not torch.equal(loop.weights(), before) and loop.weights().isfinite().all()


def options_changed(make):
    loop = make(on_bad="skip")
    loop.bad_in(1, 2)
    loop.run(1)
    loop.watch(on_bad="stop", rerun=False, level="grads")
    with pytest.raises(NonFiniteGradientError) as raised:
        loop.run(1)
    assert raised.value.verdict["rerun"]["done"] is False
    assert loop.found == [1, 2]


def remove_in_the_middle(make):
    loop, alone = make(level="modules"), make(watched=False)

    def remove(step, execution):
        if step == 2:
            loop.remove()

    loop.fault = remove
    loop.run(4)
    alone.run(4)
    assert torch.equal(loop.weights(), alone.weights())
    assert loop.found == []


def two_optimizers(make):
    one, other = make(on_bad="skip"), make(on_bad="skip")
    one.bad_in(2)
    other.bad_in(3)
    for _ in range(4):
        one.run(1)
        other.run(1)
    assert (one.found, other.found) == ([2], [3])


def gradient_accumulation(make):
    recovered, alone = make(on_bad="recover", microbatches=3), make(watched=False, microbatches=3)
    recovered.bad_in(2, executions=FIRST)
    recovered.run(3)
    alone.run(3)
    assert torch.equal(recovered.weights(), alone.weights())
    assert recovered.found == [2]


def clip_inside_the_pass(make):
    """Where the framework clips later, as it does."""
    recovered, alone = make(on_bad="recover", clip=True), make(watched=False, clip=True)
    recovered.bad_in(2, executions=FIRST)
    recovered.run(3)
    alone.run(3)
    assert torch.equal(recovered.weights(), alone.weights())
    stopped = make(clip=True)
    stopped.bad_in(1)
    verdict = verdict_of(stopped)
    assert verdict["rerun"]["reproduced"] is True
    assert verdict["origins"][0]["tensor"]["nan"] == 1  # not what the clip has made of it


def torchs_clip_inside_the_pass(make):
    """It makes every gradient NaN where one is."""
    stopped = make(clip="torch")
    stopped.bad_in(1)
    verdict = verdict_of(stopped)
    assert verdict["rerun"]["reproduced"] is True
    (origin,) = verdict["origins"]
    assert (origin["parameter"], origin["tensor"]["nan"]) == ("head.weight", 1)


def verdict_of(loop):
    with pytest.raises(NonFiniteGradientError) as raised:
        loop.run(1)
    return raised.value.verdict


CASES = [
    healthy,
    bad,
    bad_twice_in_a_row,
    policy_stop,
    policy_report,
    policy_skip,
    policy_recover,
    policy_recover_stops_where_it_repeats,
    exception_in_the_pass,
    routine_overflow,
    options_changed,
    remove_in_the_middle,
    two_optimizers,
    gradient_accumulation,
    clip_inside_the_pass,
    torchs_clip_inside_the_pass,
]

NOTHING_TO_EXECUTE = "forward and backward cannot be executed again"
OWN_CLIP = "the framework clips by itself, after the pass"
LEFT_OUT = {
    (policy_recover, "plain_without_closure"): NOTHING_TO_EXECUTE,
    (gradient_accumulation, "plain_without_closure"): NOTHING_TO_EXECUTE,
    (clip_inside_the_pass, "plain_without_closure"): NOTHING_TO_EXECUTE,
    (torchs_clip_inside_the_pass, "plain_without_closure"): "there is no pass that it is inside of",
    (routine_overflow, "plain_with_closure"): "GradScaler refuses closures",
    (two_optimizers, "watch"): "one watch is told of all optimizers",
    (remove_in_the_middle, "trainer"): "its hooks go when train() ends",
    (two_optimizers, "trainer"): "train() runs one at a time",
    (torchs_clip_inside_the_pass, "trainer"): OWN_CLIP,
    (torchs_clip_inside_the_pass, "megatron"): OWN_CLIP,
    (torchs_clip_inside_the_pass, "deepspeed"): OWN_CLIP,
    (torchs_clip_inside_the_pass, "deepspeed_in_parts"): OWN_CLIP,
    (exception_in_the_pass, "deepspeed_in_parts"): "ZeRO 2 and 3 themselves cannot go on after one",
    (two_optimizers, "deepspeed"): "a process records the steps of one engine",
    (two_optimizers, "deepspeed_in_parts"): "a process records the steps of one engine",
    (two_optimizers, "megatron"): "its parallel state is the process's: one model at a time",
    (routine_overflow, "cpp"): "libtorch has no GradScaler",
    (remove_in_the_middle, "cpp"): "there is no remove()",
    (
        torchs_clip_inside_the_pass,
        "cpp",
    ): "libtorch's clip_grad_norm_ is inline: nothing can be put before it",
}
