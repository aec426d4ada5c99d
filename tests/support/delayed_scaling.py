"""Delayed scaling like TransformerEngine's, on the CPU: per tensor a scale and a history of maxima, in plain
attributes of the modules, listed by FP8GlobalStateManager and updated by every forward.

``install(layout, patch)`` puts the manager under the name and with the attributes of that release:
"2.5" (transformer_engine.pytorch.fp8, class attributes), "head" (transformer_engine.pytorch.quantization,
``quantization_state``).
"""

import sys
import types

import torch
from torch import nn

FP8_MAX = 448.0  # the largest float8_e4m3fn; an overflow gives NaN


class _State:
    def __init__(self) -> None:
        self.global_amax_buffer: dict[str, list] = {}
        self.global_amax_history_buffer: dict[str, list] = {}
        self.global_scale_buffer: dict[str, list] = {}


def install(layout, monkeypatch):
    """Returns the state with which the modules below register."""
    state = _State()
    if layout == "head":
        name, manager = "quantization", type("FP8GlobalStateManager", (), {"quantization_state": state})
    else:
        name, manager = "fp8", type("FP8GlobalStateManager", (), dict(vars(state)))
    module = types.ModuleType(f"transformer_engine.pytorch.{name}")
    module.FP8GlobalStateManager = manager
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return state


class _Meta:
    def __init__(self, history: int) -> None:
        self.scale = torch.ones(1)
        self.amax_history = torch.zeros(history, 1)


class ScaledLinear(nn.Linear):
    """Casts its input with the scale from the preceding steps."""

    def __init__(self, inputs: int, outputs: int, state: _State) -> None:
        super().__init__(inputs, outputs)
        self.state = state
        self.fp8_meta: dict[str, _Meta] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fp8_meta:
            meta = self.fp8_meta["scaling_fwd"] = _Meta(history=4)
            self.state.global_scale_buffer.setdefault("forward", []).append(meta.scale)
            self.state.global_amax_history_buffer.setdefault("forward", []).append(meta.amax_history)
            self.state.global_amax_buffer.setdefault("forward", []).append(meta.amax_history[0])
        meta = self.fp8_meta["scaling_fwd"]
        cast = (x * meta.scale).to(torch.float8_e4m3fn).to(x.dtype) / meta.scale
        with torch.no_grad():
            meta.amax_history[0].copy_(torch.maximum(meta.amax_history[0], x.detach().abs().max()))
            self._update(meta)
        return super().forward(cast)

    @staticmethod
    def _update(meta: _Meta) -> None:
        """Like _amax_and_scale_update: in place."""
        meta.scale.copy_(FP8_MAX / meta.amax_history.max())
        meta.amax_history.copy_(torch.roll(meta.amax_history, -1, 0))
        meta.amax_history[0].zero_()
