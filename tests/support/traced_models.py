"""One training step under the operator trace."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks


def traced_step(
    model: nn.Module, step: Callable[[], torch.Tensor], *, with_modules: bool = True, **options: Any
) -> Any:
    """Runs ``step`` (forward and backward; returns the loss) under a trace; returns its Explanation."""
    with _C.OperatorTrace(**options) as trace:
        declare(trace, model)
        trace.begin_pass()
        if with_modules:
            with ModuleHooks(model):
                loss = step()
        else:
            loss = step()
        return trace.explain([("loss", loss)], gradients(model))


def declare(trace: Any, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        trace.declare(parameter, "parameter", name)
    for name, buffer in model.named_buffers():
        trace.declare(buffer, "buffer", name)


def gradients(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
