"""FSDP1 (``FullyShardedDataParallel``): a rank's parts of the original parameters, and its own gradients.

A flat parameter holds several parameters in a row; a rank keeps a contiguous part of it
(torch/distributed/fsdp/_flat_param.py, FlatParamHandle). With ``use_orig_params``, the optimizer has the
original parameters, whose memory is this rank's part of them; else it has the flat parameters. The whole
gradient of a flat parameter is in its ``.grad`` when ``_post_backward_hook`` calls ``_reduce_grad``, which it
looks up in its module (_runtime_utils.py).
"""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanlocator.calls.modules import shown
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.sharding.own_gradients import LocalScans
from nanlocator.sharding.shards import Part

# Scan groups; other code numbers its groups from 0.
_GROUPS = 1 << 23


def wrapper_class() -> type[Any] | None:
    """FullyShardedDataParallel, if the program has imported it."""
    api = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return api.FullyShardedDataParallel if api is not None else None


def handles_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The FlatParamHandle of each FullyShardedDataParallel in ``module``, with the path of its module."""
    if (fully_sharded := wrapper_class()) is None:
        return
    for path, each in module.named_modules():
        if isinstance(each, fully_sharded) and each._handle is not None:
            yield path, each._handle


def sharded_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer may hold, even while ``module`` holds whole parameters instead."""
    for _, handle in handles_of(module):
        yield handle.flat_param
        yield from handle.flat_param._params or ()


def parts_of(module: nn.Module) -> Iterator[Part]:
    """The parts of ``module``'s parameters. With ``use_orig_params``, one for each of the optimizer's
    tensors, else several for each."""
    for path, handle in handles_of(module):
        yield from _parts_of(path, handle)


def switches_of(module: nn.Module) -> list[tuple[Callable[[], Any], tuple[str, ...]]]:
    """See ``nanlocator.state.switches``."""
    if (fully_sharded := wrapper_class()) is None:
        return []
    return [
        (itself(each), ("_sync_gradients",)) for each in module.modules() if isinstance(each, fully_sharded)
    ]


def itself(owner: Any) -> Callable[[], Any]:
    return lambda: owner


class WholeGradients:
    """Scans each rank's gradients before FullyShardedDataParallel reduces them.

    Args:
        numbers: ids of the managed parameters, by the optimizer's tensor (in order, if it holds several).
        modules: the models.
    """

    def __init__(
        self, numbers: dict[torch.Tensor, list[int]], modules: Iterable[nn.Module], scans: LocalScans
    ) -> None:
        self._scans = scans
        self._numbers: weakref.WeakKeyDictionary[Any, list[int | None]] = weakref.WeakKeyDictionary()
        for module in modules:
            for _, handle in handles_of(module):
                flat = handle.flat_param
                of_originals = [numbers.get(p, [None])[0] for p in flat._params or ()]
                unknown: list[int | None] = [None] * flat._num_params
                self._numbers[handle] = of_originals or list(numbers.get(flat, unknown))
        self._patches = Patches(__name__)
        this = weakref.ref(self)  # dropping a driver without `remove` leaves the wrapper installed

        def reduce(original: Callable[..., Any], state: Any, handle: Any) -> Any:
            found = this()
            if found is None:
                return original(state, handle)
            found._scan(handle)
            with found._exchanging(handle, reduces_gradients=True):
                return original(state, handle)

        def gather(original: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
            found = this()
            if found is None:
                return original(handle, *args, **kwargs)
            with found._exchanging(handle, reduces_gradients=False):
                return original(handle, *args, **kwargs)

        self._patches.wrap(points.FSDP1_REDUCE, reduce)
        self._patches.wrap(points.FSDP1_REDUCE_WHOLE, reduce)
        self._patches.wrap(points.FSDP1_GATHER, gather)
        for lost in self._patches.lost:
            scans.say_uncovered(lost)

    def remove(self) -> None:
        self._patches.remove()
        self._numbers.clear()

    def begin_step(self) -> None:
        pass

    def _exchanging(self, handle: Any, *, reduces_gradients: bool) -> Any:
        ids = (number for number in self._numbers.get(handle, ()) if number is not None)
        return self._scans.exchanging(ids, reduces_gradients=reduces_gradients)

    def _scan(self, handle: Any) -> None:
        numbers = self._numbers.get(handle)
        if numbers is None or not self._scans.are_on("FullyShardedDataParallel"):
            return
        flat = handle.flat_param
        gradient = flat.grad.detach()
        found = [
            (number, gradient[begin : begin + numel])
            for number, begin, numel in zip(numbers, _offsets_of(flat), flat._numels, strict=True)
            if number is not None
        ]
        if found:
            self._scans.scan(_GROUPS + found[0][0], found)


def _offsets_of(flat: Any) -> list[int]:
    """The offset of each original parameter in the whole flat parameter, which contains padding."""
    ends = itertools.accumulate(flat._numels_with_padding)
    begins = [end - numel for end, numel in zip(ends, flat._numels_with_padding, strict=True)]
    return [b for b, is_padding in zip(begins, flat._is_padding_mask, strict=True) if not is_padding]


def _names_of(path: str, handle: Any) -> list[str]:
    return [shown(f"{path}.{name}" if path else name) for name in handle.flat_param._fqns]


def _parts_of(path: str, handle: Any) -> Iterator[Part]:
    flat = handle.flat_param
    is_sharded = handle.uses_sharded_strategy
    group = dist.get_process_group_ranks(handle.process_group) if is_sharded else []
    for index, (name, shape) in enumerate(zip(_names_of(path, handle), flat._shapes, strict=True)):
        part = Part(flat if flat._params is None else flat._params[index], list(shape), name=name)
        part.reduce_dtype = handle._reduce_dtype
        info = flat._shard_param_infos[index]
        if is_sharded and len(group) > 1:
            part.shard_group = group
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            part.shard = (first, last + 1) if info.in_shard else (0, 0)
        if flat._params is None:
            begin = info.offset_in_shard if info.in_shard else 0
            part.view = functools.partial(_stretch, begin, info.numel_in_shard if info.in_shard else 0)
        yield part


def _stretch(begin: int, numel: int, flat: torch.Tensor) -> torch.Tensor:
    return flat.detach()[begin : begin + numel]
