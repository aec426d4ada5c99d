"""Is this checkpoint safe to load? ``nanlocator check-checkpoint PATH``, ``python -m
nanlocator.check_checkpoint``, and `nanlocator.check_checkpoint`, which is the function.
docs/check-checkpoint.md has formats and rules."""

from nanlocator.check_checkpoint.check import BEFORE, Progress, check_checkpoint
from nanlocator.check_checkpoint.report import (
    CheckpointReport,
    Content,
    Finding,
    Largest,
    Report,
    Statistics,
    TensorReport,
    Unread,
)

__all__ = [
    "BEFORE",
    "CheckpointReport",
    "Content",
    "Finding",
    "Largest",
    "Progress",
    "Report",
    "Statistics",
    "TensorReport",
    "Unread",
    "check_checkpoint",
]
