"""What a program tells parallel modules beside their arguments: whether gradients are reduced in this
backward (``no_sync``, ``set_requires_gradient_sync``), whether parameters are kept whole after it. A step
that is executed again finds them as they were."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nanlocator import fsdp1, fsdp2

# Whose, and the names of their attributes. A function, as some are shared only from the first forward on.
Places = list[tuple[Callable[[], Any], tuple[str, ...]]]


class Switches:
    """``now`` reads them, ``set`` sets them again."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def now(self) -> list[Any]:
        return [getattr(owner(), name, None) for owner, names in self._places for name in names]

    def set(self, values: list[Any]) -> None:
        remaining = iter(values)
        for owner, names in self._places:
            for name in names:
                value = next(remaining)
                if getattr(owner(), name, value) is not value:
                    setattr(owner(), name, value)


def switches_of(module: nn.Module) -> Switches:
    """Of all modules in it."""
    places: Places = [
        (lambda owner=each: owner, ("require_backward_grad_sync",))
        for each in module.modules()
        if isinstance(each, DistributedDataParallel)
    ]
    return Switches(places + fsdp2.switches_of(module) + fsdp1.switches_of(module))
