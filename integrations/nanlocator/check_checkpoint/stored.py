"""Tensors in files: where their elements are, and what they are for."""

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nanlocator.check_checkpoint.sources import Source, UnreadError

__all__ = ["Part", "Role", "StoredTensor", "Time", "dtype_named", "role_of_file", "role_of_key", "row_major"]


class Role(enum.Enum):
    """What a resume uses a tensor for. Master weights in an optimizer's state are weights: they overwrite the
    model's in the next step."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    OTHER = "other"  # random numbers, schedulers, callbacks, data loaders


Time = Callable[[], None]  # raises TimeoutError when the time is up


@dataclass(frozen=True, slots=True)
class Part:
    """A view of dtype ``dtype`` in ``source``; its first element begins at the byte ``offset``."""

    source: Source
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    at: tuple[int, ...] = ()  # of its first element in the whole tensor; (): the part is the whole

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def is_dense_or_overlaps(self) -> bool:
        """Whether its span in memory is to be read element by element: because it has each, in any order, or
        because it has some of them more than once, such as an expanded view."""
        reached = 1
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size > 1 and stride < reached:
                return True
            reached += (size - 1) * stride
        return self.span <= self.numel

    @property
    def span_bytes(self) -> int:
        return self.span * self.dtype.itemsize


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint. ``unread``: why it, or a part of it, cannot be read."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    file: str
    parts: list[Part] = field(default_factory=list)
    unread: str = ""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def dtype_named(name: str) -> torch.dtype:
    """Raises UnreadError if this torch does not have it."""
    dtype = getattr(torch, name, None) if len(name) < 64 and name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise UnreadError(f"this torch ({torch.__version__}) has no dtype {name[:64]}")
    return dtype


# --- roles -------------------------------------------------------------------------------------------------

# Keys under which frameworks keep what is not the model: torch's get_state_dict ("optim"), Megatron-Core
# ("optimizer", "chained_0"), DeepSpeed, Lightning ("optimizer_states"), accelerate, the Trainer.
_OPTIMIZER = re.compile(
    r"(base_)?optim(izer)?s?(_states?)?(_dict)?(_?\d+)?|opt_state(_dict)?|chained_\d+|param_groups"
)
_MASTER_WEIGHTS = re.compile(
    r"fp32_param|fp32_from_fp16_params|fp32_flat_groups|single_partition_of_fp32_groups|(fp32_)?master_(param|weight)s?"
    r"|shard_fp32_from_float16_groups"
)
_OTHER = re.compile(
    r"(\w+_)?rng_states?|rng(_tracker_states)?|random_states?\w*|(\w+_)?(lr_)?schedulers?(_states?)?(_dict)?|callbacks|loops|args"
    r"|hyper_parameters|datamodule\w*|(grad_|loss_)?scaler|loss_scale\w*|native_amp_scaling_state|rerun_state_machine"
    r"|(train_)?dataloaders?(_state)?|(\w+_)?sampler|ds_config|MixedPrecision\w*|trainer_state|content_metadata"
)
_OPTIMIZER_FILE = re.compile(r"optimizer.*|.*optim_states.*|distrib_optim.*|optim\.\w+", re.IGNORECASE)
_OTHER_FILE = re.compile(
    r"(rng|random)_states?.*|.*scheduler.*|scaler\..*|training_args\..*|sampler.*|dl_state.*", re.IGNORECASE
)
_LONGEST_KEY = 128  # that is looked at
_DEEP = 4  # a key below that is a parameter's or a module's name


def role_of_key(role: Role | None, key: str, depth: int) -> Role | None:
    """The role of what is below ``key``, in something with ``role`` (None: not known yet)."""
    if role is Role.OTHER or len(key) > _LONGEST_KEY:
        return role
    if _MASTER_WEIGHTS.fullmatch(key):
        return Role.WEIGHTS
    if role is Role.OPTIMIZER:
        # Megatron-Core's distributed optimizer calls its master weights "param".
        return Role.WEIGHTS if key == "param" else role
    if role is None and depth < _DEEP:
        if _OPTIMIZER.fullmatch(key):
            return Role.OPTIMIZER
        if depth < 2 and _OTHER.fullmatch(key):
            return Role.OTHER
    return role


def role_of_file(name: str) -> Role | None:
    if _OPTIMIZER_FILE.fullmatch(name):
        return Role.OPTIMIZER
    return Role.OTHER if _OTHER_FILE.fullmatch(name) else None


def role_of_path(path: str) -> Role:
    """Of a name such as "optimizer.state.exp_avg.decoder.layers.0.weight"."""
    role: Role | None = None
    for depth, key in enumerate(path.split(".")):
        role = role_of_key(role, key, depth)
    return role or Role.WEIGHTS
