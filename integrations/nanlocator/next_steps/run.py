"""The files of a run: its verdict, later attempts, results of netcheck."""

import calendar
import json
import os
import re
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanlocator import _C

_ATTEMPT = re.compile(r"a(\d+)")
MINUTE = 60  # to which the time of a verdict is known
_OLDEST_VERSION = 3  # the first with a decision


@dataclass(slots=True)
class Attempt:
    """``verdict``: None if it has none, or none that can be read."""

    number: int
    folder: Path
    started: float | None  # seconds since the epoch
    verdict: dict[str, Any] | None


@dataclass(slots=True)
class Run:
    """One attempt's verdict, and what has come after it."""

    folder: Path  # of the attempt
    verdict: dict[str, Any]
    later: list[Attempt] = field(default_factory=list)
    netcheck: dict[str, Any] | None = None  # the newest result from after the verdict
    netcheck_file: Path | None = None

    @property
    def found(self) -> float | None:
        """When the verdict was made, to the minute."""
        return _seconds(((self.verdict.get("launch") or {}).get("found") or "").replace(" ", "T"))

    @property
    def decision(self) -> dict[str, Any]:
        return dict(self.verdict["decision"])

    @property
    def launch(self) -> dict[str, Any]:
        return dict(self.verdict.get("launch") or {})

    @property
    def has_known_steps(self) -> bool:
        """Whether the names of the checkpoints say after which of this run's steps they were written."""
        return self.launch.get("steps_before", 0) is not None

    def is_too_new(self, step: int, written: float) -> bool:
        """Of a checkpoint with this number in its name, written at this time: not from before the fault."""
        newest = self.decision.get("newest_step")
        if newest is None:
            return False
        if not self.has_known_steps:
            return self.found is not None and written >= self.found + MINUTE
        return step > int(newest) + int(self.launch.get("steps_before", 0))


def read_run(path: Path) -> Run:
    """``path``: a run's folder (its latest attempt with a verdict), an attempt's, or a verdict.json. Raises
    FormatError or OSError, whose text says what to do instead."""
    folder = path.parent if path.is_file() else path
    if not path.is_file() and not _verdicts_in(folder):
        attempts = [each for each in _attempts(folder) if _verdicts_in(each)]
        if not attempts:
            raise FileNotFoundError(f"{path} has no verdict.json, and no attempt (a0, a1, ...) that has one")
        folder = attempts[-1]
    folder = folder.absolute()
    run = Run(folder, _read_verdict(path) if path.is_file() else _deciding_verdict(folder))
    own = _ATTEMPT.fullmatch(folder.name)
    for each in _attempts(folder.parent) if own else []:
        number = int(each.name[1:])
        if own is not None and number > int(own[1]):
            run.later.append(_attempt(each, number))
    _find_netcheck(run)
    return run


def _attempts(folder: Path) -> list[Path]:
    found = [each for each in folder.iterdir() if _ATTEMPT.fullmatch(each.name) and each.is_dir()]
    return sorted(found, key=lambda each: int(each.name[1:]))


def _verdicts_in(folder: Path) -> list[Path]:
    """That of all ranks first."""
    of_all = folder / "verdict.json"
    return [*([of_all] if of_all.is_file() else []), *sorted(folder.glob("verdict_rank*.json"))]


def _deciding_verdict(folder: Path) -> dict[str, Any]:
    """That of all ranks. If it knows of nothing bad, because a rank ended alone, or if no rank was left to
    write it, that of a rank that does."""
    first = None
    for file in _verdicts_in(folder):
        verdict = _read_verdict(file)
        if verdict.get("origins"):
            return verdict
        first = first or verdict
    assert first is not None
    return first


def _read_verdict(file: Path) -> dict[str, Any]:
    report = f"nanlocator report {shlex.quote(str(file.parent))}"
    try:
        verdict = json.loads(file.read_bytes())
    except ValueError as error:
        raise _C.FormatError(
            f"{file} is cut off or no JSON ({error}); this makes the verdict again, from the ledgers: "
            f"{report}"
        ) from None
    if not isinstance(verdict, dict) or not isinstance(verdict.get("version"), int):
        raise _C.FormatError(f"{file} is no verdict: it has no version")
    if verdict["version"] < _OLDEST_VERSION:
        raise _C.FormatError(
            f"{file} is of version {verdict['version']}, which has no decision to plan by; this shows what "
            f"it has: {report}"
        )
    if not isinstance(verdict.get("decision"), dict):
        raise _C.FormatError(f"{file} has no decision; this shows what it has: {report}")
    return verdict


def _attempt(folder: Path, number: int) -> Attempt:
    started = verdict = None
    try:
        started = _seconds(json.loads((folder / "run.json").read_bytes())["started"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # it has just begun, or its disk is full
    try:
        verdict = _deciding_verdict(folder) if _verdicts_in(folder) else None
    except (OSError, _C.FormatError):
        pass
    return Attempt(number, folder, started, verdict)


def _find_netcheck(run: Run) -> None:
    """JSON files of ``nanlocator netcheck --output`` in the attempt's folder and the run's."""
    after = run.found or 0
    newest = 0.0
    for folder in (run.folder, run.folder.parent):
        for file in folder.glob("netcheck*.json"):
            try:
                written = os.stat(file).st_mtime
                result = json.loads(file.read_bytes())
            except (OSError, ValueError):
                continue
            is_result = isinstance(result, dict) and {"verdict", "findings"} <= result.keys()
            if is_result and written >= max(after, newest):
                newest, run.netcheck, run.netcheck_file = written, result, file


def _seconds(text: str) -> float | None:
    """Of UTC."""
    for form in ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M"):
        try:
            return float(calendar.timegm(time.strptime(text, form)))
        except ValueError:
            continue
    return None
