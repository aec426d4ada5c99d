"""``guard``: a few lines that must compute no NaN, as in a unit test."""

import contextlib
from collections.abc import Iterator

import torch
from typing_extensions import Unpack  # torch brings it; typing has it from Python 3.11 on

from nanlocator import _C
from nanlocator.engine.options import Options
from nanlocator.loops.watch import Models, Watch, named_models, watch


@contextlib.contextmanager
def guard(model: Models, **options: Unpack[Options]) -> Iterator[Watch]:
    """Raises ``nanlocator.NonFiniteGradientError``, which says where it was born, if what the block computes
    with the model gives NaN or Inf: in gradients, or in values that need a gradient and that a variable still
    holds at its end. Needs no optimizer.

        with nanlocator.guard(model):
            loss = loss_function(model(x), y)
            loss.backward()

    Args:
        model: one or several, as ``nanlocator.watch`` takes them.
        options: see docs/options.md.

    Raises:
        nanlocator.UsageError: if the model has no parameter that needs a gradient, or within a training that
            is watched.
    """
    trained = [p for each in named_models(model).values() for p in each.parameters() if p.requires_grad]
    if not trained:
        raise _C.UsageError("nanlocator.guard needs a model with a parameter that needs a gradient")
    if (now := Watch.latest()) is not None and now.is_on:
        raise _C.UsageError(
            "nanlocator.guard would take the place of the watch that follows this program: call its remove() "
            "first"
        )
    guarding = watch(model, torch.optim.SGD(trained, lr=0.0), **options)
    try:
        yield guarding
        guarding.scan_now()
    finally:
        guarding.remove()
