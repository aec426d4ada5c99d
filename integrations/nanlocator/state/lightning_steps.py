"""Lightning in a re-run. Its strategies run ``training_step`` inside the wrapper's forward, so a repeated
call runs it again and would log a second time. And Fabric rejects a backward that does not use
``fabric.backward``.

Imports nothing of Lightning, and supports both of its packages.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches


def modules_that_know_of_backward() -> list[ModuleType]:
    """The imported modules with a variable ``_in_fabric_backward`` (fabric/wrappers.py)."""
    return _imported("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """Inside the block, ``LightningModule.log`` does nothing."""
    with Patches(__name__) as patches:
        for module, point in points.LIGHTNING_LOG.items():
            if module in sys.modules:
                patches.wrap(point, lambda *_, **__: None)
        yield


def _imported(*names: str) -> list[ModuleType]:
    return [sys.modules[name] for name in names if name in sys.modules]
