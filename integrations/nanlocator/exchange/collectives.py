"""The positions of the tensors in calls of ProcessGroup's methods, and a substitute for their Work.

Every collective and message that a framework or torch issues from Python calls a method of ``ProcessGroup``
(torch 2.11 to 2.15, distributed/distributed_c10d.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work


@dataclasses.dataclass(frozen=True)
class Collective:
    """Positions of the tensors among the arguments of ProcessGroup's method, without self."""

    op: str
    received: int
    sent: int
    root: int | None = None  # the options, or the root's rank in the group
    only_root_sends: bool = False
    only_root_receives: bool = False
    # The result holds the inputs of all members. Each member scans its own input, and a bad input has arrived
    # everywhere (src/incident/crossings.cpp). Scanning the result took 2 % of a step of Llama-3 70B at TP4
    # (tools/bench plan).
    is_gather: bool = False


COLLECTIVES = {  # without those that this torch lacks
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
# From torch 2.13 on, torch.distributed calls these, with the same arguments, for the same operators.
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
    """The name of the group's device-mesh dimension, if it has one (device_mesh.py: "mesh_dp_shard"), else
    its description; "" if there is none, or if torch.distributed has not created the group."""
    try:
        dist.get_process_group_ranks(group)
        description = group.group_desc.removeprefix("mesh_")
    except (RuntimeError, KeyError, ValueError):
        return ""
    return {"default_pg": "world", "undefined": ""}.get(description, description)


class FollowedWork:
    """Replaces the Work of a transfer; calls ``on_end`` once the program has waited for it.

    ``isinstance(..., Work)`` is true. C++ does not accept it: C++ functions that take a Work raise TypeError,
    but ``torch.distributed`` 2.11 passes no such object to them.
    """

    __slots__ = ("_on_end", "_work")

    def __init__(self, work: Work, on_end: Callable[[], None]) -> None:
        self._work = work
        self._on_end: Callable[[], None] | None = on_end

    @property  # type: ignore[misc]  # read-only
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
