"""Processes that `python -m nanlocator.netcheck` and torchrun would start, forked from one that has done
their imports. Their own fork server is forked, too."""

import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

from ranks import RankServer
from torch.distributed import run as torchrun

_server = RankServer("nanlocator.netcheck.run", "torch.distributed.run")


def run_netcheck(
    *options: str, processes: int = 1, stdout: Path | None = None, **variables: str
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each of `processes` with the same command line, in which `{port}` is
    replaced by a free one."""
    return _server.run_programs(processes, _netcheck, options, stdout, variables)


def run_ranks_by_hand(world_size: int, *options: str) -> list[tuple[int, str, str]]:
    """Ranks without a launcher, described by the environment: the Store is in rank 0."""
    return _server.run_programs(world_size, _rank_by_hand, options)


def run_torchrun(world_size: int, *options: str) -> tuple[int, str, str]:
    """torchrun, whose ranks are forks instead of separate interpreters."""
    (ended,) = _server.run_programs(1, _torchrun, world_size, options)
    return ended


def _netcheck(
    _rank: int,
    _processes: int,
    port: int,
    options: tuple[str, ...],
    stdout: Path | None,
    variables: dict[str, str],
) -> None:
    if stdout:
        with open(stdout, "wb") as file:
            os.dup2(file.fileno(), 1)
    os.environ |= variables
    _start_fork_server()
    _run_module([option.replace("{port}", str(port)) for option in options])


def _rank_by_hand(rank: int, world_size: int, port: int, options: tuple[str, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    _run_module(options)


def _torchrun(_rank: int, _processes: int, _port: int, world_size: int, options: tuple[str, ...]) -> None:
    config_of = torchrun.config_from_args

    def config_from_args(arguments):
        config, _, _ = config_of(arguments)
        config.start_method = "forkserver"
        return config, _run_module, [options]

    _start_fork_server()
    with mock.patch.object(torchrun, "config_from_args", config_from_args):
        torchrun.main(["--standalone", f"--nproc-per-node={world_size}", "-m", "nanlocator.netcheck"])


def _run_module(options: list[str] | tuple[str, ...]) -> None:
    sys.argv = ["netcheck", *options]
    runpy.run_module("nanlocator.netcheck", run_name="__main__", alter_sys=True)


def _start_fork_server() -> None:
    """Starts multiprocessing's fork server as a fork of this process, which has no threads yet."""
    multiprocessing.process.current_process()._config["daemon"] = False  # it may start processes
    multiprocessing.process._parent_process = None  # as if started by a shell

    def fork(_executable: bytes, arguments: list[str], kept: list[int]) -> int:
        if pid := os.fork():
            return pid
        first = 3
        for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(first, descriptor)
            first = descriptor + 1
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)

    with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork):
        multiprocessing.forkserver._forkserver.ensure_running()
