"""Whether one checkpoint can be loaded."""

import os
from datetime import timedelta

from nanlocator.check_checkpoint.check import check_checkpoint
from nanlocator.check_checkpoint.report import Finding

__all__ = ["read_content"]


def read_content(path: str | os.PathLike[str], limit: timedelta) -> tuple[bool | None, str, float | None]:
    """Whether every tensor in the checkpoint is finite, what was found, and the largest magnitude of a
    weight. None: it was not read, or not to the end in this time."""
    report = check_checkpoint(path, compare=None, deadline_s=limit.total_seconds())
    if not report.checkpoints:
        return None, report.problem or "it could not be read", None
    checked = report.checkpoints[0]
    if checked.findings:
        return False, _text_of(checked.findings[0]), None
    if report.exit_code != 0:
        return None, "not read to the end", None
    return True, "finite", None if checked.largest is None else checked.largest.absmax


def _text_of(finding: Finding) -> str:
    seen = finding.tensor.statistics
    if finding.kind != "nonfinite" or seen is None:
        return f"{finding.tensor.name} has an absurd magnitude"
    return f"{finding.tensor.name} holds {'NaN' if seen.nan else 'Inf'}"
