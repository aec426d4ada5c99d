"""Long commands: their output goes to a log, a line shows progress, and they end with all their child
processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

LONGEST = 7200.0  # seconds


class CommandFailed(Exception):
    """A command failed or timed out."""

    def __init__(self, label: str, code: int | None, log: Path) -> None:
        self.code, self.log = code, log  # no code if it was terminated
        self.what = (
            f"{label} {'took too long' if code is None else 'failed'}"  # without a path of this machine
        )
        super().__init__(f"{self.what}; all of its output is in {log}")


def work(
    label: str,
    command: list[str | Path],
    log: Path,
    environment: dict[str, str] | None = None,
    limit: float = LONGEST,
) -> None:
    """Runs the command with its output in `log`. Raises CommandFailed."""
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = environment or dict(os.environ)
    with log.open("ab") as output:
        output.write(f"$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        if not shutil.which(str(command[0]), path=variables.get("PATH")):
            output.write(f"{command[0]} is not on this machine; tools/setup says what to install\n".encode())
            raise CommandFailed(label, 127, log)
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,  # its children end with it
        )
    line = Line(label)
    try:
        while process.poll() is None:
            seconds = time.monotonic() - started
            if seconds > limit:
                raise CommandFailed(label, None, log)
            line.show(seconds, log)
            time.sleep(0.2)
    finally:
        line.clear()
        if process.poll() is None:
            end(process)
    if process.returncode != 0:
        raise CommandFailed(label, process.returncode, log)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exits with the result of `main`. If the program is terminated, its child processes are, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def end(process: subprocess.Popen, patience: float = 10.0) -> None:
    """pytest ends its tests' ranks when it is interrupted; processes that still run then are killed."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Line:
    """On a terminal one line that is overwritten; elsewhere a line once work takes more than two seconds."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.is_shown = False

    def show(self, seconds: float, log: Path) -> None:
        if seconds < 2 or (self.is_shown and not sys.stderr.isatty()):
            return
        if sys.stderr.isatty():
            print(
                f"\r\033[K  {self.label} ... {seconds:.0f} s{how_far(log)}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        else:
            print(f"  {self.label} ...", file=sys.stderr, flush=True)
        self.is_shown = True

    def clear(self) -> None:
        if self.is_shown and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def how_far(log: Path) -> str:
    """Progress at the end of ninja's or pytest's output: [12/90] or [ 45%]."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        found = re.findall(r"\[ *\d+(?:/\d+|%)\]", file.read().decode(errors="replace"))
    return f" {found[-1]}" if found else ""


def last_lines(log: Path, count: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def fresh(log: Path) -> Path:
    """The path of a log, which is emptied."""
    log.unlink(missing_ok=True)
    return log
