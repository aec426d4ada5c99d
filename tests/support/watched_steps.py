"""Steps of a training loop under nanlocator.watch."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanlocator


def verdict_of_steps(
    watched: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    corrupt: Callable[[], None] = lambda: None,
    steps: int = 2,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """The verdict on the first bad step, or None if all are healthy. ``loss()`` computes a step's loss,
    seeded with the step's number; ``corrupt()`` runs before each update. nanlocator is removed afterwards."""
    optimizer = optimizer or torch.optim.AdamW(watched.parameters(), lr=1e-3)
    watch = nanlocator.watch(watched, optimizer, **options)
    try:
        for step in range(steps):
            torch.manual_seed(step)
            loss().backward()
            corrupt()
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


def verdict_of_loop(
    models: nn.Module | list[nn.Module], compute: Callable[[int], None], steps: int = 3
) -> dict[str, Any]:
    """The verdict on the bad step, which must occur; ``compute(step)`` runs forward and backward."""
    held = [p for each in (models if isinstance(models, list) else [models]) for p in each.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1)
    watch = nanlocator.watch(models, optimizer)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
            for step in range(steps):
                compute(step)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watch.remove()
    return raised.value.verdict


def verdict_of_closure(
    optimizer: nanlocator.LocatingOptimizer, loss: Callable[[], torch.Tensor], steps: int = 1
) -> dict[str, Any] | None:
    """The verdict on the first bad step, or None; each step's closure computes ``loss()``."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        computed = loss()
        computed.backward()
        return computed

    try:
        for _ in range(steps):
            optimizer.step(closure)
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    return None


class Raises:
    """Raises when its class is read, like the proxy of a context that has ended."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("out of context")


def as_code_says(name: str) -> str:
    """The name in code objects of a function with this qualified name: Python 3.10 keeps only the last
    part."""
    return name if sys.version_info >= (3, 11) else name.rpartition(".")[2]


def line_of(file: Path, text: str) -> int:
    """The number of the only line of ``file`` that contains ``text``."""
    (number,) = (i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)
    return number
