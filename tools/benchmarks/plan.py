"""The cost of nanlocator where it cannot be measured: published configurations, counted on the meta device.

    tools/bench plan                          every configuration, one rank of a middle and of the last stage
    tools/bench plan --only "Llama-3 70B"     one of them (about a minute)
    tools/bench plan --by-place               also the bytes read at each place
    tools/bench plan --json > plan.json

Megatron-Core's own model, gradient buckets, distributed optimizer and schedule are built for one rank of the
job, with the groups of all its ranks, on the meta device. nanlocator is installed with its defaults, and the
calls of its hooks into the engine in one healthy step are counted (plan_counting.py; a test compares the
counts of small configurations with the engine's own counts on real ranks). Derived from the counts:

    scan time    bytes / (nominal memory bandwidth x fraction) + launches x the shortest kernel; all of it
                 counts as lost, although a scan may overlap a collective that waits for the network
    host time    Python calls, calls into the engine and launches, with a time for each; hidden while the host
                 is ahead of the device
    ledger       bytes if one microbatch is bad on the rank from its first crossing on, with every gradient
    Store        requests per second of the heartbeats, and of one bad step by rank 0 and by all others

relative to the published step time of the layout. Local layer specification; TransformerEngine's layers start
the same collectives, except for --tp-comm-overlap, which does not pass through ProcessGroup.
"""

import argparse
import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from plan_configurations import CONFIGURATIONS, Configuration

# H100 SXM5 data sheet; the fraction that a scan of bfloat16 reaches, and the time of one of 4 KB there
# (tools/gpu, parts binaries and cost, 2026-11-26).
BANDWIDTH, REACHED = 3.35e12, 0.82
SHORTEST_KERNEL = 4.9e-6
# Host times in seconds: together the 9 us of a scan from Python there; the split is an assumption.
PYTHON_CALL, ENGINE_CALL, LAUNCH = 0.3e-6, 1.5e-6, 7.2e-6
SIGHTING_BYTES = 600  # of a ledger, per sighting: 489 MB over 16,384 ranks of 49 (tools/bench locate)
# src/agree: a rank's thread asks four times in 2.5 s (rank_monitor.hpp). In a bad step every rank writes its
# ledger and counts it; rank 0 asks for and reads each; the others ask for the verdict each 50 ms and read it.
HEARTBEAT_REQUESTS, HEARTBEAT_SECONDS = 4, 2.5
ASKING_SECONDS = 0.05
RANKS = 1024, 16384


