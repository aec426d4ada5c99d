"""What one look at a tensor tells: the columns of a row, and what the columns cannot say."""

import sys
from dataclasses import dataclass
from math import inf, nan

import torch
import torch.distributed as dist

from nanlocator import _C

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)
_WITHOUT_A_SCAN = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Values:
    """Of one tensor, on any device. Keeps no tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    # Of a complex tensor the parts, counted singly; of a sparse one the stored values. None for integers,
    # bools, empty tensors, and tensors without memory of their own (meta, fake, under vmap).
    stats: "_C.TensorStats | None" = None
    # Of the magnitudes, as ``tensor.abs()`` would have them: nan where one is NaN. None: nothing to measure.
    magnitudes: tuple[float, float] | None = None
    has_positions: bool = True  # the stats' first index is one in `shape`

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
        """Zeros and −Inf, some of each, and nothing else: what is added to attention scores."""
        s = self.stats
        return s is not None and s.neg_inf > 0 and s.zeros > 0 and s.neg_inf + s.zeros == s.numel

    @property
    def has_only_negative_infinities(self) -> bool:
        """−Inf, and nothing else that is bad."""
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


def measure(tensor: torch.Tensor) -> Values:
    """Looks at ``tensor`` once: any dtype, layout and device. Changes nothing; autograd sees nothing.

    Waits for the device where the tensor is not in host memory. Integers and the magnitudes of complex
    numbers are left to torch. What can be read by neither has no values. Of a DTensor this rank's part.
    """
    tensor = local_part(tensor)
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    try:
        if tensor.layout is torch.strided and dtype.is_floating_point and dtype not in _WITHOUT_A_SCAN:
            stats = _scan(tensor)
            return Values(dtype, shape, stats, _extremes(stats)) if stats.numel else Values(dtype, shape)
        with torch.no_grad():
            return _measure_converted(tensor.detach(), dtype, shape)
    except (_C.UnsupportedError, NotImplementedError, _WithoutMemory):
        return Values(dtype, shape)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; every other tensor itself. No communication."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter or not dist.is_available():
        return tensor
    # Who has not imported it has no DTensor; importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return tensor._local_tensor if module is not None and isinstance(tensor, module.DTensor) else tensor


class _WithoutMemory(Exception):
    pass


def _scan(tensor: torch.Tensor) -> "_C.TensorStats":
    # `look` leaves the finite tensors of host memory unmeasured, and tells which tensors have no memory to
    # scan. Only plain tensors skip that question.
    if tensor.device.type == "cpu" and (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter):
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return _C.scan([tensor], torch.get_num_threads())[0]
    stats = _C.look(tensor)
    if stats is None:
        raise _WithoutMemory
    if stats.numel == 0 and tensor.numel() > 0:
        return _C.scan([tensor], torch.get_num_threads())[0]
    return stats


def _measure_converted(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Values:
    if tensor.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _WithoutMemory
    has_positions = tensor.layout in (torch.strided, torch._mkldnn)
    plain = plain_values(tensor)
    if plain.numel() == 0:
        return Values(dtype, shape)
    if plain.dtype.is_complex:
        # scan_tensors takes a lazy conjugate; the magnitudes need a second look, at a tensor of half the size
        return Values(dtype, shape, _scan(plain), _extremes(_scan(plain.abs())), has_positions)
    if plain.dtype.is_floating_point:
        stats = _scan(plain)
        return Values(dtype, shape, stats, _extremes(stats), has_positions)
    return Values(dtype, shape, None, _extremes_of_integers(plain), has_positions)


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Strided, of a dtype that the scan or torch's reductions know; of a sparse tensor the stored values."""
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is torch.sparse_coo:
        return plain_values(tensor.coalesce().values())
    if tensor.layout in _COMPRESSED:
        return plain_values(tensor.values())
    if tensor.layout is torch._mkldnn:
        return plain_values(tensor.to_dense())
    if tensor.dtype in _WITHOUT_A_SCAN:
        return tensor.float()
    return tensor


def _extremes(stats: "_C.TensorStats") -> tuple[float, float]:
    if stats.nan:
        return nan, nan
    has_inf = stats.pos_inf + stats.neg_inf > 0
    return stats.absmin, inf if has_inf else stats.absmax  # absmin is inf where nothing is finite


def _extremes_of_integers(tensor: torch.Tensor) -> tuple[float, float]:
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = tensor.double()  # torch has no reductions for these
    least, most = torch.aminmax(tensor)
    low, high = least.item(), most.item()
    if low >= 0:
        return low, high
    if high <= 0:
        return -high, -low
    return tensor.abs().min().item(), max(-low, high)
