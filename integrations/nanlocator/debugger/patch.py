"""``patch()``: transformers' own ``--debug underflow_overflow`` with this package's debugger."""

import importlib
from typing import Any

from torch import nn

from nanlocator.debugger.debug import DebugUnderflowOverflow
from nanlocator.debugger.detect import detect_overflow, get_abs_min_max

_active: "Patch | None" = None


def patch() -> "Patch":
    """From now on ``TrainingArguments(debug="underflow_overflow")`` and ``transformers.debug_utils`` use
    nanlocator's ``DebugUnderflowOverflow``, ``detect_overflow`` and ``get_abs_min_max``.

        nanlocator.transformers.patch()            # for the rest of the process
        with nanlocator.transformers.patch(): ...  # for a while

    Call it before ``trainer.train()``. A module that has imported the names from ``transformers.debug_utils``
    already keeps the original ones. While it is in force a second call returns the same ``Patch``.

    Raises:
        ImportError: transformers, or what its Trainer needs, cannot be imported.
    """
    global _active
    if _active is None:
        _active = Patch()
    return _active


class Patch:
    """What ``patch`` returns: ``remove()`` restores the original names and removes the hooks of the debuggers
    that Trainers have made. A context manager that calls it at the end."""

    def __init__(self) -> None:
        try:
            trainer = importlib.import_module("transformers.trainer")
            debug_utils = importlib.import_module("transformers.debug_utils")
        except ImportError as error:
            raise ImportError(
                f"patch() changes transformers' Trainer, which cannot be imported ({error}): "
                "pip install transformers accelerate"
            ) from error
        self._debuggers: dict[nn.Module, DebugUnderflowOverflow] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, original, ours
        self._replace(trainer, "DebugUnderflowOverflow", self._debug_trained_model)
        for ours in (DebugUnderflowOverflow, detect_overflow, get_abs_min_max):
            self._replace(debug_utils, ours.__name__, ours)

    def _replace(self, module: Any, name: str, ours: Any) -> None:
        self._replaced.append((module, name, getattr(module, name), ours))
        setattr(module, name, ours)

    def _debug_trained_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> DebugUnderflowOverflow:
        """``Trainer.train`` makes a debugger each time it is called, and keeps none: one per model."""
        if (earlier := self._debuggers.pop(model, None)) is not None:
            earlier.remove()
        debugger = self._debuggers[model] = DebugUnderflowOverflow(model, *args, **kwargs)
        return debugger

    def remove(self) -> None:
        """May be called twice. A name that someone has replaced since stays as it is."""
        global _active
        while self._replaced:
            module, name, original, ours = self._replaced.pop()
            if getattr(module, name) == ours:
                setattr(module, name, original)
        for debugger in self._debuggers.values():
            debugger.remove()
        self._debuggers.clear()
        if _active is self:
            _active = None

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
