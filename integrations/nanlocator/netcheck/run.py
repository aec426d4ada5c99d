"""The network check of one rank: facts, device, process groups, and the stages between ranks, which run in
C++ (src/netcheck). On every path RankCheck ends it: it explains, prints and leaves the process."""

import argparse
import datetime
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nanlocator import _C
from nanlocator.engine.endings import first_line, is_failure_of_peers
from nanlocator.netcheck import facts, launch, layout, slurm
from nanlocator.netcheck.options import check_place, check_ranks, parse, report_wrong_use

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_QUICK_MEMORY_SECONDS = 0.5
_MEMORY_SECONDS = 20.0
_START_SECONDS = 120.0  # all ranks import torch, on hosts with one slow file system
# When one rank ends, torchrun ends the others. The first must be rank 0, which reports the finding.
_UNTIL_TOLD_SECONDS = 30.0
_LONGEST_EXCHANGE = 1 << 20  # bytes between two ranks: enough to see a slow link


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. With a finding, the rank's process has exited with 1 before."""
    options = parse(arguments)
    if options.slurm_template:
        given = list(sys.argv[1:] if arguments is None else arguments)
        print(slurm.template([each for each in given if each != "--slurm-template"]), end="")
        return 0
    return _check_rank(options) if "RANK" in os.environ else _launch(options)


def _check_rank(options: argparse.Namespace) -> int:
    """Runs in a process that a launcher has started."""
    try:
        _require_launcher()
        world_size = _world_size()
        check_ranks(options, world_size)
        groups = _groups(options, world_size)
        check_place(options, groups)
        _choose_backend(options)
        device = _choose_device(options)
    except _C.UsageError as error:
        if os.environ["RANK"] == "0":
            report_wrong_use(error)
        else:
            time.sleep(_UNTIL_TOLD_SECONDS)
        return 2
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_START_SECONDS)))
    except (dist.DistError, OSError) as error:
        print(
            f"netcheck: rank {os.environ['RANK']} on host {socket.gethostname()} could not meet the others "
            f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {first_line(error)}. Can every "
            "host resolve and reach that address, and has every rank been started?",
            file=sys.stderr,
        )
        return 1
    _run(options, groups, device, store)
    return 0  # RankCheck ends the process if it finds something


def _launch(options: argparse.Namespace) -> int:
    """Reports wrong use before any process starts."""
    try:
        if options.nproc_per_node is None:
            raise _C.UsageError(
                "the number of ranks is missing. One for each GPU of this host:\n"
                "  nanlocator netcheck --nproc-per-node 8\n"
                "For several hosts, add --nnodes and --rdzv-endpoint, or start it under torchrun (torchrun "
                "--nproc-per-node 8 -m nanlocator.netcheck), or use the SLURM script of nanlocator netcheck "
                "--slurm-template"
            )
        if options.nproc_per_node < 1:
            raise _C.UsageError(
                f"--nproc-per-node {options.nproc_per_node}: expected 1 or more ranks per host"
            )
        if options.nnodes and not options.nnodes.isdigit():
            raise _C.UsageError(f"--nnodes {options.nnodes}: expected the number of hosts")
        world_size = options.nproc_per_node * int(options.nnodes or 1)
        check_ranks(options, world_size)
        check_place(options, _groups(options, world_size))
        _choose_backend(options)
    except _C.UsageError as error:
        report_wrong_use(error)
        return 2
    return launch.launch(options, functools.partial(_check_rank, options))


def _groups(options: argparse.Namespace, world_size: int) -> list[layout.Group]:
    return layout.groups(world_size, tp=options.tp, cp=options.cp, ep=options.ep, pp=options.pp)


def _require_launcher() -> None:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise _C.UsageError(
            f"RANK is set, but not {', '.join(missing)}. Use a launcher that sets them all, such as "
            "torchrun, or unset RANK and let nanlocator netcheck --nproc-per-node 8 start the ranks"
        )


def _choose_backend(options: argparse.Namespace) -> None:
    options.backend = options.backend or ("nccl" if torch.cuda.device_count() > 0 else "gloo")
    if options.backend not in dist.Backend.backend_list or not dist.is_backend_available(options.backend):
        raise _C.UsageError(
            f"--backend {options.backend}: this torch ({torch.__version__}) does not have it; "
            "use --backend gloo to check the CPUs and their network"
        )


def _choose_device(options: argparse.Namespace) -> torch.device:
    if options.backend == "gloo":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise _C.UsageError(
            f"--backend {options.backend} needs a GPU for each rank of a host, but local rank {local_rank} "
            f"has none ({torch.cuda.device_count()} are visible). Start fewer ranks, or use --backend gloo"
        )
    return torch.device("cuda", local_rank)


