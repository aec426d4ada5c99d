"""The network check on gloo processes: healthy machines, and every fault of the drill.

tools/bench drill tells how often each is found.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest
from ranks import free_port

DEADLINE = 6  # seconds, of a step
START_AND_END = 60  # seconds: processes that import torch on a busy machine, and torchrun's end
COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv"]


class Outcome(NamedTuple):
    code: int
    verdict: dict[str, Any] | None
    text: str  # stdout and stderr
    seconds: float


OWN_LAUNCHER = [sys.executable, "-m", "nanlocator.netcheck"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def netcheck(world_size: int, *options: str, under_torchrun: bool = False) -> Outcome:
    command = [*(TORCHRUN if under_torchrun else OWN_LAUNCHER), "--nproc-per-node", str(world_size)]
    command += ["-m", "nanlocator.netcheck"] if under_torchrun else []
    start = time.monotonic()
    run = subprocess.run(
        [*command, "--json", "--quick", "--deadline", str(DEADLINE), *options],
        capture_output=True,
        text=True,
        timeout=2 * START_AND_END,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    verdict = json.loads(run.stdout) if run.stdout.strip() else None
    return Outcome(run.returncode, verdict, run.stdout + run.stderr, time.monotonic() - start)


def alone(*options: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "nanlocator.netcheck", *options],
        capture_output=True,
        text=True,
        timeout=START_AND_END,
        env=variables,
    )


def require(outcome: Outcome, verdict: str, rank: int) -> dict[str, Any]:
    """The fault is found, on that rank alone; its finding."""
    assert outcome.verdict is not None, outcome.text
    assert (outcome.verdict["verdict"], outcome.verdict["ranks"]) == (verdict, [rank]), outcome.text
    broken = [line["rank"] for line in outcome.verdict["per_rank"] if not line["is_ok"]]
    assert (broken, outcome.code) == ([rank], 1), outcome.text
    return outcome.verdict["findings"][0]


# --- healthy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, layout", [(2, []), (4, ["--tp", "2"]), (8, ["--tp", "2", "--pp", "2"])])
def test_healthy_ranks_raise_no_alarm(world_size, layout):
    outcome = netcheck(world_size, *layout)
    assert outcome.code == 0, outcome.text
    assert outcome.verdict["verdict"] == "healthy"
    assert outcome.verdict["findings"] == []
    assert [line["rank"] for line in outcome.verdict["per_rank"]] == list(range(world_size))
    checked = {(row["collective"], row["group"]) for row in outcome.verdict["collectives"]}
    assert {(collective, "WORLD") for collective in COLLECTIVES} <= checked
    if layout:
        assert {(collective, "tp") for collective in COLLECTIVES} <= checked
    assert outcome.verdict["unsupported"] == []


def test_every_dtype_and_every_pair_can_be_checked_on_odd_numbers_of_ranks():
    outcome = netcheck(3, "--dtypes", "fp32,bf16,fp16,int64", "--pairs", "--memory-fraction", "0.01")
    assert outcome.code == 0, outcome.text
    assert {row["dtype"] for row in outcome.verdict["collectives"]} == {"fp32", "bf16", "fp16", "int64"}
    pairs = {(edge["from"], edge["to"]) for edge in outcome.verdict["edges"]}
    assert pairs == {(0, 1), (0, 2), (1, 2)}


# --- the drill ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [[], ["--in-contribution"]], ids=["result", "contribution"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wrong_element_of_one_collective_is_traced_to_its_rank(collective, place):
    outcome = netcheck(4, "--inject", "corrupt", "--rank", "2", "--at", collective, *place)
    finding = require(outcome, "wrong result", 2)
    assert collective in finding["evidence"][0]


def test_what_two_ranks_exchange_is_compared_too():
    outcome = netcheck(3, "--pairs", "--inject", "corrupt", "--rank", "1", "--at", "timing")
    finding = require(outcome, "wrong result", 1)
    assert "of exchange fp32 64 KiB on group WORLD" in finding["evidence"][0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_pauses_before_each_launch_is_the_slow_one(world_size):
    finding = require(netcheck(world_size, "--inject", "slow", "--rank", "1"), "slow link", 1)
    assert "rank 1" in finding["evidence"][0]


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_a_rank_whose_thread_sleeps_for_ever_is_named_and_those_that_wait_for_it(moment):
    outcome = netcheck(4, "--tp", "2", "--inject", "hang", "--rank", "3", "--moment", moment)
    finding = require(outcome, "hang", 3)
    assert "all_reduce" in finding["evidence"][0]
    assert finding["evidence"][-1] == "ranks 0-2 wait for it"
    assert outcome.seconds < DEADLINE + START_AND_END


@pytest.mark.parametrize("at", ["device", "groups", "barrier", "broadcast", "timing"])
def test_a_rank_that_hangs_in_any_stage_is_named(at):
    require(netcheck(4, "--inject", "hang", "--rank", "1", "--at", at), "hang", 1)


def test_a_hang_in_a_subgroup_names_the_group():
    outcome = netcheck(4, "--tp", "2", "--inject", "hang", "--rank", "3", "--at", "tp[2,3]")
    finding = require(outcome, "hang", 3)
    assert "tp[2,3]" in finding["evidence"][0]


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
@pytest.mark.parametrize("rank", [0, 2])
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
    outcome = netcheck(8, "--tp", "2", "--pp", "2", "--inject", "hang", "--rank", "5", "--at", "all_to_all")
    require(outcome, "hang", 5)


# --- torchrun ----------------------------------------------------------------------------------------


def test_healthy_ranks_under_torchrun():
    outcome = netcheck(2, under_torchrun=True)
    assert (outcome.code, outcome.verdict["verdict"]) == (0, "healthy"), outcome.text


def test_torchruns_summary_shows_the_headline():
    drill = ["--inject", "corrupt", "--rank", "2", "--at", "broadcast"]
    outcome = netcheck(3, *drill, under_torchrun=True)
    require(outcome, "wrong result", 2)
    summary = outcome.text[outcome.text.index("Root Cause") :]
    assert "netcheck: wrong result: rank 2 on host" in summary


@pytest.mark.parametrize("fault, how", [("die", "has ended"), ("stop", "is stopped")])
def test_ranks_under_torchrun_conclude_after_its_sigterm(fault, how):
    outcome = netcheck(3, "--inject", fault, "--rank", "1", under_torchrun=True)
    finding = require(outcome, "hang", 1)
    assert how in finding["evidence"][0]


# --- without a launcher's Store ----------------------------------------------------------------------


def test_where_the_host_of_the_store_dies_each_rank_says_where_it_was():
    processes = start_by_hand(3, "--inject", "die", "--rank", "0", "--at", "barrier")
    texts = [process.communicate(timeout=2 * START_AND_END)[1] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        assert f"netcheck: rank {rank} on host {socket.gethostname()} has lost the Store" in texts[rank]
        assert "It was in barrier on WORLD." in texts[rank]


def test_ranks_that_nobody_but_the_environment_has_launched_are_healthy():
    processes = start_by_hand(2)
    outputs = [process.communicate(timeout=2 * START_AND_END) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert json.loads(outputs[0][0])["verdict"] == "healthy"


def start_by_hand(world_size: int, *options: str) -> list[subprocess.Popen[str]]:
    """The Store is in rank 0."""
    common = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
              "OMP_NUM_THREADS": 1}  # fmt: skip
    return [
        subprocess.Popen(
            [*OWN_LAUNCHER, "--json", "--quick", "--deadline", str(DEADLINE), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **{name: str(value) for name, value in common.items()}, "RANK": str(rank)},
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("drill, found", [([], "healthy"), (["--inject", "die", "--rank", "3"], "hang")])
def test_two_launchers_are_two_hosts(drill, found):
    launcher = [*OWN_LAUNCHER, "--quick", "--json", "--tp", "2", *drill]
    launcher += ["--nproc-per-node", "2", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    launcher += [f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    launchers = [
        subprocess.Popen(
            launcher,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    outputs = [launcher.communicate(timeout=2 * START_AND_END) for launcher in launchers]
    (verdict,) = [json.loads(stdout) for stdout, _ in outputs if stdout]  # rank 0's host prints it
    assert (verdict["verdict"], verdict["ranks"]) == (found, [3] if drill else []), outputs
    assert [launcher.returncode for launcher in launchers] == [1 if drill else 0] * 2


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
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [*OWN_LAUNCHER, "--quick", "--json", "--nproc-per-node", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=START_AND_END,
        )
    assert run.returncode == 1
    assert '"verdict": "healthy"' in run.stderr
    assert "cannot write to standard output: No space left on device" in run.stderr


def test_the_verdict_is_written_where_the_user_wants_it(tmp_path):
    file = tmp_path / "netcheck.json"
    outcome = netcheck(2, "--output", str(file))
    assert json.loads(file.read_text()) == outcome.verdict


# --- wrong use ---------------------------------------------------------------------------------------


def test_a_start_without_a_number_of_ranks_says_what_to_type():
    run = alone()
    assert run.returncode == 2
    assert "nanlocator netcheck --nproc-per-node 8" in run.stderr
    assert "torchrun --nproc-per-node 8 -m nanlocator.netcheck" in run.stderr


def test_half_of_a_launchers_environment_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run = subprocess.run(
        OWN_LAUNCHER, capture_output=True, text=True, timeout=START_AND_END, env={**os.environ, "RANK": "0"}
    )
    assert run.returncode == 2
    assert "WORLD_SIZE, MASTER_PORT not" in run.stderr


@pytest.mark.parametrize(
    "world_size, options, message",
    [
        (1, [], "a single rank has no peer to talk to"),
        (2, ["--tp", "4"], "2 ranks cannot be laid out"),
        (2, ["--backend", "smoke"], "--backend smoke: this torch"),
        (2, ["--inject", "die", "--rank", "7"], "there are ranks 0 to 1"),
        (
            2,
            ["--inject", "die", "--rank", "1", "--at", "all_reduse"],
            "--at all_reduse: there is no such step",
        ),
    ],
)
@pytest.mark.parametrize("under_torchrun", [False, True])
def test_wrong_use_is_said_once(world_size, options, message, under_torchrun):
    outcome = netcheck(world_size, *options, under_torchrun=under_torchrun)
    assert outcome.code == (1 if under_torchrun else 2)
    assert outcome.verdict is None
    assert outcome.text.count(message) == 1, outcome.text


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
    ],
)
def test_options_that_cannot_be_meant_end_with_2(options):
    run = alone(*options)
    assert run.returncode == 2
    assert options[0] in run.stderr


def test_the_template_for_slurm_needs_no_ranks():
    run = alone("--slurm-template", "--tp", "4")
    assert run.returncode == 0
    assert run.stdout.startswith("#!")
    assert "--tp 4" in run.stdout
