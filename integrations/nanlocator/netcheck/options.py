"""The network check's options; tools/command/netcheck_options.hpp has their table."""

import argparse
import sys
from collections.abc import Sequence

from nanlocator import _C
from nanlocator._C import UsageError
from nanlocator.netcheck.launch import ranks_of_host
from nanlocator.netcheck.layout import Group

DTYPES = ("fp32", "bf16", "fp16", "int64")
STAGES = ("start", "facts", "device", "groups", "barrier", "collectives", "timing")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """``dtypes`` is a list, ``max_bytes`` and ``nproc_per_node`` are numbers. Wrong use ends the program."""
    options = _C.parse_netcheck(sys.argv[1:] if arguments is None else arguments)
    try:
        if bool(options.inject) != (options.rank is not None):
            raise UsageError("--inject and --rank must be given together, such as --inject corrupt --rank 5")
        options.max_bytes = _bytes(options.max_bytes or ("64K" if options.quick else "64M"))
        options.dtypes = _dtypes(options.dtypes or ",".join(DTYPES[:2] if options.quick else DTYPES))
        options.nproc_per_node = ranks_of_host(options.nproc_per_node) if options.nproc_per_node else None
    except UsageError as error:
        report_wrong_use(error)
        sys.exit(2)
    return options


def report_wrong_use(error: UsageError) -> None:
    print(f"nanlocator: {error}; see nanlocator netcheck --help", file=sys.stderr, flush=True)


def check_ranks(options: argparse.Namespace, world_size: int) -> None:
    """Raises UsageError if there are too few ranks, or the drill's rank does not exist."""
    if world_size < 2:
        raise UsageError(
            "a single rank has no peer to communicate with. Start two or more: nanlocator netcheck "
            "--nproc-per-node 2"
        )
    if options.rank is not None and not 0 <= options.rank < world_size:
        raise UsageError(f"--rank {options.rank}: expected 0 to {world_size - 1}")


def check_place(options: argparse.Namespace, groups: list[Group]) -> None:
    """Raises UsageError if no step has the name of ``--at``, so that the drill's fault would never occur."""
    names = [f"{group.name}[{','.join(map(str, group.ranks))}]" for group in groups]
    known = ["WORLD", *STAGES, *COLLECTIVES, *names]
    if options.at and options.at not in known:
        raise UsageError(f"--at {options.at}: no such step; expected one of {', '.join(known)}")
    if options.moment == "inside" and options.at in ("facts", "device"):
        raise UsageError(
            f"--at {options.at}: each rank works alone there, so --moment must be before or after"
        )


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.isdigit() or not 8 <= int(number) * unit <= 64 << 30:
        raise UsageError(f"--max-bytes {text}: expected 8 to 64G, such as 512, 64K or 16M")
    return int(number) * unit


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise UsageError(f"--dtypes {text}: {unknown[0]} is not one of {', '.join(DTYPES)}")
    return names
