"""The import path of a program that opens files from others. Imports only built-in modules."""

import sys
from posix import stat


def leave_out_current_folder() -> None:
    """Removes the current folder, which `python -m` puts first. Keeps it after the installed packages:
    `pip install -e` has put it there, and Python's own modules are found before it."""
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
