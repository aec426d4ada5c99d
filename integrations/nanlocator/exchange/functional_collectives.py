"""Collectives that return a new tensor (torch/distributed/_functional_collectives.py), as DTensor's are: they
go from torch's operators to the process group in C++, and never through a method of ``ProcessGroup``.

The operators are replaced in their namespaces, where Python looks them up for each call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup

from nanlocator import _C
from nanlocator.hooks.patches import replace

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_OPERATORS = (  # that take what is sent first, and the group's name last
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
)


class Follower(Protocol):
    def begin_collective(
        self, group: ProcessGroup, operator: str, sent: Any, *, has_unseen_backward: bool
    ) -> int | None:
        """Called before it; returns what ``end_collective`` takes, None for one that is not followed.
        ``has_unseen_backward``: C++ exchanges its gradients."""

    def end_collective(self, crossing: int, received: Any) -> None:
        """The program has waited for it."""


@dataclasses.dataclass
class _UnderWay:
    crossing: int
    received: list[torch.Tensor]
    awaited: int


class FunctionalCollectives:
    """Shows them to ``follower`` until ``remove``."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._under_way: dict[int, _UnderWay] = {}  # by address, which nobody else's is meanwhile
        self._undo: list[Callable[[], None]] = []
        for namespace in _NAMESPACES:
            operators = getattr(torch.ops, namespace)
            for name in _OPERATORS:
                if hasattr(operators, name):
                    followed = self._collective(namespace, name, getattr(operators, name))
                    self._undo.append(replace(operators, name, followed))
        operators = torch.ops._c10d_functional
        inner = operators.wait_tensor
        self._undo.append(replace(operators, "wait_tensor", _Operator(inner, self._waited(inner))))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.forget()

    def forget(self) -> None:
        """Those that nobody has waited for."""
        self._under_way.clear()

    def _collective(self, namespace: str, name: str, inner: Any) -> "_Operator":
        def call(*args: Any, **kwargs: Any) -> Any:
            crossing = None
            if args and isinstance(args[-1], str):
                name_of_group: Any = args[-1]  # in new versions of torch a type of its own
                crossing = self._follower.begin_collective(
                    _distributed_c10d._resolve_process_group(name_of_group),
                    f"{namespace}::{name}",
                    args[0],
                    has_unseen_backward=namespace.endswith("_autograd"),
                )
            result = inner(*args, **kwargs)
            if crossing is not None:
                received = _C.tensors_in(result)
                under_way = _UnderWay(crossing, received, len(received))
                self._under_way |= {tensor.data_ptr(): under_way for tensor in received}
            return result

        return _Operator(inner, call)

    def _waited(self, inner: Any) -> Callable[[torch.Tensor], Any]:
        def wait_tensor(tensor: torch.Tensor) -> Any:
            result = inner(tensor)
            under_way = self._under_way.pop(tensor.data_ptr(), None) if self._under_way else None
            if under_way is not None:
                under_way.awaited -= 1
                if under_way.awaited == 0:
                    self._follower.end_collective(under_way.crossing, under_way.received)
            return result

        return wait_tensor


class _Operator:
    """Stands for an operator of torch; ``call`` is called in its place. Compilers see the operator."""

    def __init__(self, operator: Any, call: Callable[..., Any]) -> None:
        self._operator = operator
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._operator(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)
