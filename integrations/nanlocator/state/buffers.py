"""The models' buffers, which a step changes and its re-run needs unchanged."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanlocator import _C
from nanlocator.calls.modules import local_part


class Buffers:
    """A state for ``StepDriver.add_state``. The engine restores a buffer that a pass has written to
    (step/step_state.hpp). This class restores a buffer that a pass has replaced by another tensor
    (``self.average = 0.9 * self.average + ...``), or None if there was none yet."""

    def __init__(self) -> None:
        # Shown name, the dictionary that holds it, its key.
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._kept: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """``modules``: all modules, each with its shown path."""
        self._kept = []
        self._places = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in modules
            for key in module._buffers.keys()
        ]

    def now(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, local_part(tensor))
            for name, held, key in self._places
            if (tensor := _held(held, key)) is not None
        ]

    def save(self) -> None:
        self._kept = [(held, key, _held(held, key)) for _, held, key in self._places if key in held]

    def restore(self) -> None:
        for held, key, tensor in self._kept:
            held[key] = tensor

    def put_back_bad(self) -> None:
        """After a step that is left out: buffers that it has replaced by bad ones. Waits for the device."""
        for held, key, tensor in self._kept:
            now = _held(held, key)
            if tensor is not None and now is not tensor and now is not None and _is_bad(now):
                held[key] = tensor


def _is_bad(tensor: torch.Tensor) -> bool:
    stats = _C.scan_one(tensor)
    return stats is not None and not stats.is_finite


def _held(held: dict[str, Any], key: str) -> Any:
    return held[key] if key in held else None  # a ScriptModule's dictionary has no get
