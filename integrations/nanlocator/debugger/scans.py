"""Scans of tensors during the forward, and the decisions that wait for them.

Input: tensors of any dtype, layout and device. Output: ``Values``, filled in at once for host memory. On
another device a scan is enqueued on the current stream (on CUDA one launch into its own slot), and nothing
waits until all scans are read together. Results do not change, and autograd sees nothing.
"""

import threading
import weakref
from collections.abc import Callable

import torch

from nanlocator import _C
from nanlocator.calls.modules import local_part
from nanlocator.debugger.values import Values

_MOST_WAITING = 1 << 13  # scans; their slots take about a megabyte of the device's memory

_MKLDNN: torch.layout = vars(torch)["_mkldnn"]  # torch's types lack it
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)
_WITHOUT_A_SCAN = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")  # the last one from 2.7 on
    if hasattr(torch, name)
)


class Scans:
    """The pending scans, and decisions in their order. One thread at a time."""

    def __init__(self) -> None:
        self._scans = _C.TensorScans()
        self._waiting: dict[int, Callable[[_C.TensorStats], None]] = {}  # by the scans' numbers
        self._decisions: list[Callable[[], None]] = []
        self._passing: dict[int, _Passing] = {}  # by the tensors' ids

    @property
    def are_waiting(self) -> bool:
        """Whether `settle` would wait for a device."""
        return bool(self._waiting)

    @property
    def are_many(self) -> bool:
        """Whether it is time to settle."""
        return len(self._waiting) >= _MOST_WAITING

    def scan(self, tensor: torch.Tensor) -> Values:
        """Scans any tensor, in the order of the current stream; the tensor is not kept. For a DTensor this
        rank's part. An unreadable tensor has no values."""
        tensor = local_part(tensor)
        values = Values(tensor.dtype, tuple(tensor.shape))
        try:
            if tensor.layout is torch.strided and _has_a_scan(tensor.dtype):
                self._scan(tensor, values.take_both)
            else:
                with torch.no_grad():
                    self._scan_converted(tensor.detach(), values)
        except (_C.UnsupportedError, NotImplementedError):
            pass
        return values

    def scan_in_passing(self, tensor: torch.Tensor) -> Values:
        """Like `scan`, but does not read a tensor again that was read since `forget_passing` and not written
        since, as far as autograd counts writes: one module passes it to the next."""
        if tensor.is_inference() or type(tensor) is not torch.Tensor:
            return self.scan(tensor)  # writes are not counted, or the memory is hidden
        passing = self._passing.get(id(tensor))
        if passing is None or not passing.is_still(tensor):
            passing = self._passing[id(tensor)] = _Passing(tensor, self.scan(tensor))
        return passing.values

    def forget_passing(self) -> None:
        self._passing.clear()

    def then(self, decide: Callable[[], None]) -> None:
        """Calls ``decide`` when all scans so far are known, after the earlier decisions: now, or in
        `settle`."""
        self._decisions.append(decide)
        if not self._waiting:
            self.settle()

    def settle(self) -> None:
        """Waits for the scans, then decides. If a decision raises, those after it are dropped."""
        waiting, self._waiting = self._waiting, {}
        decisions, self._decisions = self._decisions, []
        if waiting:
            for number, stats in enumerate(self._scans.read()):
                waiting[number](stats)
        for decide in decisions:
            decide()

    def _scan(self, tensor: torch.Tensor, take: Callable[[_C.TensorStats], None]) -> None:
        seen = self._scans.enqueue(tensor)
        if isinstance(seen, int):
            self._waiting[seen] = take
        elif seen is not None and seen.numel > 0:
            take(seen)

    def _scan_converted(self, tensor: torch.Tensor, values: Values) -> None:
        if tensor.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        values.has_positions = tensor.layout in (torch.strided, _MKLDNN)
        plain = plain_values(tensor)
        if plain.dtype.is_complex:
            # The scan reads the parts; the magnitudes need a second scan, of a tensor of half the size.
            self._scan(plain, values.take_stats)
            self._scan(plain.abs(), values.take_magnitudes)
        elif plain.dtype.is_floating_point:
            self._scan(plain, values.take_both)
        else:
            self._scan(_as_floating_point(plain), values.take_magnitudes)


class _Passing:
    """The values of a tensor that modules pass on. Keeps no tensor; a dead tensor's id may be reused, which
    is detected."""

    __slots__ = ("_address", "_tensor", "_version", "values")

    def __init__(self, tensor: torch.Tensor, values: Values) -> None:
        self._tensor = weakref.ref(tensor)
        self._version, self._address = _state_of(tensor)
        self.values = values

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self._tensor() is tensor and (self._version, self._address) == _state_of(tensor)


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Counted writes, and the memory: ``tensor.data = other`` is not counted."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # sparse, under vmap
        return tensor._version, 0


_now = Scans()
_now_lock = threading.RLock()


def measure(tensor: torch.Tensor) -> Values:
    """One scan with its result: waits for the tensor's device. From any thread."""
    with _now_lock:
        values = _now.scan(tensor)
        _now.settle()
        return values


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Strided, with a dtype that the scan or torch's reductions support; for a sparse tensor the stored
    values."""
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is torch.sparse_coo:
        return plain_values(tensor.coalesce().values())
    if tensor.layout in _COMPRESSED:
        return plain_values(tensor.values())
    if tensor.layout is _MKLDNN:
        return plain_values(tensor.to_dense())
    if tensor.dtype in _WITHOUT_A_SCAN:
        return tensor.float()
    return tensor


def _has_a_scan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype not in _WITHOUT_A_SCAN


def _as_floating_point(tensor: torch.Tensor) -> torch.Tensor:
    """Converts integers and bools, so that the scan gives their magnitudes and nothing has to wait for them.
    In double a magnitude above 2^53 is rounded, which is invisible in three printed digits."""
    if tensor.element_size() == 1:
        return tensor.half()
    return tensor.double() if tensor.device.type != "mps" else tensor.float()  # which has no double
