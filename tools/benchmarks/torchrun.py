"""A benchmark's ranks, started by torchrun."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def results_of_starts(script: str, ranks: int, starts: int) -> list[dict[str, Any]]:
    """``starts`` results of ``result_of_ranks``, with a line of progress on a terminal."""
    results = []
    for number in range(1, starts + 1):
        if sys.stderr.isatty() and starts > 1:
            print(f"\rstart {number} of {starts}", end="\r", file=sys.stderr, flush=True)
        results.append(result_of_ranks(script, ranks))
    if sys.stderr.isatty():
        print("\033[K", end="", file=sys.stderr, flush=True)
    return results


def result_of_ranks(script: str, ranks: int) -> dict[str, Any]:
    """Runs ``script`` with this program's arguments and ``--directory FOLDER``, into which rank 0 writes
    ``result.json``."""
    with tempfile.TemporaryDirectory() as directory:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", *launcher, script, *sys.argv[1:], "--directory", directory]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"the ranks failed:\n{done.stderr[-4000:]}")
        return json.loads((Path(directory) / "result.json").read_text())
