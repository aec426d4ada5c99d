"""DeepSpeed on the CPU, from the folder where tools/setup has installed it: only in the ranks' processes,
because other packages behave differently if they find it."""

import os
import sys
from pathlib import Path

from ranks import KeptRanks, RankServer

PACKAGES = Path(__file__).parents[2] / ".setup" / "deepspeed"

_server = RankServer("engine_training", "torch._dynamo")
run_ranks, run_programs = _server.run_ranks, _server.run_programs
run_kept_ranks = KeptRanks(_server).run_ranks


def use() -> None:
    """After this call `import deepspeed` finds it."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
