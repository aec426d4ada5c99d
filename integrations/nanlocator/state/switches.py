"""Settings of parallel modules that a program changes during a step: whether this backward reduces gradients
(``no_sync``, ``set_requires_gradient_sync``), whether parameters stay whole after it, which method of the
inner module runs (Lightning's strategies: ``training_step`` replaces ``forward`` for a call), whether a
backward is the framework's own. A re-run restores them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nanlocator.sharding import fsdp1, fsdp2
from nanlocator.state import lightning_steps

# A function that returns the owner, and names of its attributes. A function, because some owners are shared
# only from the first forward on.
Places = list[tuple[Callable[[], Any], tuple[str, ...]]]

_ABSENT = object()  # its owner has no attribute of this name


class Switches:
    """Reads the switches (``now``) and sets them again (``set``)."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def add(self, owner: Any, names: tuple[str, ...]) -> None:
        """Adds switches that a framework keeps elsewhere."""
        self._places.append((fsdp1.itself(owner), names))

    def now(self) -> list[Any]:
        return [vars(owner()).get(name, _ABSENT) for owner, names in self._places for name in names]

    def set(self, values: list[Any]) -> None:
        remaining = iter(values)
        for owner, names in self._places:
            for name in names:
                value = next(remaining)
                if vars(owner()).get(name, _ABSENT) is value:
                    continue
                if value is _ABSENT:
                    delattr(owner(), name)
                else:
                    setattr(owner(), name, value)


def switches_of(module: nn.Module) -> Switches:
    """The switches of all modules in ``module``."""
    places = [(fsdp1.itself(each), ("forward",)) for each in _wrapped_by(module)]
    places += [
        (fsdp1.itself(each), ("_in_fabric_backward",))
        for each in lightning_steps.modules_that_know_of_backward()
    ]
    places += [
        (fsdp1.itself(each), ("require_backward_grad_sync",))
        for each in module.modules()
        if isinstance(each, DistributedDataParallel)
    ]
    return Switches(places + fsdp2.switches_of(module) + fsdp1.switches_of(module))


def _wrapped_by(module: nn.Module) -> Iterator[nn.Module]:
    """``module``, and the chain of modules that are each the only child of the one before."""
    children = [module]
    while len(children) == 1:
        yield children[0]
        children = list(children[0].children())