def _run(
    options: argparse.Namespace, groups: list[layout.Group], device: torch.device, store: dist.Store
) -> None:
    rank = int(os.environ["RANK"])
    is_drill = options.rank == rank
    has_colour = not options.json and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    check = _C.RankCheck(
        store=store,
        rank=rank,
        world_size=_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        host=socket.gethostname(),
        backend=options.backend,
        deadline=datetime.timedelta(seconds=options.deadline),
        as_json=options.json,
        colour=has_colour,
        output=options.output,
        terminal=_keep_stdout(),
        inject=options.inject if is_drill else "",
        at=options.at,
        moment=options.moment,
        in_contribution=options.in_contribution,
    )
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _meet(check)
        _check_facts(check, device, reports_another_torch=is_drill and options.inject == "skew")
        _check_device(check, options, device)
        world, *subgroups = _make_groups(check, options, store, groups)
        _C.check_barrier(check, world, str(device))
        repetitions = 2 if options.quick else 5
        for group in (world, *subgroups):
            _C.check_collectives(check, group, options.dtypes, options.max_bytes, repetitions, str(device))
        size = min(options.max_bytes, _LONGEST_EXCHANGE)
        _C.check_timing(check, world, options.pairs, size, str(device))
    except BaseException as error:
        if is_failure_of_peers(error):
            check.end_by_error(first_line(error))
        check.end_by_failure(first_line(error))
    check.finish()


def _keep_stdout() -> int:
    """A descriptor of standard output for the verdict alone: later prints of libraries (gloo before torch
    2.11, NCCL_DEBUG=INFO) go to stderr, so that --json is one object."""
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # closed
        return 1
    return kept


def _meet(check: _C.RankCheck) -> None:
    """Runs before any other step, so that ranks that start late do not look like a hang."""
    extra = datetime.timedelta(seconds=_START_SECONDS)
    check.enter("start", "start of all ranks", ranks=list(range(_world_size())), extra=extra)
    check.meet()
    check.finished()


def _check_facts(check: _C.RankCheck, device: torch.device, *, reports_another_torch: bool) -> None:
    check.enter("facts", "versions")
    own = facts.collect(device)
    if reports_another_torch:
        own["torch"] = "0.0.0+drill"
    check.publish("facts", json.dumps(own))
    hardware = facts.hardware(device)
    if hardware:
        check.set("hardware", json.dumps(hardware))
        for fault in facts.hardware_faults(hardware):
            check.add("device_failures", json.dumps(fault))
    check.finished()
    check.enter("facts", "comparison of versions", ranks=list(range(_world_size())))
    if int(os.environ["RANK"]) == 0:
        all_facts = [json.loads(text) for text in check.collect("facts")]
        check.set("differences", json.dumps(facts.differences(all_facts)))
    check.finished()


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _check_device(check: _C.RankCheck, options: argparse.Namespace, device: torch.device) -> None:
    check.enter("device", "compute self-test")
    computed = _C.check_compute(str(device))
    _add_failures(check, computed)
    fingerprints = {f"{each.name} in {each.dtype}": f"{each.fingerprint:016x}" for each in computed.operators}
    check.set("fingerprints", json.dumps(fingerprints))
    check.set("computes_with", json.dumps(facts.computes_with(device)))
    check.finished()
    seconds = _QUICK_MEMORY_SECONDS if options.quick else _MEMORY_SECONDS
    check.enter("device", "memory test", extra=datetime.timedelta(seconds=seconds))
    memory = _C.check_memory(str(device), _memory_fraction(options, device), seconds)
    _add_failures(check, memory)
    check.set("memory_tests_cut", json.dumps(memory.tests - len(memory.completed)))
    check.finished()


def _memory_fraction(options: argparse.Namespace, device: torch.device) -> float:
    """The ranks of a host share its memory."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    return options.memory_fraction / sharing


def _add_failures(check: _C.RankCheck, result: _C.ComputeCheck | _C.MemoryCheck) -> None:
    for failure in result.failures:
        check.add("device_failures", json.dumps(failure))


def _make_groups(
    check: _C.RankCheck, options: argparse.Namespace, store: dist.Store, groups: list[layout.Group]
) -> list[_C.CheckGroup]:
    """WORLD first, then the layout's groups other than WORLD. c10d's own time-out is long: the check's
    deadline comes first and knows more."""
    rank, world_size = int(os.environ["RANK"]), _world_size()
    everyone = list(range(world_size))
    check.enter("groups", "connection of all ranks", ranks=everyone)
    dist.init_process_group(
        options.backend,
        store=dist.PrefixStore("nanlocator/netcheck/c10d", store),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=4 * options.deadline),
    )
    check.finished()
    made = [_C.CheckGroup("WORLD", everyone, dist.group.WORLD)]
    for group in groups:
        if not 1 < len(group.ranks) < world_size:
            continue
        check.enter("groups", f"connection of {group.name}{group.ranks}", ranks=everyone)
        process_group = dist.new_group(group.ranks)
        member = process_group if rank in group.ranks else None
        made.append(_C.CheckGroup(group.name, group.ranks, member))
        check.finished()
    return made
