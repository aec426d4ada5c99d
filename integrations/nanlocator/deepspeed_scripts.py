"""Installs nanlocator on the engines that a script makes with ``deepspeed.initialize``.

Unlike ``nanlocator.deepspeed``, this does not import DeepSpeed, which most programs do not have.
"""

import functools
import sys
from types import ModuleType
from typing import Any

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator_after_import import AfterImport


@functools.cache
def follow() -> None:
    """Installs nanlocator on the engines that ``deepspeed.initialize`` makes. Once per process."""
    AfterImport({"deepspeed": _wrap_initialize})


def _wrap_initialize(deepspeed: ModuleType) -> None:
    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        engine = made[0]
        if getattr(engine, "optimizer", None) is None:  # inference
            return made
        from nanlocator.deepspeed import install

        try:
            install(engine)
        except (_C.Error, OSError) as error:
            print(f"nanlocator: not attached: {error}", file=sys.stderr, flush=True)
        return made

    Patches(__name__).wrap(points.INITIALIZE, initialize, of=deepspeed)
