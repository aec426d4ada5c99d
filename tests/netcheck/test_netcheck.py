"""The network check on gloo processes: healthy machines, and every fault of the drill.

tools/bench drill measures how often each is found.
"""

import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launchers import run_netcheck, run_ranks_by_hand, run_torchrun

DEADLINE = 6  # seconds per step
DEADLINE_OF_HANGS = 3  # for steps that hang
START_AND_END = 60  # seconds: processes that import torch on a busy machine, and torchrun's end
COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv"]


class Outcome(NamedTuple):
    code: int
    verdict: dict[str, Any] | None
    text: str  # stdout and stderr
    seconds: float


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
QUICK = ["--json", "--quick", "--deadline", str(DEADLINE)]


def netcheck(world_size: int, *options: str) -> Outcome:
    start = time.monotonic()
    (ended,) = run_netcheck("--nproc-per-node", str(world_size), *QUICK, *options)
    return outcome_of(*ended, time.monotonic() - start)


def under_torchrun(world_size: int, *options: str) -> Outcome:
    """Each rank is a separate interpreter."""
    command = [*TORCHRUN, "--nproc-per-node", str(world_size), "-m", "nanlocator.netcheck", *QUICK]
    start = time.monotonic()
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=2 * START_AND_END)
    return outcome_of(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def under_forking_torchrun(world_size: int, *options: str) -> Outcome:
    start = time.monotonic()
    return outcome_of(*run_torchrun(world_size, *QUICK, *options), time.monotonic() - start)


def outcome_of(code: int, stdout: str, stderr: str, seconds: float) -> Outcome:
    return Outcome(code, json.loads(stdout) if stdout.strip() else None, stdout + stderr, seconds)


def alone(*options: str, **variables: str) -> tuple[int, str, str]:
    (ended,) = run_netcheck(*options, **variables)
    return ended


def hung_netcheck(world_size: int, *options: str) -> Outcome:
    """Of several --deadline options the last one counts."""
    return netcheck(world_size, "--inject", "hang", "--deadline", str(DEADLINE_OF_HANGS), *options)


def require(outcome: Outcome, verdict: str, rank: int) -> dict[str, Any]:
    """Requires that the fault is found on that rank alone; returns the finding."""
    assert outcome.verdict is not None, outcome.text
    assert (outcome.verdict["verdict"], outcome.verdict["ranks"]) == (verdict, [rank]), outcome.text
    broken = [line["rank"] for line in outcome.verdict["per_rank"] if not line["is_ok"]]
    assert (broken, outcome.code) == ([rank], 1), outcome.text
    return outcome.verdict["findings"][0]


# --- healthy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, layout",
    [pytest.param(4, ["--tp", "2"], marks=pytest.mark.exhaustive), (8, ["--tp", "2", "--pp", "2"])],
    ids=["4-tp2", "8-tp2-pp2"],
)
def test_healthy_ranks_raise_no_alarm(world_size, layout):
    outcome = netcheck(world_size, *layout)
    assert outcome.code == 0, outcome.text
    assert outcome.verdict["verdict"] == "healthy"
    assert outcome.verdict["findings"] == []
    assert [line["rank"] for line in outcome.verdict["per_rank"]] == list(range(world_size))
    checked = {(row["collective"], row["group"]) for row in outcome.verdict["collectives"]}
    assert {(collective, "WORLD") for collective in COLLECTIVES} <= checked
    assert {(collective, "tp") for collective in COLLECTIVES} <= checked
    assert outcome.verdict["unsupported"] == []


def test_every_dtype_and_every_pair_can_be_checked_on_odd_numbers_of_ranks():
    outcome = netcheck(3, "--dtypes", "fp32,bf16,fp16,int64", "--pairs", "--memory-fraction", "0.01")
    assert outcome.code == 0, outcome.text
    assert {row["dtype"] for row in outcome.verdict["collectives"]} == {"fp32", "bf16", "fp16", "int64"}
    pairs = {(edge["from"], edge["to"]) for edge in outcome.verdict["edges"]}
    assert pairs == {(0, 1), (0, 2), (1, 2)}


# --- the drill ---------------------------------------------------------------------------------------


