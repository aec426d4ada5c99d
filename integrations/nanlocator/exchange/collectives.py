"""Where ProcessGroup's methods take their tensors, and a stand-in for the Work that they return.

Every collective and message that a framework or torch issues from Python ends in a method of
``ProcessGroup`` (torch 2.11 to 2.15, distributed/distributed_c10d.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work


@dataclasses.dataclass(frozen=True)
class Collective:
    """Where ProcessGroup's method takes its tensors: positions of its arguments, self not counted."""

    op: str
    received: int
    sent: int
    root: int | None = None  # the options, or the root's rank in the group
    only_root_sends: bool = False
    only_root_receives: bool = False
    # What arrives is what the members put in, as large as all of it together: it is scanned where it
    # leaves, and what was bad there has arrived everywhere (src/locate/crossings.cpp). To read it on arrival
    # took 2 % of a step of Llama-3 70B at TP4 (tools/bench plan).
    is_gather: bool = False


COLLECTIVES = {  # those that a version of torch has not got are left out
    "allreduce": Collective("c10d::allreduce_", 0, 0),
    "allreduce_coalesced": Collective("c10d::allreduce_coalesced_", 0, 0),
    "broadcast": Collective("c10d::broadcast_", 0, 0, root=1, only_root_sends=True),
    "reduce": Collective("c10d::reduce_", 0, 0, root=1, only_root_receives=True),
    "allgather": Collective("c10d::allgather_", 0, 1, is_gather=True),
    "_allgather_base": Collective("c10d::_allgather_base_", 0, 1, is_gather=True),
    "allgather_coalesced": Collective("c10d::allgather_coalesced_", 0, 1, is_gather=True),
    "allgather_into_tensor_coalesced": Collective(
        "c10d::allgather_into_tensor_coalesced_", 0, 1, is_gather=True
    ),
    "reduce_scatter": Collective("c10d::reduce_scatter_", 0, 1),
    "_reduce_scatter_base": Collective("c10d::_reduce_scatter_base_", 0, 1),
    "reduce_scatter_tensor_coalesced": Collective("c10d::reduce_scatter_tensor_coalesced_", 0, 1),
    "alltoall": Collective("c10d::alltoall_", 0, 1),
    "alltoall_base": Collective("c10d::alltoall_base_", 0, 1),
    "gather": Collective("c10d::gather_", 0, 1, root=2, only_root_receives=True),
    "scatter": Collective("c10d::scatter_", 0, 1, root=2, only_root_sends=True),
}
# From torch 2.13 on torch.distributed calls these, with the same arguments, for the same operators.
COLLECTIVES |= {
    new: COLLECTIVES[old]
    for new, old in {
        "all_gather_single": "_allgather_base",
        "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
        "reduce_scatter_single": "_reduce_scatter_base",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
        "all_to_all_single": "alltoall_base",
    }.items()
}
COLLECTIVES["gather_single"] = Collective("c10d::gather_into_tensor_", 0, 1, root=2, only_root_receives=True)


def name_of(group: ProcessGroup) -> str:
    """After the dimension of its device mesh, where it is one's (device_mesh.py: "mesh_dp_shard"), else its
    description; "" where it has none, or torch.distributed has not made it."""
    try:
        dist.get_process_group_ranks(group)
        description = group.group_desc.removeprefix("mesh_")
    except (RuntimeError, KeyError, ValueError):
        return ""
    return {"default_pg": "world", "undefined": ""}.get(description, description)


class FollowedWork:
    """Stands for the Work of a transfer; calls ``on_end`` once it has been waited for.

    ``isinstance(..., Work)`` holds. C++ does not take it for one: functions that want a Work of torch raise
    a TypeError, and ``torch.distributed`` 2.11 hands none of these to such a function.
    """

    __slots__ = ("_on_end", "_work")

    def __init__(self, work: Work, on_end: Callable[[], None]) -> None:
        self._work = work
        self._on_end: Callable[[], None] | None = on_end

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> type:
        return type(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        self._end()
        return result

    def synchronize(self) -> None:
        self._work.synchronize()
        self._end()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()
        self._end()

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed:
            self._end()
        return is_completed

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
