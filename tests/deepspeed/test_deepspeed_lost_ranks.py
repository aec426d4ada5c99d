"""A rank is killed in backward: the other one ends in time, and its files say which it was."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from on_cpu import run_ranks

DEADLINE = 2.0  # gather_deadline
IN_TIME = 20.0  # for the machine that runs this beside other things


def one_rank_dies(rank, world_size, variant):
    from engine_training import Training
    from ranks import excuse

    training = Training(rank, variant, gather_deadline=DEADLINE)
    training.step()

    def die(gradient):
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        training.model.body.weight.register_hook(die)
    excuse(1)
    try:
        training.step()
    except Exception:
        return time.time()
    return None


@pytest.mark.parametrize("variant", ["zero1", "zero2", "zero3_partitioned"])
def test_the_survivor_ends_in_time_and_names_the_rank_that_was_killed(variant):
    ended, victim = run_ranks(2, one_rank_dies, variant)
    assert victim is None and ended is not None
    died = Path("died").stat().st_mtime
    assert ended - died < IN_TIME
    verdict = json.loads(Path("run/a0/verdict.json").read_text())
    assert (verdict["status"], verdict["silent_ranks"], verdict["iteration"]) == ("partial", [1], 2)
