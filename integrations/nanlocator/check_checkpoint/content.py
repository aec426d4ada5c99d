"""Whether one checkpoint can be loaded."""

import os
from datetime import timedelta

from nanlocator.check_checkpoint.check import check_checkpoint
from nanlocator.check_checkpoint.report import Finding

__all__ = ["read_content"]


def read_content(path: str | os.PathLike[str], limit: timedelta) -> tuple[bool | None, str]:
    """Whether every tensor in the checkpoint is finite, and what was found. None: it was not read, or not to
    the end in this time."""
    report = check_checkpoint(path, compare=None, deadline_s=limit.total_seconds())
    if not report.checkpoints:
        return None, report.problem or "it could not be read"
    checked = report.checkpoints[0]
    if checked.findings:
        return False, _text_of(checked.findings[0])
    return (True, "finite") if report.exit_code == 0 else (None, "not read to the end")


def _text_of(finding: Finding) -> str:
    seen = finding.tensor.statistics
    if finding.kind != "nonfinite" or seen is None:
        return f"{finding.tensor.name} has an absurd magnitude"
    return f"{finding.tensor.name} holds {'NaN' if seen.nan else 'Inf'}"
