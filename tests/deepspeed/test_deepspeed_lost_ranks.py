"""A rank is killed in a step: the other one ends in time, and its files name the killed rank."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from on_cpu import run_ranks

DEADLINE = 2.0  # gather_deadline
IN_TIME = 20.0  # allows for other work on the machine


def one_rank_dies(rank, world_size, variant, phase):
    from engine_training import Training
    from ranks import excuse

    training = Training(rank, variant, gather_deadline=DEADLINE)
    training.step()

    def die(*_):
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_rerun(*_):
        if training.locator._driver.is_rerunning:
            die()

    if phase == "repeat" and rank == 0:
        training.model.divide.divisor = 0.0
    if rank == 1 and phase == "forward":
        training.model.divide.register_forward_pre_hook(die)
    if rank == 1 and phase == "backward":
        training.model.body.weight.register_hook(die)
    if rank == 1 and phase == "reduction":
        setattr(training.locator._layout.reducer, training.locator._layout.reduction, die)
    if rank == 1 and phase == "repeat":
        training.model.divide.register_forward_pre_hook(die_in_rerun)
    excuse(1)
    try:
        training.step()
    except Exception:
        return time.time()
    return None


# In every phase of one stage, and in the other stages' own collectives.
KILLED = [
    *(("zero2", phase) for phase in ("forward", "backward", "reduction", "repeat")),
    ("zero1", "reduction"),
    ("zero3_partitioned", "forward"),
    ("zero3_partitioned", "reduction"),
]
FURTHER = [
    *(("zero1", phase) for phase in ("forward", "backward", "repeat")),
    *(("zero3_partitioned", phase) for phase in ("backward", "repeat")),
]


@pytest.mark.parametrize(
    ("variant", "phase"),
    [*KILLED, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in FURTHER)],
)
def test_the_survivor_ends_in_time_and_names_the_rank_that_was_killed(variant, phase):
    ended, victim = run_ranks(2, one_rank_dies, variant, phase)
    assert victim is None and ended is not None
    assert ended - Path("died").stat().st_mtime < IN_TIME
    verdict = json.loads(Path("run/a0/verdict.json").read_text())
    assert verdict["iteration"] == 2
    if phase != "repeat":
        assert (verdict["status"], verdict["silent_ranks"]) == ("partial", [1])
        return
    verdicts = [json.loads(path.read_text()) for path in Path("run/a0").glob("verdict*.json")]
    assert [1] in [each["silent_ranks"] for each in verdicts]
    origins = [origin for each in verdicts for origin in each["origins"]]  # earlier findings
    assert origins and all(0 in origin["candidates"] for origin in origins)
