"""Compares `python -m nanlocator.netcheck` with the steps of the well-known torch-distributed-gpu-test.py on
the same faults, with gloo processes on this machine.

    tools/bench netcheck                    every fault, 4 ranks, rank 1 faulty
    tools/bench netcheck --only hang,die    some of them

The classic steps are our own minimal equivalent: one float is reduced over all ranks, a barrier, one float is
allocated, "is OK" or "is broken", a barrier, versions by rank 0. Both get the fault in the same rank and at
the same place: netcheck by its drill (or a manipulated self-test), the classic steps by a replacement for
torch.distributed's function. A fault in a function that they never call does not affect them.
"""

import argparse
import fcntl
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_FAULTY_RANK = "NETCHECK_COMPARISON_RANK"
_FAULT = "NETCHECK_COMPARISON_FAULT"


class Fault(NamedTuple):
    text: str
    netcheck: tuple[str, ...] = ()  # its drill's options; none: a manipulated self-test, or no fault
    verdict: str = "healthy"  # expected of netcheck


FAULTS = {
    "healthy": Fault("none"),
    "all_reduce": Fault("a wrong element from all_reduce", ("corrupt", "--at", "all_reduce"), "wrong result"),
    "all_gather": Fault("a wrong element from all_gather", ("corrupt", "--at", "all_gather"), "wrong result"),
    "reduce_scatter": Fault(
        "a wrong element from reduce_scatter", ("corrupt", "--at", "reduce_scatter"), "wrong result"
    ),
    "broadcast": Fault("a wrong element from broadcast", ("corrupt", "--at", "broadcast"), "wrong result"),
    "all_to_all": Fault("a wrong element from all_to_all", ("corrupt", "--at", "all_to_all"), "wrong result"),
    "send_recv": Fault("a wrong element from send/recv", ("corrupt", "--at", "send_recv"), "wrong result"),
    "slow": Fault("30 ms of sleep before each collective", ("slow",), "slow link"),
    "hang": Fault("never comes to all_reduce", ("hang", "--at", "all_reduce"), "hang"),
    "die": Fault("SIGKILL before all_reduce", ("die", "--at", "all_reduce"), "hang"),
    "skew": Fault("another torch version", ("skew",), "version skew"),
    "compute": Fault("a wrong element of a matrix product", verdict="faulty device"),
    "memory": Fault("a bit that flips in every 4 MiB of memory", verdict="faulty device"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/bench netcheck", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--rank", type=int, default=1, help="the faulty one (default 1)")
    parser.add_argument("--only", default=",".join(FAULTS), metavar="LIST", help=f"of {','.join(FAULTS)}")
    parser.add_argument(
        "--deadline", type=float, default=10.0, help="seconds for a step of netcheck (default 10)"
    )
    parser.add_argument(
        "--patience", type=float, default=40.0, help="seconds after which a run counts as hung (default 40)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"no such fault: {unknown[0]}")
    if not 0 <= arguments.rank < arguments.ranks:
        parser.error(f"--rank {arguments.rank}: there are ranks 0 to {arguments.ranks - 1}")
    rows = [compare(name, arguments) for name in names]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows, arguments)
    return 0 if all(row["is_found"] for row in rows) else 1


def compare(name: str, arguments: argparse.Namespace) -> dict:
    fault = FAULTS[name]
    print(f"{fault.text} ...", file=sys.stderr)
    classic = describe_classic(run(name, ["--classic"], arguments), arguments)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "verdict.json"
        drill = ["--inject", *fault.netcheck, "--rank", str(arguments.rank)] if fault.netcheck else []
        options = ["--quick", "--deadline", str(arguments.deadline), "--output", str(output), *drill]
        run(name, ["--netcheck", *options], arguments)
        verdict = json.loads(output.read_text()) if output.exists() else {"verdict": "none", "ranks": []}
    must_be_named = [arguments.rank] if fault.verdict != "healthy" else []
    return {
        "fault": fault.text,
        "classic": classic,
        "netcheck": verdict["verdict"],
        "ranks": verdict["ranks"],
        "is_found": verdict["verdict"] == fault.verdict and verdict["ranks"] == must_be_named,
    }


class Run(NamedTuple):
    text: str
    code: int | None  # None: did not end
    seconds: float


def run(fault: str, program: list[str], arguments: argparse.Namespace) -> Run:
    """Runs this file's `program` on all ranks under torchrun; ends a run that hangs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks), __file__, *program]
    environment = {**os.environ, _FAULT: fault, _FAULTY_RANK: str(arguments.rank), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code = None
    try:
        text, _ = process.communicate(timeout=arguments.patience)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which are in sessions of their own
        text, _ = process.communicate()
    return Run(text, code, time.monotonic() - start)


def describe_classic(outcome: Run, arguments: argparse.Namespace) -> str:
    """What the output of the classic steps and of torchrun tells a user."""
    broken = sorted({int(rank) for rank in re.findall(r"-(\d+)\] is broken", outcome.text)})
    fine = len(set(re.findall(r"-(\d+)\] is OK", outcome.text)))
    if outcome.code == 0:
        return f"nothing: {fine} of {arguments.ranks} are OK"
    if outcome.code is None:
        return f"no end within {arguments.patience:.0f} s, no rank named"
    killed = re.findall(r"rank\s+: (\d+) .*\n\s+exitcode\s+: -9", outcome.text)
    parts = [f"ranks {', '.join(map(str, broken))} are broken"] if broken else []
    parts += [f"torchrun: rank {killed[0]} had SIGKILL"] if killed else []
    errors = [line for line in outcome.text.splitlines() if "Error" in line]
    return "; ".join(parts) or f"ends with {outcome.code}: {errors[-1] if errors else 'no message'}"


def print_table(rows: list[dict], arguments: argparse.Namespace) -> None:
    print(f"| fault on rank {arguments.rank} of {arguments.ranks} | the classic steps | netcheck |")
    print("|---|---|---|")
    for row in rows:
        named = ", ".join(f"rank {rank}" for rank in row["ranks"])
        verdict = f"{row['netcheck']}{': ' if named else ''}{named}"
        remark = "" if row["is_found"] else " (not as planted)"
        print(f"| {row['fault']} | {row['classic']} | {verdict}{remark} |")


# --- on each rank --------------------------------------------------------------------------------------


def fault_here() -> str:
    """The fault that this rank has."""
    return os.environ[_FAULT] if os.environ["RANK"] == os.environ[_FAULTY_RANK] else "healthy"


def classic_steps() -> None:
    """The steps of torch-distributed-gpu-test.py, on gloo and the CPU."""
    import torch
    import torch.distributed as dist

    plant_in_torch(fault_here())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = f"[{socket.gethostname()}-{os.environ['LOCAL_RANK']}]"
    try:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.SUM)
        dist.barrier()
        torch.ones(1)
        print_in_turn(f"{name} is OK (global rank: {rank}/{world_size})")
        dist.barrier()
        if rank == 0:
            print_in_turn(f"torch={torch.__version__} cuda={torch.version.cuda}")
    except Exception:
        print_in_turn(f"{name} is broken")
        raise


def print_in_turn(text: str) -> None:
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(text, flush=True)


def plant_in_torch(fault: str) -> None:
    """Replaces functions that this rank will call; the classic steps call no other collectives."""
    import torch
    import torch.distributed as dist

    all_reduce, barrier = dist.all_reduce, dist.barrier

    def slow(function):
        def call(*arguments, **keywords):
            time.sleep(0.03)
            return function(*arguments, **keywords)

        return call

    def wrong_all_reduce(tensor, *arguments, **keywords):
        all_reduce(tensor, *arguments, **keywords)
        tensor[0] += 1

    def hang(*_, **__):
        while True:
            signal.pause()

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if fault == "slow":
        dist.all_reduce, dist.barrier = slow(all_reduce), slow(barrier)
    elif fault == "skew":
        torch.__version__ = "0.0.0+drill"
    else:
        replacements = {"all_reduce": wrong_all_reduce, "hang": hang, "die": die}
        dist.all_reduce = replacements.get(fault, all_reduce)


def netcheck(options: list[str]) -> None:
    """netcheck; if the fault is in this rank's device, with a manipulated self-test of it."""
    from nanlocator import _C

    check_compute, check_memory = _C.check_compute, _C.check_memory

    def wrong_product(name, dtype, repeat, result):
        if (name, dtype) == ("gemm", "float32"):
            result[0, 2, 5] += 0.01

    def flipped_bit(test, chunks):
        if test == "pattern 0x55":
            for chunk in chunks:
                chunk[12345 :: (4 << 20) // 8] ^= 1 << 41  # --quick has no time for all of it

    if fault_here() == "compute":
        _C.check_compute = lambda device: check_compute(device, wrong_product)
    if fault_here() == "memory":
        _C.check_memory = lambda *arguments: check_memory(*arguments, after=flipped_bit)
    sys.argv = ["netcheck", *options]
    runpy.run_module("nanlocator.netcheck", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--classic"]:
        classic_steps()
    elif sys.argv[1:2] == ["--netcheck"]:
        netcheck(sys.argv[2:])
    else:
        sys.exit(main())
