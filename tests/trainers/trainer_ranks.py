"""Scripts in processes that have imported their trainers: forks, where an interpreter takes 6 s of CPU."""

import multiprocessing.process
import os
import runpy
import sys
from pathlib import Path

from ranks import RankServer
from strategy_ranks import SCRIPTS

_server = RankServer("trainer_imports", "torch._dynamo")


def run_script(name: str, **variables: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script, as its interpreter would have started with `variables`."""
    (ended,) = _server.run_programs(1, _run, str(SCRIPTS / f"{name}.py"), variables)
    return ended


def _run(_rank: int, _processes: int, _port: int, script: str, variables: dict[str, str]) -> None:
    multiprocessing.process._parent_process = None  # of a script that a shell has started
    os.environ |= variables
    sys.argv, sys.path = [script], [str(Path(script).parent), *sys.path]
    if os.environ.get("NANLOCATOR") == "1":  # nanlocator.pth
        import nanlocator_autoload

        nanlocator_autoload.follow()
    runpy.run_path(script, run_name="__main__")
