"""What a check of a checkpoint found, as facts. text.py words it."""

import enum
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanlocator import _C

__all__ = [
    "CheckpointReport",
    "Content",
    "Finding",
    "Largest",
    "Report",
    "Statistics",
    "TensorReport",
    "Unread",
]

VERSION = 1


class Content(str, enum.Enum):
    """What is known of the weights, or of the optimizer's state. Not looked at is not finite."""

    FINITE = "finite"
    BAD = "bad"  # NaN or Inf
    SUSPECT = "suspect"  # finite, but of an absurd magnitude
    UNKNOWN = "unknown"  # nothing bad was found, but something was not read
    NONE = "none"  # there is none


@dataclass(slots=True)
class Statistics:
    """Of a tensor's elements; for a complex tensor, of their real and imaginary parts."""

    numel: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zeros: int = 0
    first_bad: tuple[int, ...] | None = None  # index of the first NaN or Inf
    minimum: float = math.inf  # of the finite elements; inf and -inf if there is none
    maximum: float = -math.inf
    sum_of_squares: float = 0.0
    # The largest finite magnitude by the index in the first dimension, where each is stored separately:
    # Megatron-Core stacks a parameter's layers.
    layers: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: "_C.TensorStats", first_bad: tuple[int, ...] | None) -> "Statistics":
        return cls(
            seen.numel,
            seen.nan,
            seen.pos_inf,
            seen.neg_inf,
            seen.zeros,
            first_bad,
            seen.finite_min,
            seen.finite_max,
            seen.sum_of_squares,
        )

    def add(self, other: "Statistics") -> None:
        self.numel += other.numel
        self.nan += other.nan
        self.pos_inf += other.pos_inf
        self.neg_inf += other.neg_inf
        self.zeros += other.zeros
        bad = [each for each in (self.first_bad, other.first_bad) if each is not None]
        self.first_bad = min(bad) if bad else None
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.sum_of_squares += other.sum_of_squares

    @property
    def nonfinite(self) -> int:
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def absmax(self) -> float:
        """The largest finite magnitude; 0 if there is none."""
        return max(self.maximum, -self.minimum, 0.0) if self.numel > self.nonfinite else 0.0

    @property
    def rms(self) -> float:
        count = self.numel - self.nonfinite
        return math.sqrt(self.sum_of_squares / count) if count else 0.0

    def to_json(self) -> dict[str, Any]:
        has_finite = self.numel > self.nonfinite
        return {
            "numel": self.numel,
            "nan": self.nan,
            "pos_inf": self.pos_inf,
            "neg_inf": self.neg_inf,
            "zeros": self.zeros,
            "first_bad": None if self.first_bad is None else list(self.first_bad),
            "min": self.minimum if has_finite else None,
            "max": self.maximum if has_finite else None,
            "absmax": self.absmax if has_finite else None,
            "rms": self.rms if has_finite and math.isfinite(self.rms) else None,
        }


@dataclass(slots=True)
class TensorReport:
    name: str
    role: str  # "weights", "optimizer" or "other"
    dtype: str
    shape: tuple[int, ...]
    file: str
    statistics: Statistics | None  # None: no element was read
    unread: str = ""  # why it, or a part of it, was not read
    is_selected: bool = False  # its statistics were asked for

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "file": self.file,
            "unread": self.unread,
            "statistics": None if self.statistics is None else self.statistics.to_json(),
        }


@dataclass(slots=True)
class Finding:
    """``kind``: "nonfinite"; "near_limit" (within a factor of 2 of the dtype's largest number); "outlier"
    (far beyond the tensors of the same name in other layers); "grew" (far beyond its value in the
    checkpoint before). ``reference``: that largest number, the others' median, the value before. ``layer``:
    index in the first dimension of a tensor that has several layers."""

    kind: str
    tensor: TensorReport
    reference: float | None = None
    layer: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "reference": self.reference, "layer": self.layer, **self.tensor.to_json()}


@dataclass(frozen=True, slots=True)
class Unread:
    """A file, or a tensor, that was not read."""

    what: str
    reason: str
    role: str = ""  # "": of a file, whose content is unknown


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest magnitude of a weight."""

    checkpoint: str
    absmax: float
    name: str
    file: str


@dataclass(slots=True)
class CheckpointReport:
    path: str
    layout: str  # such as "Megatron-Core torch_dist"
    iteration: int | None = None
    chosen: str = ""  # why this one of several
    complete: bool = False  # False: the time was up before everything was read
    contents: dict[str, Content] = field(default_factory=dict)  # by role
    tensors: list[TensorReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    largest: Largest | None = None
    largest_before: Largest | None = None  # of the checkpoint that it was compared with
    bytes_read: int = 0
    bytes_in_all: int = 0
    seconds: float = 0.0

    @property
    def is_safe(self) -> bool | None:
        """Whether all weights and the whole optimizer state are finite and of usual magnitude. None:
        unknown."""
        if self.findings:
            return False
        return None if self.unread or not self.complete else True

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "layout": self.layout,
            "iteration": self.iteration,
            "chosen": self.chosen,
            "complete": self.complete,
            "safe": self.is_safe,
            "contents": {role: content.value for role, content in self.contents.items()},
            "tensors": len(self.tensors),
            "findings": [each.to_json() for each in self.findings],
            "unread": [asdict(each) for each in self.unread],
            "notes": self.notes,
            "largest": None if self.largest is None else asdict(self.largest),
            "largest_before": None if self.largest_before is None else asdict(self.largest_before),
            "selected": [each.to_json() for each in self.tensors if each.is_selected],
            "bytes_read": self.bytes_read,
            "bytes_in_all": self.bytes_in_all,
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class Report:
    """``checkpoints``: those that were checked, in this order. ``others``: further checkpoints of the same
    run that were not."""

    path: str
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    problem: str = ""  # why nothing could be checked

    @property
    def is_safe(self) -> bool | None:
        """Of the first checkpoint, which a resume loads."""
        return self.checkpoints[0].is_safe if self.checkpoints else None

    @property
    def exit_code(self) -> int:
        """0 finite, 1 findings, 3 no findings, but something could not be read."""
        if any(each.findings for each in self.checkpoints):
            return 1
        if self.problem or not self.checkpoints or any(each.is_safe is None for each in self.checkpoints):
            return 3
        return 0

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "path": self.path,
            "problem": self.problem,
            "safe": self.is_safe,
            "exit_code": self.exit_code,
            "checkpoints": [each.to_json() for each in self.checkpoints],
            "others": self.others,
        }
