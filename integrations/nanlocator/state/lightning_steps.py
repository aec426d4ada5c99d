"""Lightning around a step that is executed again. Its strategies run ``training_step`` inside of the
wrapper's forward, so a call that is made again runs it again, though what it logs has been logged. And Fabric
refuses a backward that does not come through ``fabric.backward``.

Nothing of Lightning is imported here, and both of its packages are known.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches


def modules_that_know_of_backward() -> list[ModuleType]:
    """Each has a variable ``_in_fabric_backward`` (fabric/wrappers.py)."""
    return _imported("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """``LightningModule.log`` does nothing."""
    with Patches(__name__) as patches:
        for module, point in points.LIGHTNING_LOG.items():
            if module in sys.modules:
                patches.wrap(point, lambda *_, **__: None)
        yield


def _imported(*names: str) -> list[ModuleType]:
    return [sys.modules[name] for name in names if name in sys.modules]
