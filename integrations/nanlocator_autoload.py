"""Attaches nanlocator to a process that was started with NANLOCATOR=1, as soon as it has imported torch.

``nanlocator.pth`` imports this module at the interpreter's start, and only where the variable is set. It must
not import torch, nor nanlocator, which does: most of the processes that inherit the variable train nothing.
"""

import functools
import sys
from types import ModuleType

from nanlocator_after_import import AfterImport


@functools.cache
def follow() -> None:
    """Whatever this process trains. Once: in a virtual environment Python reads each .pth twice (site.venv,
    then site.main)."""
    AfterImport({"torch": _attach})


def _attach(_: ModuleType) -> None:
    try:
        from nanlocator import attach

        attach.follow_process()
    except Exception as error:  # the script is not ours to end
        print(f"nanlocator: not attached: {error}", file=sys.stderr, flush=True)
