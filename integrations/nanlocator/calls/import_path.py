"""The import path of a program that opens what others have sent. Imports nothing but built-in modules."""

import sys
from posix import stat


def leave_out_current_folder() -> None:
    """`python -m` puts it first. Kept where it comes after the installed packages: `pip install -e` has put
    it there, and nothing of Python's own is looked for in it."""
    kept: list[str] = []
    for entry in sys.path:
        if any(each.endswith("-packages") for each in kept) or not _is_current_folder(entry):
            kept.append(entry)
    sys.path[:] = kept


def _is_current_folder(entry: str) -> bool:
    try:
        return stat(entry or ".")[1:3] == stat(".")[1:3]  # inode and device
    except OSError:
        return False
