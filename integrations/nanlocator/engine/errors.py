"""The error that stops a bad step."""

from typing import Any

from nanlocator._C import Error


class NonFiniteGradientError(Error):
    """Raised on every rank under ``on_bad="stop"``, before a weight has moved.

    ``verdict`` is the content of verdict.json as a dictionary (docs/formats.md); ``str(error)`` is its text.
    """

    def __init__(self, text: str, verdict: dict[str, Any]) -> None:
        super().__init__(text)
        self.verdict = verdict

    def __reduce__(self) -> tuple[Any, ...]:  # crosses process boundaries with its verdict
        return (type(self), (str(self), self.verdict))


NonFiniteGradientError.__module__ = "nanlocator"  # the public name in tracebacks and pickles
