"""Runs a function on several gloo ranks in processes of their own and returns what each one returned."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT = 120.0  # seconds for all ranks together; a hung rank is a failed test


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(rank, world_size, *arguments)` on each rank, torch.distributed initialised.

    The result of a rank that raised is the exception's (type name, text); of one that died, None.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(sender, rank, world_size, port, function, arguments), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results = []
    for receiver, process in zip(pipes, processes, strict=True):
        process.join(TIMEOUT)
        if process.is_alive():
            for other in processes:
                other.kill()
            raise TimeoutError(f"a rank of {world_size} still ran after {TIMEOUT} s")
        try:
            results.append(receiver.recv() if receiver.poll() else None)
        except EOFError:
            results.append(None)
    return results


def _main(sender, rank: int, world_size: int, port: int, function, arguments) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, datetime.timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
    )
    try:
        sender.send(function(rank, world_size, *arguments))
    except Exception as error:
        traceback.print_exc()
        sender.send((type(error).__name__, str(error)))
    # The Store lives in rank 0: it leaves last.
    store.set(f"done/{rank}", "1")
    if rank == 0:
        for other in range(world_size):
            try:
                store.wait([f"done/{other}"], datetime.timedelta(seconds=20))
            except Exception:
                pass  # a rank that was killed on purpose
