"""The error that stops a bad step."""

from typing import Any

from nanlocator._C import Error


class NonFiniteGradientError(Error):
    """Raised on every rank under ``on_bad="stop"``, before a weight has moved.

    ``verdict`` is the content of verdict.json as a dictionary (docs/formats.md); ``str(error)`` is the
    same for people.
    """

    def __init__(self, text: str, verdict: dict[str, Any]) -> None:
        super().__init__(text)
        self.verdict = verdict

    def __reduce__(self) -> tuple[Any, ...]:  # so that it crosses process boundaries with its verdict
        return (type(self), (str(self), self.verdict))


NonFiniteGradientError.__module__ = "nanlocator"  # in tracebacks and pickles: where users have it
