"""Checkpoints of small models, and what a check of one says."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nanlocator import check_checkpoint


def trained(layers: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of ``layers`` after one step of AdamW, so that the optimizer has states."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def found(path: str | Path, **options) -> set[tuple[str, str, tuple[int, ...] | None]]:
    """(kind, tensor, first bad index) of each finding in the first checkpoint."""
    report = check_checkpoint(path, **options)
    assert not report.problem, report.problem
    return {
        (each.kind, each.tensor.name, each.tensor.statistics.first_bad)
        for each in report.checkpoints[0].findings
    }


def contents(path: str | Path, **options) -> tuple[str, str]:
    """What is known of the weights and of the optimizer."""
    (first, *_) = check_checkpoint(path, **options).checkpoints
    return first.contents["weights"].value, first.contents["optimizer"].value


def flip(path: Path, change: Callable[[bytearray], None]) -> None:
    """Rewrites the file after ``change``."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