# After a sum all ranks see a wrong contribution; after a copy, the receivers do.
WRONG_IN_USUAL_RUN = {
    *[("result", collective) for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")],
    *[("contribution", collective) for collective in ("all_reduce", "all_to_all", "send_recv")],
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "place, collective",
    [
        pytest.param(*each, marks=[] if each in WRONG_IN_USUAL_RUN else pytest.mark.exhaustive)
        for each in itertools.product(["result", "contribution"], COLLECTIVES)
    ],
)
def test_a_wrong_element_of_one_collective_is_traced_to_its_rank(place, collective):
    where = ["--in-contribution"] if place == "contribution" else []
    outcome = netcheck(4, "--inject", "corrupt", "--rank", "2", "--at", collective, *where)
    finding = require(outcome, "wrong result", 2)
    assert collective in finding["evidence"][0]


def test_what_two_ranks_exchange_is_compared_too():
    outcome = netcheck(3, "--pairs", "--inject", "corrupt", "--rank", "1", "--at", "timing")
    finding = require(outcome, "wrong result", 1)
    assert "of exchange fp32 64 KiB on group WORLD" in finding["evidence"][0]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_rank_that_pauses_before_each_launch_is_the_slow_one(world_size):
    finding = require(netcheck(world_size, "--inject", "slow", "--rank", "1"), "slow link", 1)
    assert "rank 1" in finding["evidence"][0]


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_a_rank_whose_thread_sleeps_for_ever_is_named_and_those_that_wait_for_it(moment):
    outcome = hung_netcheck(4, "--tp", "2", "--rank", "3", "--moment", moment)
    finding = require(outcome, "hang", 3)
    assert "all_reduce" in finding["evidence"][0]
    assert finding["evidence"][-1] == "ranks 0-2 wait for it"
    assert outcome.seconds < DEADLINE_OF_HANGS + START_AND_END


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("at", ["device", "groups", "barrier", "broadcast", "timing"])
def test_a_rank_that_hangs_in_any_stage_is_named(at):
    require(hung_netcheck(2, "--rank", "1", "--at", at), "hang", 1)


def test_a_hang_in_a_subgroup_names_the_group():
    outcome = hung_netcheck(4, "--tp", "2", "--rank", "3", "--at", "tp[2,3]")
    finding = require(outcome, "hang", 3)
    assert "tp[2,3]" in finding["evidence"][0]


# Rank 0 is the one that concludes.
KILLED_IN_USUAL_RUN = {(0, "before"), (0, "inside"), (2, "after")}


@pytest.mark.parametrize(
    "rank, moment",
    [
        pytest.param(*each, marks=[] if each in KILLED_IN_USUAL_RUN else pytest.mark.exhaustive)
        for each in itertools.product([0, 2], ["before", "inside", "after"])
    ],
)
def test_a_killed_rank_is_named_also_where_it_is_rank_0(rank, moment):
    outcome = netcheck(4, "--inject", "die", "--rank", str(rank), "--moment", moment)
    finding = require(outcome, "hang", rank)
    assert "has ended" in finding["evidence"][0]
    assert outcome.seconds < DEADLINE + START_AND_END


def test_a_stopped_process_is_distinguished_from_a_dead_one():
    outcome = netcheck(4, "--inject", "stop", "--rank", "1", "--at", "all_gather", "--moment", "inside")
    finding = require(outcome, "hang", 1)
    assert "is stopped inside all_gather" in finding["evidence"][0]
    assert outcome.seconds < DEADLINE + START_AND_END


def test_a_rank_that_reports_another_torch_is_version_skew():
    finding = require(netcheck(4, "--inject", "skew", "--rank", "1"), "version skew", 1)
    assert "torch is" in finding["evidence"][0]


def test_eight_ranks_find_the_hung_one_of_a_layout():
    outcome = hung_netcheck(8, "--tp", "2", "--pp", "2", "--rank", "5", "--at", "all_to_all")
    require(outcome, "hang", 5)


# --- torchrun ----------------------------------------------------------------------------------------


def test_healthy_ranks_under_torchrun():
    outcome = under_torchrun(2)
    assert (outcome.code, outcome.verdict["verdict"]) == (0, "healthy"), outcome.text


def test_torchruns_summary_shows_the_headline():
    outcome = under_torchrun(3, "--inject", "corrupt", "--rank", "2", "--at", "broadcast")
    require(outcome, "wrong result", 2)
    summary = outcome.text[outcome.text.index("Root Cause") :]
    assert "netcheck: wrong result: rank 2 on host" in summary


@pytest.mark.parametrize("fault, how", [("die", "has ended"), ("stop", "is stopped")])
def test_ranks_under_torchrun_conclude_after_its_sigterm(fault, how):
    outcome = under_torchrun(3, "--inject", fault, "--rank", "1")
    finding = require(outcome, "hang", 1)
    assert how in finding["evidence"][0]


# --- without a launcher's Store ----------------------------------------------------------------------


def test_where_the_host_of_the_store_dies_each_rank_says_where_it_was():
    ended = run_ranks_by_hand(3, *QUICK, "--inject", "die", "--rank", "0", "--at", "barrier")
    assert [code for code, _, _ in ended] == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        said = ended[rank][2]
        assert f"netcheck: rank {rank} on host {socket.gethostname()} has lost the Store" in said
        assert "It was in barrier on WORLD." in said


def test_ranks_that_nobody_but_the_environment_has_launched_are_healthy():
    ended = run_ranks_by_hand(2, *QUICK)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert json.loads(ended[0][1])["verdict"] == "healthy"


@pytest.mark.parametrize("drill, found", [([], "healthy"), (["--inject", "die", "--rank", "3"], "hang")])
def test_two_launchers_are_two_hosts(drill, found):
    options = ["--quick", "--json", "--tp", "2", *drill]
    options += ["--nproc-per-node", "2", "--nnodes", "2", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", "127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    ended = run_netcheck(*options, processes=2)
    (verdict,) = [json.loads(stdout) for _, stdout, _ in ended if stdout]  # rank 0's host prints it
    assert (verdict["verdict"], verdict["ranks"]) == (found, [3] if drill else []), ended
    assert [code for code, _, _ in ended] == [1 if drill else 0] * 2


# --- output ------------------------------------------------------------------------------------------


def test_nothing_but_the_checks_own_text_is_printed():
    outcome = netcheck(2, "--inject", "die", "--rank", "1", "--at", "barrier")
    assert outcome.code == 1
    _, _, rest = outcome.text.partition("\n}\n")
    assert re.fullmatch(r"(netcheck: [a-z]+\n)+", rest), outcome.text


def test_a_verdict_that_cannot_be_written_is_still_printed_and_the_folder_named(tmp_path):
    missing = tmp_path / "missing"
    outcome = netcheck(2, "--output", str(missing / "netcheck.json"))
    assert (outcome.code, outcome.verdict["verdict"]) == (1, "healthy")
    assert str(missing) in outcome.text


def test_a_full_disk_loses_no_verdict():
    options = ["--quick", "--json", "--nproc-per-node", "2"]
    ((code, _, said),) = run_netcheck(*options, stdout=Path("/dev/full"))
    assert code == 1
    assert '"verdict": "healthy"' in said
    assert "cannot write to standard output: No space left on device" in said


def test_the_verdict_is_written_where_the_user_wants_it(tmp_path):
    file = tmp_path / "netcheck.json"
    outcome = netcheck(2, "--output", str(file))
    assert (outcome.code, outcome.verdict["verdict"]) == (0, "healthy")
    assert json.loads(file.read_text()) == outcome.verdict


# --- wrong use ---------------------------------------------------------------------------------------


def test_a_start_without_a_number_of_ranks_says_what_to_type():
    code, _, said = alone()
    assert code == 2
    assert "nanlocator netcheck --nproc-per-node 8" in said
    assert "torchrun --nproc-per-node 8 -m nanlocator.netcheck" in said
    assert said.endswith("; see nanlocator netcheck --help\n")


def test_half_of_a_launchers_environment_says_what_is_missing():
    code, _, said = alone(RANK="0", MASTER_ADDR="127.0.0.1")
    assert code == 2
    assert "RANK is set, but not WORLD_SIZE, MASTER_PORT" in said


@pytest.mark.parametrize(
    "world_size, options, message",
    [
        (1, [], "a single rank has no peer to communicate with"),
        (2, ["--tp", "4"], "2 ranks cannot be laid out"),
        (2, ["--backend", "smoke"], "--backend smoke: this torch"),
        (2, ["--inject", "die", "--rank", "7"], "--rank 7: expected 0 to 1"),
        (
            2,
            ["--inject", "die", "--rank", "1", "--at", "all_reduse"],
            "--at all_reduse: no such step",
        ),
    ],
)
@pytest.mark.parametrize(
    "start, code", [(netcheck, 2), pytest.param(under_forking_torchrun, 1, marks=pytest.mark.exhaustive)]
)
def test_wrong_use_is_said_once(world_size, options, message, start, code):
    outcome = start(world_size, *options)
    assert outcome.code == code
    assert outcome.verdict is None
    assert outcome.text.count(message) == 1, outcome.text


def test_wrong_use_under_torchrun_is_said_by_one_rank():
    outcome = under_forking_torchrun(2, "--tp", "4")
    assert (outcome.code, outcome.verdict) == (1, None)
    assert outcome.text.count("2 ranks cannot be laid out") == 1, outcome.text


@pytest.mark.parametrize(
    "options",
    [
        ["--inject", "die"],
        ["--max-bytes", "7"],
        ["--max-bytes", "lots"],
        ["--dtypes", "fp8"],
        ["--deadline", "0"],
        ["--memory-fraction", "2"],
        ["--tp", "0"],
        ["--nproc-per-node", "many"],
        ["--nnodes", "1:4", "--nproc-per-node", "2"],
        ["--tensor-parallel", "2"],
    ],
)
def test_options_that_cannot_be_meant_end_with_2(options):
    code, _, said = alone(*options)
    assert code == 2
    assert options[0] in said


def test_the_template_for_slurm_needs_no_ranks():
    code, script, _ = alone("--slurm-template", "--tp", "4")
    assert code == 0
    assert script.startswith("#!")
    assert "--tp 4" in script
