"""Each rank's own gradients, before DistributedDataParallel reduces them.

A parameter's hook runs in AccumulateGrad::apply, before the hook of DistributedDataParallel that marks the
parameter as ready (torch/csrc/autograd/functions/accumulate_grad.cpp, reducer.cpp). ``.grad`` is then this
rank's own, whether or not a communication hook, views into buckets or a static graph follow.
DistributedDataParallel itself is unchanged: a communication hook of ours would change its arithmetic.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nanlocator.calls.modules import local_part
from nanlocator.exchange.buffer_broadcasts import shows_broadcasts
from nanlocator.sharding.own_gradients import LocalScans

# Scan groups; other code numbers its groups from 0.
_AT_THE_END = 1 << 20
_ONE_BY_ONE = _AT_THE_END + 1


class LocalGradients:
    """Scans each parameter's gradient in the first backward of a step that reduces it. After that, ``.grad``
    contains other ranks' gradients, so later backwards are scanned by the gradient that they add.

    Args:
        parameters: by their ids.
    """

    def __init__(self, parameters: dict[int, torch.Tensor], scans: LocalScans) -> None:
        self._parameters = parameters
        self._scans = scans
        self._modules: dict[int, Callable[[], DistributedDataParallel | None]] | None = None  # by parameter
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # all wrappers
        self._reduced: set[int] = set()  # ids of the parameters that were reduced in this step
        self._ready: list[tuple[int, torch.Tensor]] = []  # to be scanned when backward ends
        this = weakref.ref(self)  # autograd keeps the hooks
        self._handles = [
            handle
            for number, parameter in parameters.items()
            if parameter.requires_grad and parameter.is_leaf
            for handle in (
                parameter.register_hook(_calling(this, LocalGradients._is_added, number)),
                parameter.register_post_accumulate_grad_hook(
                    _calling(this, LocalGradients._is_accumulated, number)
                ),
            )
        ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> None:
        """Called when the gradients are zero or None."""
        self._reduced.clear()
        self._ready.clear()
        self._say_unseen()

    def _is_added(self, number: int, gradient: torch.Tensor) -> None:
        """Called with one backward's gradient before it is added to ``.grad``."""
        if number in self._reduced:
            self._scan(_ONE_BY_ONE + number, [(number, gradient)])

    def _is_accumulated(self, number: int, parameter: torch.Tensor) -> None:
        if number in self._reduced:
            return
        module = self._module_of(number)
        if module is None:
            self._scans.say_uncovered("gradients before the program itself reduces them across ranks")
            return
        if not self._scans.are_on("DistributedDataParallel"):
            return
        if not module.require_backward_grad_sync:
            return
        self._reduced.add(number)
        # Scanned at once. A view into a bucket is reduced as soon as the bucket's last gradient is ready;
        # with a static graph, all are reduced at the end of the first backward, before any callback queued
        # now.
        if module.gradient_as_bucket_view or module.static_graph:
            self._scan(_ONE_BY_ONE + number, [(number, parameter.grad)])
            return
        if not self._ready:  # before DistributedDataParallel queues its callback, which copies the sums back
            torch.autograd.Variable._execution_engine.queue_callback(self._scan_ready)
        self._ready.append((number, parameter))

    def _scan_ready(self) -> None:
        ready, self._ready = self._ready, []
        self._scan(_AT_THE_END, [(number, parameter.grad) for number, parameter in ready])

    def _scan(self, group: int, gradients: list[tuple[int, torch.Tensor | None]]) -> None:
        self._scans.scan(group, [(n, local_part(g)) for n, g in gradients if g is not None])

    def _module_of(self, number: int) -> DistributedDataParallel | None:
        """The live wrapper that reduces this parameter; if there are several, the latest."""
        module = self._modules[number]() if self._modules is not None else None
        if module is None and (self._modules is None or self._modules[number] is not _NONE):
            self._modules = self._find_modules()
            module = self._modules[number]()
        return module

    def _say_unseen(self) -> None:
        for module in self._wrappers:
            if not shows_broadcasts(module):
                self._scans.exchange_unseen(module.process_group)

    def _find_modules(self) -> "dict[int, Callable[[], DistributedDataParallel | None]]":
        reducing = {
            parameter: weakref.ref(each)
            for each in gc.get_objects()
            if issubclass(type(each), DistributedDataParallel)
            for parameter in each._module_parameters
        }
        self._wrappers = weakref.WeakSet(each for find in reducing.values() if (each := find()))
        self._say_unseen()
        return {n: reducing.get(parameter, _NONE) for n, parameter in self._parameters.items()}


def _NONE() -> None:
    """A reference to nothing."""


def _calling(this: "weakref.ref[LocalGradients]", method: Callable[..., None], number: int) -> Any:
    def hook(tensor: torch.Tensor) -> None:
        found = this()
        if found is not None:
            method(found, number, tensor)

    return hook
