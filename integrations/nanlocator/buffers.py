"""The models' buffers, which a step moves and a re-run of it must find as they were."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanlocator.modules import local_part

_MOST_BYTES = 1 << 24  # of an attribute that is kept while a step runs: larger ones are results


class Buffers:
    """The engine puts back what a pass has written into one (step/step_state.hpp). This, a state of
    ``StepDriver.add_state``, puts one back in whose place a pass has put another (``self.average = 0.9 *
    self.average + ...``). So it does with tensors that modules hold as plain attributes; what is written into
    these stays."""

    def __init__(self) -> None:
        # Shown name, where it is held, under which key.
        self._registered: list[tuple[str, dict[str, Any], str]] = []
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self._kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """``modules``: all of them, and how each is shown."""
        self._registered, self._attributes, self._kept = [], [], []
        for path, module in modules:
            buffers, attributes = module._buffers, vars(module)
            self._registered += [(f"{path}.{key}" if path else key, buffers, key) for key in buffers.keys()]
            self._attributes += [(attributes, key) for key in attributes if is_kept_state(attributes[key])]

    def now(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, local_part(tensor))
            for name, held, key in self._registered
            if (tensor := _held(held, key)) is not None
        ]

    def save(self) -> None:
        places = [(held, key) for _, held, key in self._registered]
        self._kept = [(held, key, tensor) for held, key in places if (tensor := _held(held, key)) is not None]
        self._kept += [
            (held, key, tensor) for held, key in self._attributes if is_kept_state(tensor := _held(held, key))
        ]

    def restore(self) -> None:
        for held, key, tensor in self._kept:
            held[key] = tensor


def _held(held: dict[str, Any], key: str) -> Any:
    return held[key] if key in held else None  # a ScriptModule's has no get


def is_kept_state(value: Any) -> bool:
    """Not a view: FullyShardedDataParallel lets modules hold views of memory that comes and goes."""
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.device.type in ("cpu", "cuda")
        and value.layout is torch.strided
        and value.nbytes == value.untyped_storage().nbytes() <= _MOST_BYTES
    )
