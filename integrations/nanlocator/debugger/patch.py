"""``patch()``: transformers' own ``--debug underflow_overflow`` uses this package's debugger."""

import importlib
from typing import Any

from torch import nn

from nanlocator.debugger.debug import DebugUnderflowOverflow
from nanlocator.debugger.detect import detect_overflow, get_abs_min_max
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_active: "Patch | None" = None


def patch() -> "Patch":
    """From now on ``TrainingArguments(debug="underflow_overflow")`` and ``transformers.debug_utils`` use
    nanlocator's ``DebugUnderflowOverflow``, ``detect_overflow`` and ``get_abs_min_max``.

        nanlocator.transformers.patch()            # for the rest of the process
        with nanlocator.transformers.patch(): ...  # for a while

    Call it before ``trainer.train()``. A module that has imported the names from ``transformers.debug_utils``
    already keeps the original ones. While a patch is active, a second call returns it.

    Raises:
        ImportError: transformers, or a package that its Trainer needs, cannot be imported.
    """
    global _active
    if _active is None:
        _active = Patch()
    return _active


class Patch:
    """Returned by ``patch``. ``remove()`` restores the original names and removes the hooks of the debuggers
    that Trainers have made. Also a context manager that calls it at the end."""

    def __init__(self) -> None:
        try:
            importlib.import_module("transformers.trainer")
        except ImportError as error:
            raise ImportError(
                f"patch() needs transformers' Trainer, which cannot be imported ({error}): "
                "pip install transformers accelerate"
            ) from error
        self._debuggers: dict[nn.Module, DebugUnderflowOverflow] = {}
        self._patches = Patches(__name__)
        self._patches.put(points.DEBUGGER["trainer.DebugUnderflowOverflow"], self._debug_trained_model)
        for ours in (DebugUnderflowOverflow, detect_overflow, get_abs_min_max):
            self._patches.put(points.DEBUGGER[f"debug_utils.{ours.__name__}"], ours)

    def _debug_trained_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> DebugUnderflowOverflow:
        """``Trainer.train`` makes a debugger at each call and keeps none; this makes one per model."""
        if (earlier := self._debuggers.pop(model, None)) is not None:
            earlier.remove()
        debugger = self._debuggers[model] = DebugUnderflowOverflow(model, *args, **kwargs)
        return debugger

    def remove(self) -> None:
        """May be called twice. A name that other code has replaced since stays."""
        global _active
        self._patches.remove()
        for debugger in self._debuggers.values():
            debugger.remove()
        self._debuggers.clear()
        if _active is self:
            _active = None

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
