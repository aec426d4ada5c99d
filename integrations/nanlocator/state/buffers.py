"""The models' buffers, which a step moves and a re-run of it must find as they were."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanlocator.calls.modules import local_part


class Buffers:
    """The engine puts back what a pass has written into one (step/step_state.hpp). This, a state of
    ``StepDriver.add_state``, puts one back in whose place a pass has put another (``self.average = 0.9 *
    self.average + ...``), and None where there was none yet."""

    def __init__(self) -> None:
        # Shown name, where it is held, under which key.
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._kept: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """``modules``: all of them, and how each is shown."""
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


def _held(held: dict[str, Any], key: str) -> Any:
    return held[key] if key in held else None  # a ScriptModule's has no get
