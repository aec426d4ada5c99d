"""Runs scenarios one after another, each in freshly forked processes.

    python examples/megatron_gpt/run_scenarios.py scenarios.json --output DIR   a JSON list of Scenario fields
    python examples/megatron_gpt/run_scenarios.py --serve                       requests on stdin (launch.py)

Importing torch and Megatron-Core costs each process 3 s of CPU: 20 s until 8 ranks train on 2 cores. Here
it is paid once: this process imports, starts no thread and touches no process group; each scenario's ranks
are forked from it. So a scenario cannot affect the next one, not even by crashing.

Each request is a line {"scenario": {...}, "directory": "..."}; each answer a line
{"name", "directory", "seconds", "exit_codes", "timed_out"}. A rank writes rank{N}.json and rank{N}.log.
After `timeout` seconds every living rank dumps its Python stacks into its log and is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import signal
import socket
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; without threads the fork is safe

import torch._dynamo  # noqa: F401  # torch.optim imports it (1.5 s) with its first optimizer
import torch.distributed as dist
from gpt_training import standard_library_bytes
from scenarios import PROCESS_GROUP_TIMEOUT, Scenario, prepare_process, run_rank

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="?", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("scenario_results"))
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve == (arguments.scenarios is not None):
        parser.error("give either a file of scenarios or --serve")
    standard_library_bytes()  # read once, shared by all ranks
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run after the imports: a fork would lose them and their locks")
    gc.freeze()  # nothing that exists now is garbage: children need not touch (and copy) its pages
    if arguments.serve:
        return _serve()
    failures = 0
    for fields in json.loads(arguments.scenarios.read_text()):
        answer = run_scenario(Scenario(**fields), arguments.output / fields["name"])
        failures += answer["timed_out"] or any(
            code for code in answer["exit_codes"] if code != -signal.SIGKILL
        )
        print(json.dumps(answer), flush=True)
    return 1 if failures else 0


def _serve() -> int:
    # Answers go to the original stdout; output of libraries goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        answer = run_scenario(Scenario(**request["scenario"]), pathlib.Path(request["directory"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def run_scenario(scenario: Scenario, directory: pathlib.Path) -> dict:
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with socket.socket() as listener:  # bound before the fork, so that no port is guessed
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        host = _fork(lambda: _host_store(listener), directory / "store.log")
        ranks = {
            _fork(
                lambda rank=rank: _run_forked_rank(scenario, directory, rank, listener),
                directory / f"rank{rank}.log",
            ): rank
            for rank in range(scenario.ranks)
        }
    exit_codes: list[int | None] = [None] * scenario.ranks
    timed_out = False
    living = set(ranks)
    deadline = started + scenario.timeout
    while living:
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                living.discard(pid)
                exit_codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
        if living and time.monotonic() > deadline:
            if timed_out:
                _signal_all(living, signal.SIGKILL)
                deadline += 30.0
            else:
                timed_out = True
                _signal_all(living, signal.SIGUSR1)  # faulthandler writes the stacks into the logs
                deadline += 2.0
        time.sleep(0.005)
    _signal_all({host}, signal.SIGKILL)
    os.waitpid(host, 0)
    return {
        "name": scenario.name,
        "directory": str(directory),
        "seconds": time.monotonic() - started,
        "exit_codes": exit_codes,
        "timed_out": timed_out,
    }


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _fork(body, log: pathlib.Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the parent
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        body()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's finalisation, which costs 8 ranks 2 s; torchrun's ranks go through it.
        os._exit(code)


def _host_store(listener: socket.socket) -> None:
    # As under torchrun the store belongs to no rank, so that it outlives whichever rank dies first.
    store = dist.TCPStore(  # noqa: F841
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    signal.pause()


def _run_forked_rank(scenario: Scenario, directory: pathlib.Path, rank: int, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(scenario.ranks),
        LOCAL_WORLD_SIZE=str(scenario.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    prepare_process()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PROCESS_GROUP_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=scenario.ranks, timeout=PROCESS_GROUP_TIMEOUT
    )
    result = run_rank(scenario, directory)
    if result["error"] is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
