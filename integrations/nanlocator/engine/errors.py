"""The error that stops a bad step."""

from typing import Any

from nanlocator._C import Error
from nanlocator.engine.exit_status import exit_status_of
from nanlocator.engine.verdict import Verdict


class NonFiniteGradientError(Error):
    """Raised on every rank under ``on_bad="stop"``, before a weight has moved.

    ``verdict`` is a ``nanlocator.engine.verdict.Verdict``; ``str(error)`` is its text.
    If the error ends the program, ``printed`` is below the traceback instead: the verdict is above it.
    """

    def __init__(self, text: str, verdict: dict[str, Any], printed: str = "") -> None:
        super().__init__(text)
        self.verdict = verdict if isinstance(verdict, Verdict) else Verdict(verdict)
        self.printed = printed or text

    @property
    def exit_status(self) -> int:
        """For a job script: the status of the verdict's decision (docs/decisions.md), with which
        ``python -m nanlocator`` ends. ``sys.exit(error.exit_status)`` in a program that has no launcher."""
        return exit_status_of(self.verdict)

    def __reduce__(self) -> tuple[Any, ...]:  # crosses process boundaries with its verdict
        return (type(self), (str(self), self.verdict, self.printed))

    def as_printed(self) -> "NonFiniteGradientError":
        return NonFiniteGradientError(self.printed, self.verdict)


NonFiniteGradientError.__module__ = "nanlocator"  # the public name in tracebacks and pickles
