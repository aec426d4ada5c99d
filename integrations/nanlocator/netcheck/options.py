"""The command line of the network check."""

import argparse
from collections.abc import Sequence

from nanlocator._C import UsageError
from nanlocator.netcheck import launch
from nanlocator.netcheck.layout import Group

DTYPES = ("fp32", "bf16", "fp16", "int64")
STAGES = ("start", "facts", "device", "groups", "barrier", "collectives", "timing")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
FAULTS = ("corrupt", "slow", "hang", "stop", "skew", "die")

_EXAMPLES = """\
examples:
  nanlocator netcheck --nproc-per-node 8
  nanlocator netcheck --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --tp 4
  nanlocator netcheck --nproc-per-node 8 --quick --inject corrupt --rank 5      (a drill)
  nanlocator netcheck --slurm-template --tp 4 > netcheck.sbatch
  torchrun --nproc-per-node 8 -m nanlocator.netcheck --json

Exit code: 0 healthy, 1 findings, 2 wrong use. (torchrun itself exits with 1 for both.)
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Wrong use ends with 2, as everywhere in argparse. ``dtypes`` is a list, ``max_bytes`` a number."""
    parser = argparse.ArgumentParser(
        prog="nanlocator netcheck",
        description="Checks that every rank computes and communicates correctly, or says which does not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small messages, two dtypes, a short memory test")
    add("--tp", type=_size, default=1, help="tensor-parallel size; its groups are checked, too")
    add("--pp", type=_size, default=1, help="pipeline-parallel size")
    add("--cp", type=_size, default=1, help="context-parallel size")
    add("--ep", type=_size, default=1, help="expert-parallel size")
    add("--max-bytes", type=_bytes, metavar="SIZE", help="largest message (default 64M; --quick 64K)")
    add("--dtypes", type=_dtypes, metavar="LIST", help=f"of {','.join(DTYPES)} (default all; --quick two)")
    add("--pairs", action="store_true", help="exchange between every pair of ranks, not only neighbours")
    add("--deadline", type=_seconds, default=30.0, metavar="SECONDS", help="of each step (default 30)")
    add("--memory-fraction", type=_fraction, default=0.0, metavar="PART",
        help="of the free device memory to test, 0 to 0.95 (default: a small part)")  # fmt: skip
    add("--backend", help="gloo or nccl (default: nccl where there are GPUs)")
    add("--json", action="store_true", help="print one JSON object")
    add("--output", default="", metavar="FILE", help="also write the JSON to this file")
    add("--slurm-template", action="store_true", help="print a job script for SLURM and exit")
    launch.add_options(parser)
    drill = parser.add_argument_group("drill: plant a fault and see it found")
    drill.add_argument("--inject", choices=FAULTS,
                       help="a wrong element, a pause before each launch, a thread that sleeps forever, "
                       "SIGSTOP, another torch version, SIGKILL")  # fmt: skip
    drill.add_argument("--rank", type=int, help="the rank that gets it")
    drill.add_argument("--at", default="", metavar="NAME",
                       help="a stage (device, groups, barrier, collectives, timing), a collective "
                       "(all_gather) or a group (tp[2,3])")  # fmt: skip
    drill.add_argument("--moment", choices=("before", "inside", "after"), default="before",
                       help="hang, stop, die: when, relative to that step")  # fmt: skip
    drill.add_argument("--in-contribution", action="store_true",
                       help="corrupt: what is sent, not what was received")  # fmt: skip
    options = parser.parse_args(arguments)
    if (options.inject is None) != (options.rank is None):
        parser.error("--inject and --rank go together: --inject corrupt --rank 5")
    options.max_bytes = options.max_bytes or (64 << 10 if options.quick else 64 << 20)
    options.dtypes = options.dtypes or list(DTYPES[:2] if options.quick else DTYPES)
    return options


def check_ranks(options: argparse.Namespace, world_size: int) -> None:
    """Throws UsageError where there are too few ranks, or not the one of the drill."""
    if world_size < 2:
        raise UsageError(
            "a single rank has no peer to talk to. Start at least two: nanlocator netcheck --nproc-per-node 2"
        )
    if options.rank is not None and not 0 <= options.rank < world_size:
        raise UsageError(f"--rank {options.rank}: there are ranks 0 to {world_size - 1}")


def check_place(options: argparse.Namespace, groups: list[Group]) -> None:
    """Throws UsageError where the drill's fault would never come: no step has the name of ``--at``."""
    names = [f"{group.name}[{','.join(map(str, group.ranks))}]" for group in groups]
    known = ["WORLD", *STAGES, *COLLECTIVES, *names]
    if options.at and options.at not in known:
        raise UsageError(f"--at {options.at}: there is no such step. There are {', '.join(known)}")
    if options.moment == "inside" and options.at in ("facts", "device"):
        raise UsageError(f"--at {options.at}: each rank works alone there; --moment is before or after")


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size; it must be 1 or more")
    return size


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.isdigit() or not 8 <= int(number) * unit <= 64 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 8 and 64G, such as 512, 64K or 16M")
    return int(number) * unit


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(DTYPES)}")
    return names


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 3600 seconds")
    return seconds


def _fraction(text: str) -> float:
    fraction = float(text)
    if not 0 <= fraction <= 0.95:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.95")
    return fraction
