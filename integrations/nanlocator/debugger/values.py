"""The result of one scan of a tensor: the columns of a row, and more."""

from dataclasses import dataclass
from math import inf, nan
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanlocator import _C


@dataclass(slots=True)
class Values:
    """The values of one tensor, on any device. Keeps no tensor. A scan fills it in (scans.py): at once for
    host memory, else when the scan is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    # Counts and range; for a complex tensor those of its parts, for a sparse one of its stored values. None
    # for integers, bools, empty tensors, and tensors without their own memory (meta, fake, under vmap).
    stats: "_C.TensorStats | None" = None
    # Magnitudes, like ``tensor.abs()``: nan if one is NaN. None: nothing to measure.
    magnitudes: tuple[float, float] | None = None
    has_positions: bool = True  # the stats' first index is valid in `shape`

    def take_stats(self, stats: "_C.TensorStats") -> None:
        self.stats = stats

    def take_magnitudes(self, stats: "_C.TensorStats") -> None:
        if stats.nan:
            self.magnitudes = nan, nan
        else:  # absmin is inf if no element is finite
            has_inf = stats.pos_inf + stats.neg_inf > 0
            self.magnitudes = stats.absmin, inf if has_inf else stats.absmax

    def take_both(self, stats: "_C.TensorStats") -> None:
        self.take_stats(stats)
        self.take_magnitudes(stats)

    @property
    def has_nan(self) -> bool:
        return self.stats is not None and self.stats.nan > 0

    @property
    def has_inf(self) -> bool:
        return self.stats is not None and self.stats.pos_inf + self.stats.neg_inf > 0

    @property
    def is_bad(self) -> bool:
        return self.stats is not None and not self.stats.is_finite

    @property
    def is_additive_mask(self) -> bool:
        """Only zeros and −Inf, some of each: a mask added to attention scores."""
        s = self.stats
        return s is not None and s.neg_inf > 0 and s.zeros > 0 and s.neg_inf + s.zeros == s.numel

    @property
    def has_only_negative_infinities(self) -> bool:
        """The only bad values are −Inf."""
        s = self.stats
        return s is not None and s.neg_inf > 0 and s.nan + s.pos_inf == 0

    @property
    def first_bad(self) -> tuple[int, ...] | None:
        """Index of the first NaN or Inf in row-major order."""
        if self.stats is None or self.stats.first_bad < 0 or not self.has_positions:
            return None
        flat = self.stats.first_bad // (2 if self.dtype.is_complex else 1)
        index: list[int] = []
        for size in reversed(self.shape):
            index.append(flat % size)
            flat //= size
        return tuple(reversed(index))
