"""What a rank keeps of each parameter: the whole of it, or a shard, and where that lies in it.

``Part`` is what the engine's parameter map says of one parameter on one rank; ``fsdp2`` and ``fsdp1`` know
the parts of their models. A DTensor that neither of them manages (``parallelize_module``) is kept as this
tensor-parallel rank's part, which counts as a parameter of its own shape, as Megatron's do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nanlocator import _C
from nanlocator.calls.modules import local_part

# Names of mesh dimensions that people use, by the engine's axis (torchtitan's parallel_dims.py, PyTorch's
# tutorials). What else there is, is not guessed.
_AXES = {
    "tp": ("tp", "tensor", "tensor_parallel"),
    "pp": ("pp", "pipeline", "pipeline_parallel"),
    "cp": ("cp", "context", "context_parallel"),
    "dp": ("dp", "data", "data_parallel", "ddp", "fsdp", "shard", "replicate", "dp_shard", "dp_replicate"),
}


@dataclass(eq=False)
class Part:
    """Attributes:
    tensor: what the optimizer's groups hold.
    shape: of the parameter, on this tensor-parallel rank.
    name: where ``named_parameters()`` has none for it (one of several in a flat parameter).
    shard: the elements [begin, end) of the flattened parameter that this rank keeps; None: all.
    shard_row: of a shard of columns: ``shard`` lies in each row of so many elements.
    shard_group: the global ranks that keep its shards.
    is_tp_sharded: other tensor-parallel ranks have other parts of it.
    view: from ``tensor``, its gradient, or what an optimizer keeps of it, to this parameter's part.
    """

    tensor: torch.Tensor
    shape: list[int]
    name: str | None = None
    shard: tuple[int, int] | None = None
    shard_row: int = 0
    shard_group: list[int] = field(default_factory=list)
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
        info.placements = self.placements


def whole_part(tensor: torch.Tensor) -> Part:
    """Of a tensor that nobody has sharded but, maybe, tensor parallelism."""
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
    """Of this rank, from the mesh that the parameters are laid out on, where it covers all ranks and the
    names of its dimensions say what they are; else every rank is a data-parallel one but for its place in
    ``pipeline``. And a clause that says what is not known; "" where all is."""
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
            f"where a rank stands in the mesh {_described(root)}: its dimensions' names are not known, and "
            "each rank is taken for a data-parallel one"
        )
    coordinates = _C.data_parallel_coordinates(rank, world)
    coordinates.dp = _C.AxisCoordinate(0, 1)
    for axis, index, size in zip(known, place, root.mesh.shape, strict=True):
        before = getattr(coordinates, axis)
        setattr(coordinates, axis, _C.AxisCoordinate(before.rank * size + index, before.size * size))
    return coordinates, ""


def _place_beside(stages: list[int], world: int) -> int:
    """Of a pipeline among the others, whose ranks lie as its own do: next to each other, or as far apart."""
    stride = stages[1] - stages[0] if len(stages) > 1 else 1
    return stages[0] // (stride * len(stages)) * stride + stages[0] % stride


def _axis_of(name: str) -> str | None:
    return next((axis for axis, names in _AXES.items() if name in names), None)


def _described(mesh: Any) -> str:
    names = mesh.mesh_dim_names or ["?"] * mesh.ndim
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(names, mesh.mesh.shape, strict=True)) + ")"


def _root_of(mesh: Any) -> Any:
    """The mesh that it was cut from. ``_get_root_mesh`` is a method from torch 2.9 on."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)
