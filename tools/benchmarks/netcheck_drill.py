"""Measures how often the network check is right: each fault of its drill, many times, with gloo processes on
this machine, for several numbers of ranks and each rank in turn as the faulty one; and healthy runs.

    tools/bench drill                              every fault 20 times, 50 healthy runs; about an hour
    tools/bench drill --only healthy,die_inside --repetitions 3 --ranks 2,8

A run is right if verdict, ranks and exit code match the fault (of two ranks both, for a wrong exchange and
for versions). The output of wrong runs is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv"]
MOMENTS = ["before", "inside", "after"]


class Fault(NamedTuple):
    options: list[str]
    verdict: str


FAULTS = {
    "healthy": Fault([], "healthy"),
    **{f"corrupt_{each}": Fault(["corrupt", "--at", each], "wrong result") for each in COLLECTIVES},
    "corrupt_contribution": Fault(["corrupt", "--at", "all_reduce", "--in-contribution"], "wrong result"),
    "slow": Fault(["slow"], "slow link"),
    **{f"hang_{each}": Fault(["hang", "--moment", each], "hang") for each in MOMENTS},
    "stop": Fault(["stop"], "hang"),
    **{f"die_{each}": Fault(["die", "--moment", each], "hang") for each in MOMENTS},
    "skew": Fault(["skew"], "version skew"),
}


class Outcome(NamedTuple):
    is_right: bool
    seconds: float
    text: str


def main() -> int:
    arguments = parse()
    rows = [repeat(name, arguments) for name in arguments.only]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows, arguments)
    return 0 if all(row["right"] == row["runs"] for row in rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20, help="of each fault (default 20)")
    parser.add_argument("--healthy", type=int, default=50, help="runs without a fault (default 50)")
    parser.add_argument("--ranks", default="2,3,4,5,8", metavar="LIST", help="in turn (default 2,3,4,5,8)")
    parser.add_argument("--only", default=",".join(FAULTS), metavar="NAMES", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--deadline", type=float, default=6.0, help="seconds for a step (default 6)")
    parser.add_argument("--log", type=Path, default=Path("netcheck_drill.log"), help="of wrong runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    if unknown := [name for name in arguments.only if name not in FAULTS]:
        parser.error(f"no such fault: {unknown[0]}; there are {', '.join(FAULTS)}")
    try:
        arguments.ranks = [int(each) for each in arguments.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks {arguments.ranks}: a list of numbers like 2,4,8")
    if min(arguments.ranks) < 2:
        parser.error("--ranks: a check between ranks needs two of them")
    return arguments


def repeat(name: str, arguments: argparse.Namespace) -> dict:
    fault = FAULTS[name]
    runs = arguments.repetitions if fault.options else arguments.healthy
    row = {"fault": name, "verdict": fault.verdict, "runs": runs, "right": 0, "longest_seconds": 0.0}
    for number in range(runs):
        world_size = arguments.ranks[number % len(arguments.ranks)]
        rank = number // len(arguments.ranks) % world_size
        outcome = run(fault, world_size, rank, arguments.deadline)
        row["right"] += outcome.is_right
        row["longest_seconds"] = max(row["longest_seconds"], round(outcome.seconds, 1))
        if not outcome.is_right:
            with arguments.log.open("a") as log:
                log.write(f"--- {name}, rank {rank} of {world_size}\n{outcome.text}\n")
        print_progress(f"{name}: {row['right']} of {number + 1} right", is_last=number + 1 == runs)
    return row


def print_progress(text: str, is_last: bool) -> None:
    is_terminal = sys.stderr.isatty()
    if is_terminal or is_last:
        end = "\n" if is_last else "\r"
        print(text, end=end, file=sys.stderr, flush=True)


def run(fault: Fault, world_size: int, rank: int, deadline: float) -> Outcome:
    command = [sys.executable, "-m", "nanlocator.netcheck", "--nproc-per-node", str(world_size)]
    command += ["--quick", "--json", "--deadline", str(deadline)]
    command += ["--inject", *fault.options, "--rank", str(rank)] if fault.options else []
    start = time.monotonic()
    process = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    seconds = time.monotonic() - start
    try:
        verdict = json.loads(process.stdout)
        found = (verdict["verdict"], verdict["ranks"], process.returncode)
    except ValueError:
        found = None
    # With two ranks, sender and receiver of a wrong exchange cannot be separated, nor the wanted version.
    is_told_apart = world_size > 2 or not {"send_recv", "skew"} & set(fault.options)
    named = [rank] if is_told_apart else [0, 1]
    must_be = (fault.verdict, named, 1) if fault.options else ("healthy", [], 0)
    return Outcome(found == must_be, seconds, process.stdout + process.stderr)


def print_table(rows: list[dict], arguments: argparse.Namespace) -> None:
    ranks = ", ".join(map(str, arguments.ranks))
    print(f"| fault (over {ranks} ranks in turn) | verdict | right | longest run |")
    print("|---|---|---|---|")
    for row in rows:
        share = f"{row['right']} of {row['runs']}"
        print(f"| {row['fault']} | {row['verdict']} | {share} | {row['longest_seconds']} s |")


if __name__ == "__main__":
    sys.exit(main())
