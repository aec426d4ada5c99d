"""The command ``nanlocator check-checkpoint``. tools/command/check_checkpoint_options.hpp has its options."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nanlocator import _C
from nanlocator.check_checkpoint.check import BEFORE, Progress, check_checkpoint
from nanlocator.check_checkpoint.text import size, text_of

__all__ = ["main"]

_FIRST_PROGRESS, _NEXT_PROGRESS = 1.0, 0.2  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 finite, 1 findings, 3 something could not be read. --help and wrong use (2)
    end the program."""
    options = _C.parse_check_checkpoint(sys.argv[1:] if arguments is None else arguments)
    if problem := _wrong_use(options.path, options.compare, is_alone=options.alone):
        print(f"nanlocator: {_C.printable(problem)}; see nanlocator check-checkpoint --help", file=sys.stderr)
        return 2
    line = _Line()
    report = check_checkpoint(
        options.path,
        which="all" if options.all else "resume",
        parameters=options.parameter,
        compare=None if options.alone else options.compare or BEFORE,
        deadline_s=options.deadline,
        on_progress=line.show if sys.stderr.isatty() else None,
        maps_files=True,
    )
    line.clear()
    if options.json:
        print(json.dumps(report.to_json()))
    else:
        print(text_of(report), end="")
    return report.exit_code


def _wrong_use(path: str, compare: str, *, is_alone: bool) -> str:
    if compare and is_alone:
        return "--compare and --alone exclude each other"
    missing = next((each for each in (path, compare) if each and not Path(each).exists()), None)
    return f"{missing}: no such file or folder" if missing else ""


class _Line:
    """The last line of a terminal."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _FIRST_PROGRESS
        self._shown = False

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _NEXT_PROGRESS
        self._shown = True
        name = _C.printable(Path(progress.path).name)[:40]
        text = (
            f"{name}: {size(progress.bytes_read)} of {size(progress.bytes_in_all)}, "
            f"{progress.tensors_read} of {progress.tensors_in_all} tensors"
        )
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
