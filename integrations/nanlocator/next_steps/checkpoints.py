"""The checkpoints that are there now, and whether they are finite."""

import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from nanlocator.check_checkpoint.content import read_content
from nanlocator.check_checkpoint.report import Content

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's, written after all ranks have saved
_MOST_ENTRIES = 100_000


@dataclass(slots=True)
class Checkpoint:
    """``is_finite``: None if it was not checked, or not to the end."""

    path: Path
    step: int
    written: float  # seconds since the epoch
    is_finite: bool | None = None
    why: str = ""


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The newest first. Named as the engine names them (src/step/launch.cpp)."""
    found = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_ENTRIES:
                break
            step = _step_of(entry.name)
            if step is not None:
                found.append(Checkpoint(Path(entry.path), step, entry.stat().st_mtime))
    return sorted(found, key=lambda each: (-each.step, each.path.name))


def resumed(folder: Path, found: list[Checkpoint]) -> tuple[Checkpoint | None, str]:
    """The one that a plain resubmit would load, and why it is known; a guess says so."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        text = []
    if text and text[0].isdecimal():
        chosen = next((each for each in found if each.step == int(text[0])), None)
        return chosen, f"{TRACKER} names it"
    try:
        name = (folder / "latest").read_text(encoding="utf-8").strip()  # DeepSpeed's
    except (OSError, UnicodeDecodeError):
        name = ""
    if name:
        return next((each for each in found if each.path.name == name), None), "latest names it"
    return (found[0] if found else None), "the highest number"


def check(each: Checkpoint, deadline: float) -> None:
    """``deadline``: of time.monotonic."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return
    read = read_content(each.path, timedelta(seconds=seconds))
    each.why = read.found
    if read.content is not Content.UNKNOWN:
        each.is_finite = read.content is Content.FINITE


def _step_of(name: str) -> int | None:
    lower = name.lower()
    if match := re.fullmatch(r"checkpoint-(\d{1,18})", lower):  # Transformers'; others number by epochs
        return int(match[1])
    for word in ("step", "iter"):
        found = lower.rfind(word)
        match = re.match(r"[_=-]*(\d{1,18})", lower[found + len(word) :]) if found >= 0 else None
        if match is not None:
            return int(match[1])
    return None
