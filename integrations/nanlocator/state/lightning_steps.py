"""Lightning around a step that is executed again. Its strategies run ``training_step`` inside of the
wrapper's forward, so a call that is made again runs it again, though what it logs has been logged. And Fabric
refuses a backward that does not come through ``fabric.backward``.

Nothing of Lightning is imported here, and both of its packages are known.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from nanlocator.hooks.patches import replace


def modules_that_know_of_backward() -> list[ModuleType]:
    """Each has a variable ``_in_fabric_backward`` (fabric/wrappers.py)."""
    return _imported("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """``LightningModule.log`` does nothing."""
    with contextlib.ExitStack() as stack:
        for each in _imported("lightning.pytorch.core.module", "pytorch_lightning.core.module"):
            stack.callback(replace(each.LightningModule, "log", lambda *_, **__: None))
        yield


def _imported(*names: str) -> list[ModuleType]:
    return [sys.modules[name] for name in names if name in sys.modules]
