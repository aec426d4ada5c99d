"""Runs for each kind of ``Training``; ``kind(rank, variant, fault, culprits)`` makes one rank's training."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from damaged_collectives import methods_of
from ranks import excuse, run_kept_ranks, run_ranks, standard_error
from sharded_training import Scale
from torch._C._distributed_c10d import ProcessGroup

import nanlocator

DEADLINE = 2.0


def healthy(rank, world_size, kind, variant, options=None):
    """Every step is re-run and gives the same result."""
    alone = kind(rank, variant)
    losses = [alone.step() for _ in range(3)]
    expected = alone.state()
    training = kind(rank, variant)
    watch = nanlocator.watch(training.model, training.optimizer, rerun="always", **(options or {}))
    with standard_error() as printed:
        assert [training.step() for _ in range(3)] == losses
        watch.remove()
        assert "nanlocator: step" not in printed()
    assert all(torch.equal(a, b) for a, b in zip(expected, training.state(), strict=True))
    return watch.verdicts


def watched(rank, world_size, kind, variant, fault, culprits=(1,), options=None):
    return verdict_of(kind(rank, variant, fault, culprits), **(options or {}))


def verdict_of(training, **options):
    """The verdict that stops three steps; if nothing stops them, the verdicts of ``watch``."""
    with contextlib.ExitStack() as undone:
        undone.enter_context(training.planted_below())
        watch = nanlocator.watch(training.model, training.optimizer, **options)
        undone.callback(watch.remove)
        undone.enter_context(training.planted())
        try:
            for _ in range(3):
                training.step()
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict
        return watch.verdicts


def located(ranks, kind, variant, fault, *arguments):
    """The verdict, which is the same on all ranks."""
    verdicts = run_kept_ranks(ranks, watched, kind, variant, fault, *arguments)
    assert all(verdict == verdicts[0] for verdict in verdicts), verdicts
    assert verdicts[0]["iteration"] == 2
    return verdicts[0]


def recovered(rank, world_size, kind, variant, fault):
    """After a fault that happens once, training recovers the healthy result. Returns the verdicts' steps."""
    alone = kind(rank, variant)
    for _ in range(3):
        alone.step()
    expected = alone.state()
    training = kind(rank, variant, fault)
    verdicts = verdict_of(training, on_bad="recover")
    assert all(torch.equal(a, b) for a, b in zip(expected, training.state(), strict=True))
    return [verdict["iteration"] for verdict in verdicts]


def assert_that_a_killed_rank_is_named(ranks, kind, variant, phase):
    """The other ranks name rank 1 in time, and keep their earlier findings."""
    first, victim, *others = run_ranks(ranks, _killed, kind, variant, phase)
    assert victim is None
    # In the repeat, nanlocator ends a rank whose training does not return from gloo.
    came_back = [seconds for seconds in (first, *others) if phase != "repeat" or seconds is not None]
    assert came_back and all(seconds < 10 * DEADLINE for seconds in came_back)
    verdicts = [json.loads(path.read_text()) for path in Path("nanlocator_run/a0").glob("verdict*.json")]
    assert [1] in [verdict["silent_ranks"] for verdict in verdicts]
    if phase == "repeat":
        candidates = [origin["candidates"] for verdict in verdicts for origin in verdict["origins"]]
        assert candidates and all(0 in each for each in candidates), verdicts
    else:
        own = json.loads(Path("nanlocator_run/a0/verdict_rank0.json").read_text())
        assert (own["status"], own["silent_ranks"], own["origins"]) == ("partial", [1], [])


def _killed(rank, world_size, kind, variant, phase):
    training = kind(rank, variant, "forward" if phase == "repeat" else None, culprits=(0,))
    watch = nanlocator.watch(training.model, training.optimizer, gather_deadline=DEADLINE)
    training.step()
    excuse(1)
    if rank == 1:
        die_in(phase, training, watch)
    began = time.monotonic()
    try:
        for _ in range(2):  # if a rank ends in its update, the next step misses it
            training.step()
    except Exception:  # an error of the transfers
        seconds = time.monotonic() - began
        written = Path("nanlocator_run/a0/verdict_rank0.json")
        while time.monotonic() < began + seconds + 2 * DEADLINE:  # time for the monitor to write
            if phase != "repeat" and written.exists():
                break
            time.sleep(0.1)
        if rank == 0:  # a rank without a connection to the victim may end only when its peer ends
            excuse(*range(1, world_size))
        return seconds


def die_in(phase, training, watch):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "reduction":  # the others are in it, or reach it
        for method in methods_of("_reduce_scatter_base"):
            setattr(ProcessGroup, method, die)
        return
    scale = next(module for module in training.model.modules() if isinstance(module, Scale))
    if phase == "forward":
        scale.register_forward_pre_hook(die)
    elif phase == "backward":
        scale.register_full_backward_hook(die)
    elif phase == "repeat":
        scale.register_forward_pre_hook(lambda *_: die() if watch._driver.is_rerunning else None)
    else:
        training.optimizer.register_step_pre_hook(die)
