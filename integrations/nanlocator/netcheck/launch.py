"""Starts the ranks of this host through torch.distributed's launcher, as torchrun does.

Omits torchrun's log and its report of failed ranks, which would hide the verdict. Python's fork server
imports torch once: eight imports on a small host take longer than the quick check. The server has one thread;
forks of the launcher, whose threads may hold locks, have hung.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from nanlocator._C import UsageError
from nanlocator.engine.endings import first_line

_FORWARDED = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr",
              "master_port", "local_addr")  # fmt: skip


def ranks_of_host(text: str) -> int:
    try:
        return torchrun.determine_local_world_size(text)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {text}: expected a number, auto, gpu or cpu ({error})") from None


def launch(options: argparse.Namespace, check: Callable[[], int]) -> int:
    """Runs `check` on every rank. Returns 0 if all returned 0, 2 for wrong use, otherwise 1."""
    arguments = [f"--nproc-per-node={options.nproc_per_node}"]
    for name in _FORWARDED:
        if value := getattr(options, name):
            arguments.append(f"--{name.replace('_', '-')}={value}")
    if len(arguments) == 1:
        arguments += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]  # torchrun's --standalone
    with _silent_launcher():
        config, _, _ = torchrun.config_from_args(torchrun.parse_args([*arguments, "netcheck"]))
        multiprocessing.set_forkserver_preload(["nanlocator.netcheck.run"])
        config.start_method = "forkserver"
        config.monitor_interval = 0.05
        try:
            elastic_launch(config, _run_rank)(check)
        except ChildFailedError as error:
            return 2 if any(failure.exitcode == 2 for failure in error.failures.values()) else 1
        except SignalException as error:
            print(f"netcheck: ended by {error.sigval.name}", file=sys.stderr)
            return 1
        # The launcher's errors: an address that cannot be bound, hosts that did not arrive.
        except Exception as error:
            print(
                f"netcheck: this host's launcher did not start its ranks: {first_line(error)}. Has every "
                "host been started, and can each reach the given address? (If the others cannot resolve a "
                "host's name, give its address there: --local-addr.)",
                file=sys.stderr,
            )
            return 1
    return 0


def _run_rank(check: Callable[[], int]) -> int:
    """The launcher counts a function that returns as success."""
    code = check()
    if code != 0:
        sys.exit(code)
    return code


@contextlib.contextmanager
def _silent_launcher() -> Iterator[None]:
    """The launcher's warnings are about training: the number of OpenMP threads, signals that it sends."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
