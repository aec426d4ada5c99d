#!/usr/bin/env python3
"""Writes the table in docs/options.md from the rows in integrations/nanlocator/engine/options.py.

PYTHONPATH=build/release/python python tools/option_table.py
"""

import re
from pathlib import Path

from nanlocator import _C
from nanlocator.engine.options import Option, flag_of, rows, variable_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = "| argument, flag | variable | default | meaning |\n|---|---|---|---|\n"


def table() -> str:
    return HEAD + "".join(_row(name, option) for name, option in rows("watch").items())


def _row(name: str, option: Option) -> str:
    default = f"`{option.kind.show(getattr(_C.LocatorOptions(), name))}`"
    other = [f"`{value}` for {integration}" for integration, value in option.defaults.items()]
    only = f" (only for {', '.join(option.only)})" if option.only else ""
    names = f"`{name}`, `{flag_of(name)}` | `{variable_of(name)}`"
    return f"| {names} | {'; '.join([default, *other])} | {option.help}{only} |\n"


def page_with(text: str, new_table: str) -> str:
    return re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: new_table, text)


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
