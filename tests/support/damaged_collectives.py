"""Collectives whose result on one rank differs from the inputs' correct result."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch._C._distributed_c10d import ProcessGroup, _create_work_from_future
from torch.futures import Future

# Methods that torch.distributed calls instead, from torch 2.13 on.
_NEWER = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}


def methods_of(*names: str) -> list[str]:
    """The names of ProcessGroup's methods in this torch, which may have either of two."""
    both = [each for name in names for each in (name, _NEWER.get(name, name))]
    return [name for name in dict.fromkeys(both) if hasattr(ProcessGroup, name)]


@contextlib.contextmanager
def damaged(
    names: tuple[str, ...],
    is_now: Callable[[], bool],
    spoil: Callable[[torch.Tensor], None],
    *,
    once: bool = False,
    more_than: int = 8,
) -> Iterator[None]:
    """Calls `spoil` with the first tensor that these methods of ProcessGroup return, if it has more than
    `more_than` elements: each time while `is_now()`, or only `once`. Wrappers that a rank has already
    installed see the undamaged result; later ones see the damaged one."""
    left = [None]

    def through(inner: Callable[..., object]) -> Callable[..., object]:
        def method(group: ProcessGroup, output: object, *args: object, **kwargs: object) -> object:
            work = inner(group, output, *args, **kwargs)
            first = output
            while not isinstance(first, torch.Tensor):
                first = first[0]
            is_large = first.is_floating_point() and first.numel() > more_than
            if not (left and is_large and is_now()):
                return work
            if once:
                left.clear()
            if work is not None:
                work.wait()
            spoil(first)
            return _done()  # a second wait of gloo would copy the result again

        return method

    with contextlib.ExitStack() as stack:
        for name in methods_of(*names):
            inner = getattr(ProcessGroup, name)
            stack.enter_context(mock.patch.object(ProcessGroup, name, through(inner)))
        yield


def _done() -> object:
    future: Future = Future()
    future.set_result(None)
    return _create_work_from_future(future)
