"""The results of the cells in docs/support.md. They are kept only there, in the table between two markers.
The text around it can be edited freely."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from cells import Cell

BEGIN = "<!-- Written by tools/test --matrix; edit the text around it only. -->"
END = "<!-- End of what tools/test --matrix writes. -->"
HEADER = ("torch", "Python", "framework", "date", "commit", "result")
NEVER = "not run yet"


@dataclasses.dataclass(frozen=True)
class Row:
    torch: str
    python: str
    framework: str
    date: str
    commit: str
    result: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.torch, self.python, self.framework


def read(text: str) -> dict[tuple[str, str, str], Row]:
    """The rows between the markers."""
    _, begin, rest = text.partition(BEGIN)
    table, end, _ = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"the table's markers are missing; put these two lines where it is to stand:\n{BEGIN}\n{END}"
        )
    rows = {}
    for line in table.splitlines():
        fields = tuple(field.strip() for field in line.strip().strip("|").split("|"))
        if line.startswith("|") and fields != HEADER and not line.startswith("|--"):
            if len(fields) != len(HEADER):
                raise ValueError(f"this row has {len(fields)} fields instead of {len(HEADER)}: {line}")
            row = Row(*fields)
            rows[row.key] = row
    return rows


def write(text: str, rows: dict[tuple[str, str, str], Row], cells: list[Cell]) -> str:
    """`text` with the rows of these cells in their order. Rows of other cells are dropped."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    for cell in cells:
        row = rows.get(cell.key, Row(*cell.key, "", "", NEVER))
        lines.append(f"| {' | '.join(dataclasses.astuple(row))} |")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def record(page: Path, row: Row, cells: list[Cell]) -> None:
    """Sets one row and keeps the others, so that another matrix run loses nothing by it."""
    text = page.read_text()
    rows = read(text)
    rows[row.key] = row
    temporary = page.with_name(f".{page.name}.{os.getpid()}")
    temporary.write_text(write(text, rows, cells))
    temporary.replace(page)


def in_a_field(text: str) -> str:
    """On one line, without characters that would end a field."""
    return " ".join(text.replace("|", "/").split())
