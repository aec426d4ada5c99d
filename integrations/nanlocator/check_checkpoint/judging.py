"""Which statistics are findings. Each rule says why it fires, and what keeps it from healthy checkpoints.

- NaN or Inf in weights or an optimizer's state. Not the -Inf of a mask: zeros and -Inf alone, or -Inf alone
  under a mask's name. What is neither (a callback's best score begins at Inf) is a note.
- A magnitude within a factor of two of the dtype's largest number: the next doubling is Inf. Not of 8-bit
  types, which are scaled to their whole range; and not the number itself as a mask's filler
  (torch.finfo(dtype).min).
- A weight whose largest magnitude is 1e4 times the median of its namesakes in other layers, and above 100.
  Trained weights of one name differ by a factor of ten or so, biases that have barely moved from zero by
  more: hence the second bound. A flipped upper bit of the exponent multiplies by 2^32 or more. Optimizer
  states have no such rule: gradients of healthy layers do differ by orders of magnitude, and their squares
  by twice as many.
- A weight that has grown a hundredfold since the checkpoint before, and is above 10: training at usual
  rates does not do that between two checkpoints, a zero-initialised weight may, below that bound.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable

import torch

from nanlocator.check_checkpoint.report import Finding, Statistics, TensorReport
from nanlocator.check_checkpoint.stored import Role

__all__ = ["find", "grown"]

_NEAR = 2.0
_OUTLIER, _OUTLIER_AT_LEAST = 1e4, 100.0
_FEWEST_NAMESAKES = 3
_GROWTH, _GROWN_AT_LEAST = 100.0, 10.0
_STACKED = re.compile(r"(^|\.)layers\.")  # without a number: Megatron-Core's stacked layers
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")  # of a layer or an expert; not that of linear_fc1
_MASK = re.compile(r"mask|alibi|(?:^|[._])(?:attn|attention)_bias$", re.IGNORECASE)
_EIGHT_BITS = "float8"


def is_mask(tensor: TensorReport) -> bool:
    """Whether its infinities are meant."""
    s = tensor.statistics
    if s is None or tensor.role != Role.WEIGHTS.value or s.nan or s.pos_inf or not s.neg_inf:
        return False
    return (s.zeros > 0 and s.zeros + s.neg_inf == s.numel) or _MASK.search(tensor.name) is not None


def find(tensors: Iterable[TensorReport]) -> list[Finding]:
    """The worst first: NaN and Inf, then numbers near the limit, then outliers."""
    read = [
        each
        for each in tensors
        if each.statistics is not None and each.role != Role.OTHER.value and _floats(each)
    ]
    bad = [Finding("nonfinite", each) for each in read if _nonfinite(each) and not is_mask(each)]
    near = [Finding("near_limit", each, limit) for each in read if (limit := _limit_nearby(each)) is not None]
    known = {id(each.tensor) for each in (*bad, *near)}
    return [*bad, *near, *(each for each in _outliers(read) if id(each.tensor) not in known)]


def grown(now: Iterable[TensorReport], before: Iterable[TensorReport]) -> list[Finding]:
    """Weights that are far larger than in the checkpoint before, by name and file, or else by name alone."""
    by_file: dict[tuple[str, str], float] = {}
    by_name: dict[str, float] = {}
    for tensor in before:
        if tensor.statistics is not None and tensor.role == Role.WEIGHTS.value:
            by_file[tensor.file, tensor.name] = tensor.statistics.absmax
            by_name[tensor.name] = max(by_name.get(tensor.name, 0.0), tensor.statistics.absmax)
    found = []
    for tensor in now:
        if tensor.statistics is None or tensor.role != Role.WEIGHTS.value or not _floats(tensor):
            continue
        old = by_file.get((tensor.file, tensor.name), by_name.get(tensor.name))
        if old and tensor.statistics.absmax > max(_GROWTH * old, _GROWN_AT_LEAST):
            found.append(Finding("grew", tensor, old))
    return found


def _floats(tensor: TensorReport) -> bool:
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def _nonfinite(tensor: TensorReport) -> int:
    return 0 if tensor.statistics is None else tensor.statistics.nonfinite


def _limit_nearby(tensor: TensorReport) -> float | None:
    s = tensor.statistics
    dtype = getattr(torch, tensor.dtype, None)
    if s is None or s.nonfinite or tensor.dtype.startswith(_EIGHT_BITS) or not isinstance(dtype, torch.dtype):
        return None
    limit = float(torch.finfo(dtype).max)
    if s.absmax * _NEAR < limit or _is_filled_mask(s, limit):
        return None
    return limit


def _is_filled_mask(s: Statistics, limit: float) -> bool:
    """Zeros and the most negative number alone: the sum of the squares counts the latter."""
    if s.minimum != -limit or s.maximum > 0:
        return False
    fillers = (s.sum_of_squares / limit) / limit  # nan if the sum overflows, as in float64
    return fillers != fillers or fillers == float("inf") or abs(fillers + s.zeros - s.numel) < 0.5


def _outliers(tensors: list[TensorReport]) -> list[Finding]:
    namesakes: dict[str, list[TensorReport]] = defaultdict(list)
    for tensor in tensors:
        if tensor.role == Role.WEIGHTS.value:
            namesakes[_NUMBER.sub("*", tensor.name)].append(tensor)
    found = []
    for pattern, group in namesakes.items():
        if "*" in pattern:
            found += _outliers_of([(each, None, each.statistics.absmax) for each in group if each.statistics])
        elif _STACKED.search(pattern):
            found += _outliers_of(
                [
                    (each, layer, absmax)
                    for each in group
                    if each.statistics
                    for layer, absmax in sorted(each.statistics.layers.items())
                ]
            )
    return found


def _outliers_of(namesakes: list[tuple[TensorReport, int | None, float]]) -> list[Finding]:
    sizes = [absmax for _, _, absmax in namesakes if absmax > 0]
    if len(sizes) < _FEWEST_NAMESAKES:
        return []
    usual = statistics.median(sizes)
    return [
        Finding("outlier", tensor, usual, layer)
        for tensor, layer, absmax in namesakes
        if absmax > max(_OUTLIER * usual, _OUTLIER_AT_LEAST)
    ]
