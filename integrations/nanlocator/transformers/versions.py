"""Differences between versions of transformers."""

from typing import Any

import torch


def summed_loss(trainer: Any) -> torch.Tensor | None:
    """The Trainer's sum of losses since it last logged. None before transformers 5, where it is a local
    variable of the Trainer's loop: there the log keeps the first losses if earlier microbatches give others
    in a re-run."""
    return getattr(trainer, "_tr_loss", None)
