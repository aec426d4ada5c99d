"""A rank is killed in the middle of a step: the others end in time, and their files name it.

NANLOCATOR_TEST_REPETITIONS (default 1): number of tries of each moment.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import excuse, run_ranks
from test_ranks import backward, make

import nanlocator

DEADLINE = 2.0  # gather_deadline: a rank is lost after 1 s; all know it two polls of 0.17 s later
# For a busy machine: five times the duration on a quiet one.
IN_TIME = 5 * DEADLINE
VICTIM = 2
OTHERS = (0, 1, 3)
REPETITIONS = int(os.environ.get("NANLOCATOR_TEST_REPETITIONS", "1"))
repeated = pytest.mark.parametrize("repetition", range(REPETITIONS))


def die() -> None:
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment, locator):
    """Dies in the second step, after the engine has reached that moment."""
    locator.begin_step(2)
    if moment in ("gathering", "concluding"):
        locator.start_agreement()
    if moment == "concluding":
        locator.finish_agreement()
    die()


def one_rank_dies(rank, world_size, moment):
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    dist.barrier()
    excuse(VICTIM)
    try:
        backward(model, rank)
        if moment in ("gathering", "concluding"):
            model.module[0].bias.grad[1] = float("nan")
        if rank == VICTIM:
            die_at(moment, optimizer._driver.locator)
        optimizer.step()
        return "went on", time.time()
    except nanlocator.Error as error:
        if rank == 0:
            # A rank without a connection to the victim may wait in gloo's reduction of the flag until its
            # neighbours end. By then it no longer needs the Store.
            time.sleep(DEADLINE)
            excuse(*OTHERS)
        return type(error).__name__, time.time()


@repeated
@pytest.mark.parametrize("moment", ["agreement", "gathering", "concluding"])
def test_the_others_end_in_time_and_name_the_rank_that_was_killed(moment, repetition):
    results = run_ranks(4, one_rank_dies, moment)
    assert results[VICTIM] is None
    died = Path("died").stat().st_mtime
    for rank in OTHERS:
        ended_by, ended = results[rank]
        assert ended_by != "went on", results
        assert ended - died < 2 * IN_TIME, results
        file = f"verdict_rank{rank}.json" if moment == "agreement" else "verdict.json"
        check_names_the_victim(file)
        assert Path("run/a0", file).stat().st_mtime - died < IN_TIME
    # In "gathering" the reduction may have been complete when the rank died.
    states = {"concluding": {"stopped"}, "gathering": {"stopped", "rank_lost"}}
    check_status(states.get(moment, {"rank_lost"}))


def check_names_the_victim(file):
    verdict = json.loads(Path("run/a0", file).read_text())
    assert verdict["status"] == "partial"
    assert verdict["silent_ranks"] == [VICTIM], file
    assert "has not answered since iteration" in verdict["notes"][0]
    assert f"rank {VICTIM} (dp{VICTIM}, host" in verdict["notes"][0]


def check_status(states):
    status = json.loads(Path("run/a0/status.json").read_text())
    assert status["silent_ranks"] == [VICTIM]
    assert status["state"] in states


def one_rank_dies_while_others_hang(rank, world_size):
    """Rank 0 waits for a transfer from rank 3, which is alive in a call that holds Python's GIL, such as a
    kernel launch into a full queue; rank 1 is idle."""
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    dist.barrier()
    excuse(VICTIM)
    tensor = torch.ones(1)
    if rank == VICTIM:
        die()
    if rank == 3:
        ctypes.PyDLL(None).usleep(int(1e6 * IN_TIME))
        dist.send(tensor, 0)
    elif rank == 0:
        dist.recv(tensor, 3)
    else:
        time.sleep(IN_TIME)
    return time.time()


@repeated
def test_ranks_that_hang_have_their_files_on_disk_all_the_same(repetition):
    ends = run_ranks(4, one_rank_dies_while_others_hang)
    died = Path("died").stat().st_mtime
    for rank in OTHERS:
        file = f"verdict_rank{rank}.json"
        written = Path("run/a0", file).stat().st_mtime
        print(f"{file}: {written - died:.2f} s after the death")
        assert written < ends[rank], "not before the rank went on"
        assert ends[rank] - died >= 0.9 * IN_TIME
        check_names_the_victim(file)
        assert Path(f"run/a0/ledger_tp0pp0dp{rank}.jsonl").exists()
    check_names_the_victim("verdict.json")
    check_status({"rank_lost"})


def the_host_of_the_store_dies(rank, world_size):
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    dist.barrier()
    time.sleep(DEADLINE)  # until all are connected: torch's client tries to connect for a minute
    if rank == 0:
        die()
    started = time.monotonic()
    optimizer._driver.locator.begin_step(2)
    try:
        optimizer._driver.locator.start_agreement()
        optimizer._driver.locator.finish_agreement()
    except nanlocator.AgreementError as error:
        text = str(error)
    # ranks.py would report the end to rank 0, which hosted that Store.
    Path(f"told{rank}").write_text(json.dumps([text, time.monotonic() - started]))
    os._exit(0)


@repeated
def test_where_the_store_dies_with_rank_zero_that_rank_is_named(repetition):
    run_ranks(3, the_host_of_the_store_dies)
    for rank in (1, 2):
        text, seconds = json.loads(Path(f"told{rank}").read_text())
        assert "rank 0, whose process hosts the Store" in text
        assert seconds < IN_TIME
        verdict = json.loads(Path(f"run/a0/verdict_rank{rank}.json").read_text())
        assert verdict["silent_ranks"] == [0]
    assert json.loads(Path("run/a0/status.json").read_text())["silent_ranks"] == [0]


def one_rank_raises(rank, world_size, error):
    model, optimizer = make(rank, gather_deadline=8.0)
    backward(model, rank)
    optimizer.step()
    dist.barrier()
    if rank == 1:
        # As the interpreter does for an uncaught exception, but in a process that must continue.
        sys.last_value = error
        optimizer._driver.connection._goodbye()
        return "raised"
    started = time.monotonic()
    if isinstance(error, RuntimeError):
        time.sleep(1.5)  # two intervals of heartbeats
        return sorted(path.name for path in Path("run/a0").glob("[!p]*"))
    optimizer._driver.locator.begin_step(2)
    verdict = json.loads(optimizer._driver.locator.conclude_alone("a collective failed", is_of_peers=True))
    return verdict["silent_ranks"], verdict["notes"][0], time.monotonic() - started


def test_a_rank_that_an_exception_ends_is_lost_with_its_text():
    first, _, third = run_ranks(3, one_rank_raises, ValueError("no data\nin shard 7"))
    for silent, note, seconds in (first, third):
        assert silent == [1]
        assert "ended by ValueError: no data (in iteration 1)" in note
        assert seconds < 3.5  # a rank is silent after 4 s, the deadline is 8 s


def test_a_rank_that_a_failed_transfer_ends_is_not_accused():
    error = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    first, _, third = run_ranks(3, one_rank_raises, error)
    assert first == third == ["run.json"]


def all_end_in_good_order(rank, world_size):
    model, optimizer = make(rank, gather_deadline=DEADLINE)
    backward(model, rank)
    optimizer.step()
    if rank == 1:
        optimizer._driver.connection.close()
        return []
    time.sleep(1.5 * DEADLINE)
    return sorted(path.name for path in Path("run/a0").glob("[!p]*"))


def test_a_rank_that_ends_earlier_in_good_order_is_not_lost():
    first, _, third = run_ranks(3, all_end_in_good_order)
    assert first == third == ["run.json"]


def one_rank_is_terminated(rank, world_size, is_in_rerun, has_handler):
    if has_handler and rank == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: Path("handled").touch() or os._exit(0))
    model = torch.nn.Linear(4, 4)
    optimizer = nanlocator.LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, output_dir="run", gather_deadline=8.0
    )
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * (float("nan") if rank == 1 else 1)).backward()
        if calls == 1 + is_in_rerun and rank == (1 if is_in_rerun else 0):
            if not is_in_rerun:
                time.sleep(1.0)  # the other rank waits in the agreement
                os.kill(int(Path("process").read_text()), signal.SIGTERM)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGTERM)
            ctypes.PyDLL(None).sleep(60)
        return torch.zeros(())

    if rank == 1:
        excuse(0, 1)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        Path("process").write_text(str(os.getpid()))
    dist.barrier()
    optimizer.step(closure)


@pytest.mark.parametrize("is_in_rerun", [False, True], ids=["agreement", "rerun"])
def test_a_rank_that_sigterm_ends_leaves_its_ledger_and_a_partial_verdict(is_in_rerun):
    results = run_ranks(2, one_rank_is_terminated, is_in_rerun, False)
    line = r"nanlocator: SIGTERM ended rank 1 in step 1, .* nanlocator report \S*run/a0\n"
    assert re.search(line, Path("stderr").read_text())
    assert results[1] is None
    verdict = json.loads(Path("run/a0/verdict_rank1.json").read_text())
    assert verdict["status"] == "partial"
    assert 1 in verdict["origins"][0]["candidates"]
    assert any("SIGTERM ended rank 1" in note for note in verdict["notes"]), verdict["notes"]
    ledgers = [path.read_text() for path in Path("run/a0").glob("ledger_*dp1*.jsonl")]
    assert '"first_bad"' in "".join(ledgers)


def test_a_handler_of_the_program_keeps_sigterm():
    run_ranks(2, one_rank_is_terminated, False, True)
    assert Path("handled").exists()
    assert not any("SIGTERM" in path.read_text() for path in Path("run/a0").glob("*.json*"))


def a_forked_child_is_terminated(rank, world_size):
    make(rank)
    child = os.fork()
    if child == 0:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_sigterm_ends_a_forked_child_at_once():
    assert run_ranks(2, a_forked_child_is_terminated) == [-signal.SIGTERM] * 2