def count(c: Configuration, rank: int) -> dict[str, Any]:
    command = [sys.executable, Path(__file__).with_name("plan_counting.py"), c.name, str(rank)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"counting {c.name}, rank {rank}, failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def derive(c: Configuration, counts: dict[str, Any]) -> dict[str, Any]:
    scan = counts["bytes"] / (BANDWIDTH * REACHED) + counts["launches"] * SHORTEST_KERNEL
    gradients = sum(counter["bytes"] for place, counter in counts["by_place"].items() if "grad_" in place)
    host = (
        counts["python_calls"] * PYTHON_CALL
        + counts["engine_calls"] * ENGINE_CALL
        + counts["launches"] * LAUNCH
    )
    crossings = sum(
        counter["tensors"] for place, counter in counts["by_place"].items() if "grad_" not in place
    )
    return {
        "step_seconds": c.step_seconds,
        "gradient_bytes": gradients,
        "boundary_bytes": counts["bytes"] - gradients,
        "slots": counts["tensors"],
        "scan_seconds": scan,
        "scan_share": scan / c.step_seconds,
        "host_seconds": host,
        "host_share": host / c.step_seconds,
        "ledger_bytes": SIGHTING_BYTES * (crossings // c.microbatches + 3 * counts["gradients"]),
    }


def store_requests(ranks: int) -> dict[str, float]:
    return {
        "heartbeats_per_second": ranks * HEARTBEAT_REQUESTS / HEARTBEAT_SECONDS,
        "gathering": 2 * ranks + 2 * ranks,  # written and counted; asked for and read by rank 0
        "waiting_per_second": (ranks - 1) / ASKING_SECONDS,
        "verdict": ranks - 1,
    }


def print_table(results: list[dict[str, Any]]) -> None:
    print(
        f"scans at {REACHED:.0%} of {BANDWIDTH / 1e12:.2f} TB/s (H100 SXM5), "
        f"{SHORTEST_KERNEL * 1e6:.1f} us more a launch\n"
    )
    print(
        f"{'configuration':18} {'layout':21} {'rank':>6} {'GB read':>8} {'of grads':>8} {'launches':>8} "
        f"{'slots':>6} {'waits':>5} {'Python':>7} {'engine':>7} {'ledger':>8} {'step':>7} "
        f"{'scans':>6} {'host':>6}"
    )
    for result in results:
        waits = result["waits"] + result["plans"]
        print(
            f"{result['configuration']:18} {result['layout']:21} {result['rank']:6} "
            f"{result['bytes'] / 1e9:8.1f} {result['gradient_bytes'] / 1e9:8.1f} {result['launches']:8} "
            f"{result['slots']:6} {waits:5} {result['python_calls']:7} {result['engine_calls']:7} "
            f"{result['ledger_bytes'] / 1e3:5.0f} kB {result['step_seconds']:5.2f} s "
            f"{result['scan_share']:6.2%} {result['host_share']:6.2%}"
        )
    print("\nstep times")
    for name, source in {result["configuration"]: result["source"] for result in results}.items():
        print(f"  {name:18} {source}")
    print("\nStore requests: heartbeats a second; a bad step: ledgers, asking a second, verdicts")
    for ranks in RANKS:
        requests = store_requests(ranks)
        print(
            f"  {ranks:6} ranks  {requests['heartbeats_per_second']:8.0f}/s  {requests['gathering']:7} "
            f"{requests['waiting_per_second']:8.0f}/s {requests['verdict']:6}"
        )


def print_places(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"\n{result['configuration']}, rank {result['rank']}")
        places = sorted(result["by_place"].items(), key=lambda item: -item[1]["bytes"])
        for place, counter in places:
            share = counter["bytes"] / (BANDWIDTH * REACHED) / result["step_seconds"]
            print(
                f"  {place:34} {counter['launches']:7} launches {counter['bytes'] / 1e9:9.2f} GB {share:7.2%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/bench plan"
    )
    names = [c.name for c in CONFIGURATIONS]
    parser.add_argument("--only", metavar="NAME", choices=names, help=f"one of: {', '.join(names)}")
    parser.add_argument("--by-place", action="store_true", help="also the bytes read at each place")
    parser.add_argument("--jobs", type=int, default=2, help="configurations counted at a time (default 2)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [c for c in CONFIGURATIONS if arguments.only in (None, c.name)]
    jobs = [(c, c.stage_of_rank(stage)) for c in chosen for stage in sorted({c.pp // 2, c.pp - 1})]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        counted = list(pool.map(lambda job: count(*job), jobs))
    results = [
        {"layout": c.layout, "source": c.source, **counts, **derive(c, counts)}
        for (c, _), counts in zip(jobs, counted, strict=True)
    ]
    if arguments.json:
        assumptions = {
            "bandwidth": BANDWIDTH,
            "reached": REACHED,
            "shortest_kernel": SHORTEST_KERNEL,
            "python_call": PYTHON_CALL,
            "engine_call": ENGINE_CALL,
            "launch": LAUNCH,
        }
        stores = {str(ranks): store_requests(ranks) for ranks in RANKS}
        print(json.dumps({"assumptions": assumptions, "configurations": results, "store": stores}, indent=1))
        return
    print_table(results)
    if arguments.by_place:
        print_places(results)


if __name__ == "__main__":
    main()
