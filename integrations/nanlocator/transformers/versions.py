"""Where versions of transformers differ."""

from typing import Any

import torch


def summed_loss(trainer: Any) -> torch.Tensor | None:
    """What the Trainer has summed up since it logged a loss. None before transformers 5, where it is a local
    variable of its loop: where earlier microbatches of a step come out otherwise in a re-run, the log keeps
    their first losses."""
    return getattr(trainer, "_tr_loss", None)
