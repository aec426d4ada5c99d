"""Ranks of the process groups that Megatron-Core builds for a parallel layout, computed without building
them.

Source, Megatron-Core 0.16.1, parallel_state.py: initialize_model_parallel makes one RankGenerator for the
dense part (tp, cp, dp, pp) and one for the experts (tp, ep, the remaining factor, pp), both in the order
"tp-cp-ep-dp-pp": a rank's tp coordinate changes fastest, its pp coordinate slowest. Expert-tensor parallelism
has Megatron's default, the size of tp.
"""

from math import prod
from typing import NamedTuple

from nanlocator._C import UsageError


class Group(NamedTuple):
    """The ranks (global, ascending) of one collective of this kind."""

    name: str  # "tp", "cp", "dp", "pp" or "ep"
    ranks: list[int]


def groups(world: int, *, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1) -> list[Group]:
    """Every group of more than one rank, kind by kind: tp, cp, dp, pp, ep. dp is `world` / (tp x cp x pp); ep
    divides dp x cp. Raises UsageError if the sizes do not divide `world`."""
    sizes = {"world": world, "tp": tp, "cp": cp, "ep": ep, "pp": pp}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} is {size}; expected 1 or more")
    _require_division(world, {"tp": tp, "cp": cp, "pp": pp}, "the dense layers")
    _require_division(world, {"tp": tp, "ep": ep, "pp": pp}, "the experts")
    dense = {"tp": tp, "cp": cp, "dp": world // (tp * cp * pp), "pp": pp}
    experts = {"tp": tp, "ep": ep, "expert dp": world // (tp * ep * pp), "pp": pp}
    return [
        *(group for axis in dense for group in _groups_along(axis, dense)),
        *_groups_along("ep", experts),
    ]


def _require_division(world: int, sizes: dict[str, int], whose: str) -> None:
    need = prod(sizes.values())
    if world % need == 0:
        return
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    raise UsageError(
        f"{world} ranks cannot be laid out: {whose} need {product} = {need} ranks or a multiple of that. "
        "Start as many ranks as the training has, or give sizes that divide their number"
    )


def _groups_along(axis: str, sizes: dict[str, int]) -> list[Group]:
    """`sizes` from the axis that changes fastest to the slowest."""
    names = list(sizes)
    size = sizes[axis]
    if size == 1:
        return []
    stride = prod(sizes[name] for name in names[: names.index(axis)])
    world = prod(sizes.values())
    first_ranks = [rank for rank in range(world) if rank // stride % size == 0]
    return [Group(axis, [first + i * stride for i in range(size)]) for first in first_ranks]
