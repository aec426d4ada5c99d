"""Attaches nanlocator to a process that was started with NANLOCATOR=1 as soon as it has imported torch.

``nanlocator.pth`` imports this module at the interpreter's start, only if the variable is set. It must not
import torch, or nanlocator, which imports torch: most processes that inherit the variable do not train.
"""

import functools
import sys
from types import ModuleType

from nanlocator_after_import import AfterImport


@functools.cache
def follow() -> None:
    """Attaches to this process. Runs once: in a virtual environment Python reads each .pth twice (site.venv,
    then site.main)."""
    AfterImport({"torch": _attach})


def _attach(_: ModuleType) -> None:
    try:
        from nanlocator import attach

        attach.follow_process()
    except Exception as error:  # an error here must not end the script
        print(f"nanlocator: not attached: {error}", file=sys.stderr, flush=True)
