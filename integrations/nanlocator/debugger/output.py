"""Destinations of text: the terminal, and with several ranks a file of each rank. Text is never lost
silently."""

import os
import socket
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from nanlocator.engine.this_rank import is_distributed


def say(text: str) -> None:
    """Prints on stdout, or on stderr if that fails."""
    if (problem := _print_to(sys.stdout, text)) is None:
        return
    if (
        _print_to(sys.stderr, f"nanlocator: stdout cannot be written ({problem}); the text follows\n{text}")
        is not None
    ):
        raise OSError(_nowhere(f"stdout: {problem}", text))


class Output:
    """The text output of one debugger.

    One process: stdout. Several ranks: each one's file ``debug_rank{r}.txt`` in ``directory``, which is
    created for the first text and appended to, and rank 0's stdout. If the terminal or the file fails, its
    text goes to the other, else to stderr, with one line that gives the reason; if all fail, the OSError
    holds the text.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._has_header = False
        self._problems: set[str] = set()  # already reported

    @property
    def path(self) -> Path:
        return self._directory.absolute() / f"debug_rank{_rank()}.txt"

    def write(self, text: str) -> None:
        problems = []
        taken_by = []
        if _rank() == 0:
            if (refusal := _print_to(sys.stdout, text)) is None:
                taken_by.append("stdout")
            else:
                problems.append(f"stdout cannot be written ({refusal})")
        if is_distributed() or not taken_by:
            if (failure := self._append(text)) is None:
                taken_by.append(str(self.path))
            else:
                problems.append(f"{self.path} cannot be written ({failure})")
        if problems:
            self._tell("; ".join(problems), text, taken_by)

    def write_on_rank_0(self, text: str) -> None:
        """Prints text that another rank has in its own file."""
        if _rank() == 0 and (refusal := _print_to(sys.stdout, text)) is not None:
            _print_to(
                sys.stderr, f"nanlocator: stdout cannot be written ({refusal}); the text follows\n{text}"
            )

    def _append(self, text: str) -> OSError | None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                if not self._has_header:
                    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
                    file.write(f"# {describe_rank()}, process {os.getpid()}, {now}\n")
                file.write(text + "\n")
        except OSError as error:
            return error
        self._has_header = True
        return None

    def _tell(self, problem: str, text: str, taken_by: list[str]) -> None:
        """Reports each problem once; includes the text if no destination took it."""
        lines = []
        if problem not in self._problems:
            self._problems.add(problem)
            where = f"went to {taken_by[0]}" if taken_by else "follows"
            lines.append(
                f"nanlocator: DebugUnderflowOverflow: {problem}. Free some space, or pass a writable "
                f"`output_dir`. The text {where}"
            )
        if not taken_by:
            lines.append(text)
        if lines and _print_to(sys.stderr, "\n".join(lines)) is not None and not taken_by:
            raise OSError(_nowhere(problem, text))


def describe_rank() -> str:
    """``rank 1 of 4 (host a17)``."""
    size = dist.get_world_size() if is_distributed() else 1
    return f"rank {_rank()} of {size} (host {socket.gethostname()})"


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def _print_to(stream: TextIO | None, text: str) -> Exception | None:
    """Returns None on success. ValueError: the stream is closed."""
    if stream is None:  # a process without a console
        return OSError("this process has none")
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError) as error:
        return error
    return None


def _nowhere(reason: str, text: str) -> str:
    return (
        f"DebugUnderflowOverflow: {reason}, and stderr is closed, too. Free some space, leave sys.stdout "
        f"open, or pass a writable `output_dir`. The text was:\n{text}"
    )
