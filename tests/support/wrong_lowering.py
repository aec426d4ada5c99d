"""A planted bug of Inductor: one operator is compiled into another."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def lowered_to_logarithm(operator: torch._ops.OpOverload) -> Iterator[None]:
    """Code compiled in this block computes the logarithm instead of ``operator``, which must have no lowering
    of its own."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import ops

    lowering.register_lowering(operator)(lowering.make_pointwise(lambda x: ops.log(x)))
    try:
        yield
    finally:
        lowering.lowerings.pop(operator)
