"""A rank is killed in the middle of a step: the others end in time, and their files say which it was."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from test_ranks import backward, make

import nanlocator

DEADLINE = 3.0  # gather_deadline: a rank is lost after 1.5 s
IN_TIME = 4 * DEADLINE  # for the machine that runs this beside other things
VICTIM = 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAt:
    """Stands in for the engine's locator and ends the process where it is asked for `method`."""

    def __init__(self, locator, method):
        self._locator, self._method = locator, method

    def __getattr__(self, name):
        if name == self._method:
            die()
        return getattr(self._locator, name)


def one_rank_dies(rank, world_size, moment):
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    torch.distributed.barrier()
    if moment == "forward":
        if rank == VICTIM:
            die()
        time.sleep(3 * DEADLINE)  # as in a collective that the victim never comes to
        return "hung", 0.0
    started = time.monotonic()
    try:
        backward(model, rank)
        if moment in ("gathering", "concluding"):
            model.module[0].bias.grad[1] = float("nan")
        if rank == VICTIM:
            method = {"agreement": "start_agreement", "gathering": "finish_agreement"}.get(moment, "conclude")
            optimizer._locator = DiesAt(optimizer._locator, method)
        optimizer.step()
        return "went on", time.monotonic() - started
    except nanlocator.Error as error:
        return type(error).__name__, time.monotonic() - started


@pytest.mark.parametrize("moment", ["forward", "agreement", "gathering", "concluding"])
def test_the_others_end_in_time_and_name_the_rank_that_was_killed(moment):
    results = run_ranks(4, one_rank_dies, moment)
    assert results[VICTIM] is None
    for rank in (0, 1, 3):
        ended_by, seconds = results[rank]
        assert ended_by != "went on", results
        assert seconds < IN_TIME, results
        files = [f"verdict_rank{rank}.json"] if moment in ("forward", "agreement") else ["verdict.json"]
        for file in files:
            verdict = json.loads(Path("run/a0", file).read_text())
            assert verdict["status"] == "partial"
            assert verdict["silent_ranks"] == [VICTIM], file
            assert "has not answered since iteration" in verdict["notes"][0]
            assert f"rank {VICTIM} (dp{VICTIM}, host" in verdict["notes"][0]
    status = json.loads(Path("run/a0/status.json").read_text())
    assert status["silent_ranks"] == [VICTIM]
    # In "gathering" the reduction may have been complete when the rank died.
    states = {"concluding": {"stopped"}, "gathering": {"stopped", "rank_lost"}}
    assert status["state"] in states.get(moment, {"rank_lost"})


def the_host_of_the_store_dies(rank, world_size):
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    torch.distributed.barrier()
    if rank == 0:
        die()
    started = time.monotonic()
    optimizer._locator.begin_step(2)
    try:
        optimizer._locator.start_agreement()
        optimizer._locator.finish_agreement()
    except nanlocator.AgreementError as error:
        text = str(error)
    # ranks.py tells rank 0 that this one has ended, and rank 0 hosted that Store.
    Path(f"told{rank}").write_text(json.dumps([text, time.monotonic() - started]))
    os._exit(0)


def test_where_the_store_dies_with_rank_zero_that_rank_is_named():
    run_ranks(3, the_host_of_the_store_dies)
    for rank in (1, 2):
        text, seconds = json.loads(Path(f"told{rank}").read_text())
        assert "rank 0, whose process hosts the Store" in text
        assert seconds < IN_TIME
        verdict = json.loads(Path(f"run/a0/verdict_rank{rank}.json").read_text())
        assert verdict["silent_ranks"] == [0]
    assert json.loads(Path("run/a0/status.json").read_text())["silent_ranks"] == [0]


def one_rank_raises(rank, world_size):
    model, optimizer = make(rank, gather_deadline=30.0)
    backward(model, rank)
    optimizer.step()
    if rank == 1:
        # What the interpreter does for an exception that nobody catches, in a process that must live on.
        sys.last_value = ValueError("no data\nin shard 7")
        optimizer._connection._goodbye()
        return "raised"
    started = time.monotonic()
    optimizer._locator.begin_step(2)
    verdict = json.loads(optimizer._locator.conclude_alone("a collective failed", is_of_peers=True))
    return verdict["silent_ranks"], verdict["notes"][0], time.monotonic() - started


def test_a_rank_that_an_exception_ends_is_lost_with_its_text():
    first, _, third = run_ranks(3, one_rank_raises)
    for silent, note, seconds in (first, third):
        assert silent == [1]
        assert "ended by ValueError: no data (in iteration 1)" in note
        assert seconds < 15  # a heartbeat's interval is 2.5 s, the deadline 30 s


def all_end_in_good_order(rank, world_size):
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    if rank == 1:
        optimizer._connection.close()
        return []
    time.sleep(1.5 * DEADLINE)
    return sorted(path.name for path in Path("run/a0").glob("[!p]*"))


def test_a_rank_that_ends_earlier_in_good_order_is_not_lost():
    first, _, third = run_ranks(3, all_end_in_good_order)
    assert first == third == ["run.json"]
