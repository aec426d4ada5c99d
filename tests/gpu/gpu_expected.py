"""Compares a verdict with the expected one."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected origins: for each name in ``names`` one of the values; the operator begins with its value, the
    line contains it."""

    operator: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    module: str | None = "fault"
    line: str = ""
    action: str = ""
    not_action: str = ""

    def wrong_in(self, origin: dict[str, Any]) -> list[str]:
        wrong = []
        if self.operator and not (origin["operator"] or "").startswith(self.operator):
            wrong.append(f"operator {origin['operator']}, not {' or '.join(self.operator)}")
        if self.cause and origin["cause"] not in self.cause:
            wrong.append(f"cause {origin['cause']}, not {' or '.join(self.cause)}")
        if self.module is not None and (origin["module"] or "") != self.module:
            wrong.append(f"module {origin['module']}, not {self.module}")
        text = (origin.get("code") or {}).get("text") or ""
        if self.line not in text:
            wrong.append(f"line {text!r}, not that of {self.line!r}")
        if self.action and origin["action_kind"] != self.action:
            wrong.append(f"action {origin['action_kind']}, not {self.action}")
        if self.not_action and origin["action_kind"] == self.not_action:
            wrong.append(f"action {self.not_action}")
        return wrong


def check(verdict: dict[str, Any] | None, expected: Expected | None) -> None:
    """``expected`` is None for a healthy program."""
    found = verdict and {key: verdict[key] for key in ("origins", "rerun", "notes")}
    assert (verdict is None) == (expected is None), found
    if verdict is None or expected is None:
        return
    first, *others = verdict["origins"]
    wrong = expected.wrong_in(first)
    wrong += [f"another origin: {other['operator']}, {other['cause']}" for other in others]
    assert not wrong, f"{'; '.join(wrong)}: {found}"
