"""Starts ranks in processes of their own, forked from one that has imported torch.

A fresh interpreter that imports torch and the tested code costs each rank 3 to 10 s of CPU. Here a fork
server of Python's multiprocessing imports them once for all tests of a pytest process. It has one thread and
uses no process group; each rank gets the environment, the folder and the import path of its test.
"""

import atexit
import contextlib
import datetime
import importlib
import importlib.util
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

TIMEOUT = 120.0  # seconds for all ranks together; a rank that hangs fails the test


class RankServer:
    """Ranks of one kind: they start with `modules` imported, whatever those change in the process."""

    def __init__(self, *modules: str, on_gpu: bool = False) -> None:
        """The server starts, and imports, with the first rank, and ends with this process.

        GPUs are hidden from ranks that are not `on_gpu`. `modules` of those that are must not query one: a
        fork could not use a GPU that the server has queried.
        """
        self._hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        self._server = multiprocessing.forkserver.ForkServer()
        self._server.set_forkserver_preload([*modules, "before_fork"])

    def run_ranks(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
    ) -> list[Any]:
        """Runs `function(rank, world_size, *arguments)` on each rank, with torch.distributed initialised with
        `backend`: gloo, or a module that registers the backend of its name.

        The result of a rank that raised is the exception's (type name, text); of one that died, None.
        """
        port, pipes, processes = free_port(), [], []
        for rank in range(world_size):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            processes.append(
                self._start(_run_rank, sender, rank, world_size, port, backend, function, arguments)
            )
            sender.close()
            pipes.append(receiver)
        _join(processes)
        return [_received(pipe) for pipe in pipes]

    def run_programs(
        self, world_size: int, program: Callable[..., None], *arguments: Any
    ) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of `program(rank, world_size, port, *arguments)` on each rank.

        For tests of how a process ends: an uncaught Exception goes to sys.excepthook and the interpreter is
        finalised, as in a script. `port` is free; torch.distributed is not initialised.
        """
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            texts = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(world_size)]
            processes = [
                self._start(_run_program, *texts[rank], program, (rank, world_size, port, *arguments))
                for rank in range(world_size)
            ]
            _join(processes)
            return [
                (process.exitcode, _without_gloos(out.read_text()), err.read_text())
                for process, (out, err) in zip(processes, texts, strict=True)
            ]

    def run_python(
        self, *command: str | Path, cwd: str | Path = ".", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python command...` in `cwd`, with `variables` added to the environment: a script, or -m and a
        module, and arguments. As in an interpreter, PYTHONPATH is on the import path, sitecustomize.py is
        imported, and the process ends in the same way."""
        words = [str(word) for word in command]
        ((code, out, err),) = self.run_programs(1, _run_python, words, str(cwd), variables)
        return subprocess.CompletedProcess(words, code, out, err)

    def _start(self, target: Callable[..., None], *arguments: Any) -> BaseProcess:
        environment = {**os.environ, **self._hidden, "OMP_NUM_THREADS": "1"}
        # The server takes its import path from this variable; before Python 3.13 it has no other source.
        with mock.patch.dict(os.environ, environment, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            self._server.ensure_running()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_in_environment, args=(environment, target, *arguments), daemon=True)
        # multiprocessing has one server; here there is one per kind of rank.
        connect = self._server.connect_to_new_process
        with mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", connect):
            process.start()
        return process


