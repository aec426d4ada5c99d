"""A rank's part of each parameter: all of it, or a shard and its position.

A ``Part`` describes one parameter on one rank for the engine's parameter map; ``fsdp2`` and ``fsdp1`` know
the parts of their models. A DTensor that neither manages (``parallelize_module``) counts, like Megatron's
parameters, as a parameter with the shape of this tensor-parallel rank's part.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nanlocator import _C
from nanlocator.calls.modules import local_part

# Usual names of mesh dimensions, by the engine's axis (torchtitan's parallel_dims.py, PyTorch's tutorials).
# Other names are unknown; their axis is not guessed.
_AXES = {
    "tp": ("tp", "tensor", "tensor_parallel"),
    "pp": ("pp", "pipeline", "pipeline_parallel"),
    "cp": ("cp", "context", "context_parallel"),
    "dp": ("dp", "data", "data_parallel", "ddp", "fsdp", "shard", "replicate", "dp_shard", "dp_replicate"),
}


@dataclass(eq=False)
class Part:
    """Attributes:
    tensor: the tensor in the optimizer's groups.
    shape: the parameter's shape on this tensor-parallel rank.
    name: set if ``named_parameters()`` lacks it (one of several in a flat parameter).
    shard: the elements [begin, end) of the flattened parameter that this rank keeps; None: all.
    shard_row: for a shard of columns: ``shard`` is a range in each row, and a row has this many elements.
    shard_group: the global ranks that keep its shards.
    reduce_dtype: in which gradients are summed over ranks, if it is known.
    is_tp_sharded: other tensor-parallel ranks have other parts of it.
    view: maps ``tensor``, its gradient or its optimizer state to this parameter's part.
    """

    tensor: torch.Tensor
    shape: list[int]
    name: str | None = None
    shard: tuple[int, int] | None = None
    shard_row: int = 0
    shard_group: list[int] = field(default_factory=list)
    reduce_dtype: torch.dtype | None = None
    placements: list[str] = field(default_factory=list)
    is_tp_sharded: bool = False
    view: Callable[[torch.Tensor], torch.Tensor] = local_part

    @property
    def begin(self) -> int:
        return self.shard[0] if self.shard is not None else 0

    def describe(self, info: _C.ParameterInfo) -> None:
        info.shape = self.shape
        info.shard = self.shard
        if self.shard_row:
            info.shard_row = self.shard_row
        info.shard_group = self.shard_group
        if self.reduce_dtype not in (None, self.tensor.dtype):
            info.reduce_dtype = str(self.reduce_dtype).removeprefix("torch.")
        info.placements = self.placements


def whole_part(tensor: torch.Tensor) -> Part:
    """The Part of a tensor that is not sharded, except maybe over tensor-parallel ranks."""
    return Part(
        tensor,
        list(local_part(tensor).shape),
        placements=placements_of(tensor),
        is_tp_sharded=is_sharded_over_tp(tensor),
    )


def placements_of(tensor: torch.Tensor) -> list[str]:
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return []
    names = mesh.mesh_dim_names or [f"dimension {i}" for i in range(mesh.ndim)]
    return [f"{name}: {placement!r}" for name, placement in zip(names, _placements(tensor), strict=True)]


def is_sharded_over_tp(tensor: torch.Tensor) -> bool:
    mesh = getattr(tensor, "device_mesh", None)
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    return any(
        _axis_of(name) == "tp" and placement.is_shard()
        for name, placement in zip(names, _placements(tensor) if names else (), strict=True)
    )


def _placements(dtensor: Any) -> tuple[Any, ...]:
    return dtensor.placements


def coordinates_of(
    tensors: Iterable[torch.Tensor], pipeline: "dist.ProcessGroup | None" = None
) -> tuple[_C.RankCoordinates, str]:
    """This rank's coordinates from the parameters' mesh, if it covers all ranks and its dimensions have known
    names. Else each rank is a data-parallel rank, with its place in ``pipeline``. Also returns a clause that
    says what is unknown, or ""."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = _C.data_parallel_coordinates(rank, world)
    if pipeline is not None:
        stages = dist.get_process_group_ranks(pipeline)
        plain.pp = _C.AxisCoordinate(stages.index(rank), len(stages))
        plain.dp = _C.AxisCoordinate(_place_beside(stages, world), world // len(stages))
    meshes = {id(m): m for t in tensors if (m := getattr(t, "device_mesh", None)) is not None}
    root = next((r for r in map(_root_of, meshes.values()) if r.size() == world), None)
    if root is None or (root.ndim == 1 and root.mesh_dim_names is None):
        return plain, ""
    axes = [_axis_of(name) for name in root.mesh_dim_names or [""] * root.ndim]
    place = root.get_coordinate()
    known = [axis for axis in axes if axis is not None]
    if known != axes or place is None:
        return plain, (
            f"where a rank stands in the mesh {_described(root)} (its dimension names are unknown, so every "
            "rank counts as data-parallel)"
        )
    coordinates = _C.data_parallel_coordinates(rank, world)
    coordinates.dp = _C.AxisCoordinate(0, 1)
    for axis, index, size in zip(known, place, root.mesh.shape, strict=True):
        before = getattr(coordinates, axis)
        setattr(coordinates, axis, _C.AxisCoordinate(before.rank * size + index, before.size * size))
    return coordinates, ""


def _place_beside(stages: list[int], world: int) -> int:
    """This pipeline's index among all pipelines, which have the same stride between their ranks."""
    stride = stages[1] - stages[0] if len(stages) > 1 else 1
    return stages[0] // (stride * len(stages)) * stride + stages[0] % stride


def _axis_of(name: str) -> str | None:
    return next((axis for axis, names in _AXES.items() if name in names), None)


def _described(mesh: Any) -> str:
    names = mesh.mesh_dim_names or ["?"] * mesh.ndim
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(names, mesh.mesh.shape, strict=True)) + ")"


def _root_of(mesh: Any) -> Any:
    """The mesh that ``mesh`` was sliced from. From torch 2.9 on, ``_get_root_mesh`` is a method of it."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)
