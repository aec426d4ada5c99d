"""Installs nanlocator on what a script of Megatron trains, as soon as it has been made.

Two functions are wrapped the moment their modules have been imported, wherever the script finds them:
Megatron-LM's ``setup_model_and_optimizer``, and Megatron-Core's ``get_megatron_optimizer`` for scripts with a
loop of their own. Nothing of Megatron is imported here: this runs in the middle of its own imports.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator_after_import import AfterImport


@functools.cache
def follow() -> "Installer":
    """Once per process."""
    return Installer()


class Installer:
    """Wraps two functions as soon as their modules have been loaded, before anyone can have imported these
    functions by name."""

    def __init__(self) -> None:
        self.is_installed = False
        self._is_in_setup = False  # of Megatron-LM, which loads the checkpoint after the optimizer is made
        self._patches = Patches(__name__)
        self._wrappers = {
            point.owner: (point, wrapper)
            for point, wrapper in (
                (points.MEGATRON_SETUP, self._around_setup),
                (points.MEGATRON_OPTIMIZER, self._around_get_optimizer),
            )
        }
        AfterImport({name: self._wrap for name in self._wrappers})

    def _wrap(self, module: ModuleType) -> None:
        point, wrapper = self._wrappers[module.__name__]
        self._patches.wrap(point, wrapper, of=module)

    def _around_setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_in_setup = True
        try:
            result = original(*args, **kwargs)  # model chunks, optimizer, scheduler
        finally:
            self._is_in_setup = False
        self._install(result[0], result[1])
        return result

    def _around_get_optimizer(
        self, original: Callable[..., Any], config: Any, model_chunks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        optimizer = original(config, model_chunks, *args, **kwargs)
        if not self._is_in_setup:
            self._install(model_chunks, optimizer)
        return optimizer

    def _install(self, model_chunks: Any, optimizer: Any) -> None:
        if optimizer is None:  # evaluation
            return
        from nanlocator.megatron import install

        install(model_chunks, optimizer)
        self.is_installed = True
