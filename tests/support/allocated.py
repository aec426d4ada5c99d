"""Torch's use of host memory, measured by a counting allocator (counting_allocator.hpp)."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

from nanlocator import _C

LIBRARY = Path(_C.__file__).parents[2] / "tests" / "counting_allocator.so"


class Allocated:
    """The allocator is in use from the first instance to the end of the process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        for name in ("current", "peak"):
            getattr(self._library, f"counting_allocator_{name}").restype = ctypes.c_int64
        self._library.counting_allocator_set_limit.argtypes = [ctypes.c_int64]
        self._library.counting_allocator_install()

    def current(self) -> int:
        """Bytes allocated since then and not freed."""
        return self._library.counting_allocator_current()

    def peak(self) -> int:
        """The maximum of ``current()`` since ``restart_peak()``."""
        return self._library.counting_allocator_peak()

    def restart_peak(self) -> None:
        self._library.counting_allocator_restart_peak()

    @contextlib.contextmanager
    def at_most(self, bytes_: int) -> Iterator[None]:
        """A larger single allocation raises torch.OutOfMemoryError."""
        self._library.counting_allocator_set_limit(bytes_)
        try:
            yield
        finally:
            self._library.counting_allocator_set_limit(-1)
