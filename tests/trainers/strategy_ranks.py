"""Ranks that have imported Lightning, accelerate and DeepSpeed from the folder where tools/setup has
installed them: only in these processes, because other packages behave differently if they find them."""

import multiprocessing.process
import os
import runpy
import sys
from pathlib import Path

from ranks import RankServer

SETUP = Path(__file__).parents[2] / ".setup"
SCRIPTS = Path(__file__).parent / "scripts"
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
TRAINERS, DEEPSPEED = SETUP / "trainers" / "lib" / _VERSION / "site-packages", SETUP / "deepspeed"

_server = RankServer("strategy_imports", "torch._dynamo")


def run_script(name, *arguments, **variables):
    """(exit code, stdout, stderr) of each of two ranks, as started by torchrun; under nanlocator's launcher
    if NANLOCATOR is among the variables."""
    return _server.run_programs(2, _run, str(SCRIPTS / f"{name}.py"), arguments, variables)


def _run(rank, world_size, port, script, arguments, variables):
    multiprocessing.process._parent_process = None  # torchrun's ranks are not multiprocessing workers
    sys.path += [str(DEEPSPEED), str(TRAINERS)]
    os.environ |= variables | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    if "NANLOCATOR" in variables:
        from nanlocator.__main__ import main

        main([script, *arguments])
    else:
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(SCRIPTS))
        runpy.run_path(script, run_name="__main__")
