"""A verdict as an object: the dictionary of verdict.json, whose keys are attributes, too."""

import html
import json
from typing import Any

from nanlocator import _C


class Record(dict[str, Any]):
    """An object of verdict.json: ``origin["module"]`` is ``origin.module``. docs/formats.md has the names."""

    def __getattr__(self, name: str) -> Any:
        try:
            return _as_records(self[name])
        except KeyError:
            raise AttributeError(
                f"a {type(self).__name__} has no {name!r}; it has {', '.join(self)}"
            ) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]


class Verdict(Record):
    """The content of verdict.json. ``print(verdict)`` gives the text that the terminal has.

        verdict.step, verdict.decision.kind, verdict.origins[0].module

    Attributes:
        step: the step of the finding; verdict.json calls it ``iteration``.
    """

    @property
    def step(self) -> int:
        return int(self["iteration"])

    def __str__(self) -> str:
        try:
            return _C.format_verdict(json.dumps(self), "")
        except _C.Error:  # a part of one
            return super().__repr__()

    def __repr__(self) -> str:
        headline, *_ = str(self).splitlines()
        return f"<{headline}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"


def _as_records(value: Any) -> Any:
    if type(value) is dict:
        return Record(value)
    return [_as_records(each) for each in value] if isinstance(value, list) else value
