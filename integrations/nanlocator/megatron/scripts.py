"""Installs nanlocator on the model of a Megatron script as soon as it exists.

Two functions are wrapped as soon as their modules have been imported: Megatron-LM's
``setup_model_and_optimizer``, and Megatron-Core's ``get_megatron_optimizer`` for scripts with their own
training loop. This module must not import Megatron, because it runs in the middle of Megatron's own imports.
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
    """Installs the hooks once per process."""
    return Installer()


class Installer:
    """Wraps two functions as soon as their modules have been loaded, before other modules can import them by
    name."""

    def __init__(self) -> None:
        self.is_installed = False
        self._is_in_setup = False  # Megatron-LM loads the checkpoint after it has made the optimizer
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
