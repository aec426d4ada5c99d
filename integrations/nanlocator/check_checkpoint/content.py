"""Whether one checkpoint can be loaded."""

import os
from datetime import timedelta
from typing import NamedTuple

from nanlocator.check_checkpoint.check import check_checkpoint
from nanlocator.check_checkpoint.report import Content, Finding

__all__ = ["Read", "finite_of", "read_content"]


class Read(NamedTuple):
    """``found``: in words. ``largest``: magnitude of a weight, of a finite one."""

    content: Content
    found: str
    largest: float | None = None


def read_content(path: str | os.PathLike[str], limit: timedelta) -> Read:
    """Of all that is in the checkpoint; UNKNOWN if it was not read, or not to the end in this time."""
    report = check_checkpoint(path, compare=None, deadline_s=limit.total_seconds())
    if not report.checkpoints:
        return Read(Content.UNKNOWN, report.problem or "it could not be read")
    checked = report.checkpoints[0]
    for finding in checked.findings:
        if finding.kind == "nonfinite":
            return Read(Content.BAD, _text_of(finding))
    if checked.findings:
        return Read(Content.SUSPECT, f"{checked.findings[0].tensor.name} has an absurd magnitude")
    if report.exit_code != 0:
        return Read(Content.UNKNOWN, "not read to the end")
    return Read(Content.FINITE, "finite", None if checked.largest is None else checked.largest.absmax)


def finite_of(path: str | os.PathLike[str], limit: timedelta) -> tuple[bool | None, str, float | None]:
    """The same for the engine: whether it is finite. None, too, of an absurd magnitude: that is no proof of
    what a bad weight comes from, and nothing to load unseen."""
    read = read_content(path, limit)
    return {Content.FINITE: True, Content.BAD: False}.get(read.content), read.found, read.largest


def _text_of(finding: Finding) -> str:
    seen = finding.tensor.statistics
    return f"{finding.tensor.name} holds {'Inf' if seen is not None and not seen.nan else 'NaN'}"
