"""The status with which a launched script ends after a verdict, so that a job script can act on it
(docs/decisions.md)."""

from collections.abc import Mapping
from typing import Any

FAILURE = 1  # as for any other uncaught error
# Outside of what has a meaning elsewhere: 0-2, 64-78 (sysexits.h), 126-165 (shells), 255.
TRACED = 95
# 93 also is NVIDIA/nvidia-resiliency-ext's "do not requeue" (its default for --ft-no-restart-exit-code).
_OF_DECISION = {
    "RESTART_AS_IS": 90,
    "EXCLUDE": 91,
    "SKIP_BATCH": 92,
    "DO_NOT_RESTART": 93,
    "OLDER_CHECKPOINT": 94,
}


def exit_status_of(verdict: Mapping[str, Any]) -> int:
    """``verdict``: the content of verdict.json. FAILURE for one without a decision (versions 1 and 2)."""
    decision = verdict.get("decision") or {}
    if decision.get("traced"):
        return TRACED
    return _OF_DECISION.get(decision.get("kind", ""), FAILURE)
