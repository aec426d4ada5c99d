"""Functional collectives, such as DTensor's, which return a new tensor
(torch/distributed/_functional_collectives.py). Torch's operators call the process group in C++, not through a
method of ``ProcessGroup``.

The operators are wrapped in their namespaces, where Python looks them up at each call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_WAIT = "_c10d_functional.wait_tensor"


class Follower(Protocol):
    def begin_collective(
        self, group: ProcessGroup, operator: str, sent: Any, *, has_unseen_backward: bool
    ) -> int | None:
        """Called before a collective. Returns the argument for ``end_collective``; None if the collective is
        not followed. ``has_unseen_backward``: C++ exchanges its gradients."""

    def was_issued(self, group: ProcessGroup, crossing: int | None) -> None:
        """The collective's call has returned. ``crossing``: of ``begin_collective``."""

    def end_collective(self, crossing: int, received: Any) -> None:
        """The program has waited for it."""


@dataclasses.dataclass
class _UnderWay:
    crossing: int
    received: list[torch.Tensor]
    awaited: int


class FunctionalCollectives:
    """Shows functional collectives to ``follower`` until ``remove``."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._under_way: dict[int, _UnderWay] = {}  # by address, unique while the tensor is kept
        self._patches = Patches(__name__)
        for name, point in points.FUNCTIONAL.items():
            self._patches.wrap(point, self._waited if name == _WAIT else self._collective(name))

    @property
    def lost(self) -> list[str]:
        return self._patches.lost

    def remove(self) -> None:
        self._patches.remove()
        self.forget()

    def forget(self) -> None:
        """Forgets the collectives that the program has not waited for."""
        self._under_way.clear()

    def _collective(self, name: str) -> Callable[..., Any]:
        """A wrapper. The operator's first argument is the sent tensors, its last one the group's name."""
        operator = name.replace(".", "::")
        is_of_autograd = "_autograd." in name

        def call(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if not args or not isinstance(args[-1], str):
                return inner(*args, **kwargs)
            name_of_group: Any = args[-1]  # newer versions of torch have a type for it
            group = _distributed_c10d._resolve_process_group(name_of_group)
            crossing = self._follower.begin_collective(
                group, operator, args[0], has_unseen_backward=is_of_autograd
            )
            result = inner(*args, **kwargs)
            self._follower.was_issued(group, crossing)
            if crossing is not None:
                received = _C.tensors_in(result)
                under_way = _UnderWay(crossing, received, len(received))
                self._under_way |= {tensor.data_ptr(): under_way for tensor in received}
            return result

        return call

    def _waited(self, inner: Any, tensor: torch.Tensor) -> Any:
        result = inner(tensor)
        under_way = self._under_way.pop(tensor.data_ptr(), None) if self._under_way else None
        if under_way is not None:
            under_way.awaited -= 1
            if under_way.awaited == 0:
                self._follower.end_collective(under_way.crossing, under_way.received)
        return result
