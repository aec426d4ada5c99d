"""FSDP2 (``fully_shard``, HSDP, ``replicate``): a rank's parts of the parameters, and its own gradients.

All gradients of a group go through ``foreach_reduce(fsdp_params, unsharded_grads, ...)``, which
``FSDPParamGroup.post_backward`` looks up in its module (torch/distributed/fsdp/_fully_shard/
_fsdp_param_group.py, 2.6 to 2.15). ``unsharded_grads`` are this rank's whole gradients, summed over its
microbatches since the last reduction, in their data type before it.
"""

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.sharding.fsdp1 import itself
from nanlocator.sharding.own_gradients import LocalScans
from nanlocator.sharding.shards import Part, is_sharded_over_tp, placements_of

# Scan groups; other code numbers its groups from 0.
_GROUPS = 1 << 22

_OF_GROUP = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "unshard_in_backward",
    "gradient_divide_factor",
)


def fsdp_params(module: nn.Module) -> Iterator[Any]:
    """The FSDPParam of each parameter below ``module`` that ``fully_shard`` manages."""
    for group in _all_groups_of(module):
        yield from group.fsdp_params


def sharded_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer holds, even while ``module`` holds whole parameters instead."""
    return (each.sharded_param for each in fsdp_params(module))


def whole_and_sharded(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(whole parameter, sharded parameter): ``module`` holds the first between forward and backward, if it
    keeps it; the optimizer holds the second."""
    return (
        (each._unsharded_param, each.sharded_param)
        for each in fsdp_params(module)
        if hasattr(each, "_unsharded_param")
    )


def parts_of(module: nn.Module) -> Iterator[Part]:
    return map(_part_of, fsdp_params(module))


def has_unreduced(module: nn.Module) -> bool:
    """Whether there are gradients that only a later backward reduces (set_requires_gradient_sync)."""
    return any(
        each.unsharded_accumulated_grad is not None or each._unsharded_param.grad is not None
        for each in fsdp_params(module)
        if hasattr(each, "_unsharded_param")
    ) or any(group._partial_reduce_output is not None for group in _all_groups_of(module))


def forget_unreduced(module: nn.Module) -> None:
    for each in fsdp_params(module):
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(each):  # torch 2.15 has only the leaf's gradient
                each.unsharded_accumulated_grad = None
    for group in _all_groups_of(module):
        group._partial_reduce_output = None


def switches_of(module: nn.Module) -> list[tuple[Callable[[], Any], tuple[str, ...]]]:
    """See ``nanlocator.state.switches``."""
    places: list[tuple[Callable[[], Any], tuple[str, ...]]] = []
    for state in _states_of(module):
        # The first forward gives all states of a model the same context.
        places.append((functools.partial(getattr, state, "_state_ctx"), ("is_last_backward",)))
        places += [(itself(group), _OF_GROUP) for group in _groups_of(state)]
    return places


class WholeGradients:
    """Scans each rank's gradients before ``fully_shard`` reduces them.

    Args:
        numbers: ids of the managed parameters.
    """

    def __init__(self, numbers: dict[torch.Tensor, int], scans: LocalScans) -> None:
        self._numbers = numbers
        self._scans = scans
        self._patches = Patches(__name__)
        this = weakref.ref(self)  # dropping a driver without `remove` leaves the wrapper installed

        def foreach_reduce(
            original: Callable[..., Any], params: Any, gradients: Any, *args: Any, **kwargs: Any
        ) -> Any:
            found = this()
            if found is None:
                return original(params, gradients, *args, **kwargs)
            found._scan(params, gradients)
            with found._exchanging(params, reduces_gradients=True):
                return original(params, gradients, *args, **kwargs)

        def foreach_all_gather(original: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
            found = this()
            if found is None:
                return original(params, *args, **kwargs)
            with found._exchanging(params, reduces_gradients=False):
                return original(params, *args, **kwargs)

        self._patches.wrap(points.FSDP2_REDUCE, foreach_reduce)
        self._patches.wrap(points.FSDP2_GATHER, foreach_all_gather)
        for lost in self._patches.lost:
            scans.say_uncovered(lost)

    def remove(self) -> None:
        self._patches.remove()
        self._numbers = {}

    def begin_step(self) -> None:
        pass

    def _exchanging(self, params: list[Any], *, reduces_gradients: bool) -> Any:
        """A context around the collectives of a group of parameters, some of which may be frozen."""
        ids = (self._numbers[p.sharded_param] for p in params if p.sharded_param in self._numbers)
        return self._scans.exchanging(ids, reduces_gradients=reduces_gradients)

    def _scan(self, params: list[Any], gradients: list[torch.Tensor]) -> None:
        found = [
            (number, gradient)
            for each, gradient in zip(params, gradients, strict=True)
            if (number := self._numbers.get(each.sharded_param)) is not None
        ]
        if found and self._scans.are_on("fully_shard"):
            self._scans.scan(_GROUPS + found[0][0], found)


def _states_of(module: nn.Module) -> Iterator[Any]:
    api = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if api is None:
        return
    seen: set[int] = set()
    for each in module.modules():
        state = api._get_module_fsdp_state(each)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def _all_groups_of(module: nn.Module) -> Iterator[Any]:
    return (group for state in _states_of(module) for group in _groups_of(state))


def _groups_of(state: Any) -> list[Any]:
    """One parameter group per mesh. Up to torch 2.11 there is one mesh."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _part_of(param: Any) -> Part:
    tensor = param.sharded_param
    shape = list(param._orig_size)
    part = Part(
        tensor,
        shape,
        placements=placements_of(tensor),
        is_tp_sharded=is_sharded_over_tp(tensor),
    )
    part.reduce_dtype = param.mp_policy.reduce_dtype or param.mp_policy.param_dtype
    mesh_info = param.mesh_info
    size = getattr(mesh_info, "shard_mesh_size", 1)  # `replicate` has none
    if size == 1:
        return part
    dim, rank = param.fsdp_placement.dim, mesh_info.shard_mesh_rank
    chunk = -(-shape[dim] // size)  # torch.chunk
    inner = math.prod(shape[dim + 1 :])
    begin = min(rank * chunk, shape[dim]) * inner
    end = min((rank + 1) * chunk, shape[dim]) * inner
    part.shard = (begin, end)
    part.shard_row = shape[dim] * inner if dim > 0 else 0
    part.shard_group = dist.get_process_group_ranks(mesh_info.shard_process_group)
    return part