class KeptRanks:
    """Ranks that are reused by later calls, for functions that leave their process unchanged;
    tests/conftest.py ends them with their module.

    The first use of things in a process (a process group, DTensor's rules, torch's lazy imports) costs a rank
    three times as much as training a small model."""

    _all: ClassVar[list["KeptRanks"]] = []

    def __init__(self, server: RankServer, backend: str = "gloo") -> None:
        """`backend`: gloo or nccl."""
        self._all.append(self)
        self._server, self._backend = server, backend
        self._ranks: dict[int, list[tuple[BaseProcess, Any]]] = {}

    def run_ranks(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Like RankServer's. After a rank raised or died, the next call starts new ones."""
        if world_size not in self._ranks:
            self._ranks[world_size] = self._start(world_size)
        pipes = [pipe for _, pipe in self._ranks[world_size]]
        for pipe in pipes:
            pipe.send((os.getcwd(), function, arguments))
        end = time.monotonic() + TIMEOUT
        silent = [rank for rank, pipe in enumerate(pipes) if not pipe.poll(max(0.0, end - time.monotonic()))]
        results = [(False, None) if rank in silent else _received(pipe) for rank, pipe in enumerate(pipes)]
        if not all(result and result[0] for result in results):
            self._end(world_size)
        if silent:
            raise TimeoutError(f"ranks {silent} of {world_size} still ran after {TIMEOUT} s")
        return [result and result[1] for result in results]

    @classmethod
    def end_all(cls) -> None:
        for kept in cls._all:
            for world_size in list(kept._ranks):
                kept._end(world_size)

    def _start(self, world_size: int) -> list[tuple[BaseProcess, Any]]:
        port, ranks = free_port(), []
        for rank in range(world_size):
            own, theirs = multiprocessing.Pipe()
            ranks.append(
                (self._server._start(_run_functions, theirs, rank, world_size, port, self._backend), own)
            )
            theirs.close()
        return ranks

    def _end(self, world_size: int) -> None:
        for process, pipe in self._ranks.pop(world_size):
            process.kill()
            process.join()
            pipe.close()


# pytest: test modules import it.
_server = RankServer("pytest", "torch._dynamo", "nanlocator.transformers", "transformers.trainer")
run_ranks, run_programs = _server.run_ranks, _server.run_programs
run_kept_ranks = KeptRanks(_server).run_ranks
run_python = RankServer("torch._dynamo").run_python


def _without_gloos(text: str) -> str:
    """Removes the line that gloo prints on connecting, before torch 2.11."""
    return re.sub(r"^\[Gloo\] Rank .*\n", "", text, flags=re.M)


def _join(processes: list[BaseProcess]) -> None:
    end = time.monotonic() + TIMEOUT
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    living = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in living:
        processes[rank].kill()
        processes[rank].join()
    if living:
        raise TimeoutError(f"ranks {living} of {len(processes)} still ran after {TIMEOUT} s")


def _received(pipe) -> Any:
    try:
        return pipe.recv() if pipe.poll() else None
    except EOFError:
        return None


def free_port() -> int:
    """A port that no other program takes before the rank listens on it.

    The system chooses ports from a range that it also uses for other programs' requests and for outgoing
    connections, and may hand one out again before a rank has started. These lie below that range (Linux: from
    32768).
    """
    while True:
        port = next(_ports)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


# Concurrent test processes start far from each other.
_ports = itertools.cycle(random.Random(os.getpid()).sample(range(12000, 32000), 20000))


# ---- in the rank --------------------------------------------------------------------------------


@contextlib.contextmanager
def standard_error() -> Iterator[Callable[[], str]]:
    """Yields this rank's output to stderr, C++ included, since the block began; pytest's own capture does not
    see it."""
    with tempfile.TemporaryFile() as file:

        def printed() -> str:
            sys.stderr.flush()
            file.seek(0)
            return file.read().decode()

        sys.stderr.flush()
        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            text = printed()
            os.dup2(own, 2)
            os.close(own)
            sys.stderr.write(text)


def excuse(*ranks: int) -> None:
    """Lets run_ranks' rank 0, which hosts the Store, end without waiting for these."""
    import torch.distributed as dist

    for rank in ranks:
        dist.distributed_c10d._get_default_store().underlying_store.set(f"done/{rank}", "1")


def _in_environment(environment: dict[str, str], target: Callable[..., None], *arguments: Any) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    target(*arguments)


def _join_group(rank: int, world_size: int, port: int, backend: str) -> Any:
    """Returns the group's Store."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, datetime.timedelta(seconds=60))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
    )
    return store


def _run_functions(pipe, rank: int, world_size: int, port: int, backend: str) -> None:
    _join_group(rank, world_size, port, backend)
    while True:
        folder, function, arguments = pipe.recv()
        os.chdir(folder)
        try:
            result = True, function(rank, world_size, *arguments)
        except Exception as error:
            traceback.print_exc()
            result = False, (type(error).__name__, str(error))
        pipe.send(result)


def _run_rank(sender, rank: int, world_size: int, port: int, backend: str, function, arguments) -> None:
    if backend != "gloo":
        importlib.import_module(backend)
    store = _join_group(rank, world_size, port, backend)
    try:
        sender.send(function(rank, world_size, *arguments))
    except Exception as error:
        traceback.print_exc()
        sender.send((type(error).__name__, str(error)))
    # The Store is in rank 0, which ends last.
    store.set(f"done/{rank}", "1")
    if rank == 0:
        for other in range(world_size):
            try:
                store.wait([f"done/{other}"], datetime.timedelta(seconds=20))
            except Exception:
                pass  # a rank that was killed deliberately


def _run_program(out: Path, err: Path, program: Callable[..., None], arguments: tuple) -> None:
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    # From Python 3.13 on, a process of multiprocessing forgets its server's exit functions.
    atexit.register(weakref.finalize._exitfunc)
    code = 0
    try:
        program(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # Ends like an interpreter, but without freeing the server's imports, which takes a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_python(
    _rank: int, _processes: int, _port: int, words: list[str], cwd: str, variables: dict[str, str]
) -> None:
    multiprocessing.process._parent_process = None  # as if started by a shell
    multiprocessing.process.current_process()._config["daemon"] = False
    os.chdir(cwd)
    os.environ |= variables
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.modules.pop("sitecustomize", None)  # the server's: Debian's Python has one
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    if words[0] == "-m":
        sys.argv, sys.path = words[1:], [os.getcwd(), *sys.path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path = words, [os.path.dirname(os.path.abspath(words[0])), *sys.path]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = words[0]
    try:
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except Exception as error:
        raise error.with_traceback(error.__traceback__.tb_next) from None
