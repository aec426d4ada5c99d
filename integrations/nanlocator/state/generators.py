"""The states of Python's and numpy's global generators. Each step saves them.

Both are Mersenne Twisters. To make a state of 625 numbers takes 10 to 60 µs, to copy their memory one."""

import _random
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

_WORDS = 624
_MEMORY = struct.Struct(f"{_WORDS + 1}I")


class GeneratorStates:
    """Python's ``random`` and, if numpy is imported, its global generator."""

    def save(self) -> None:
        self._python = _state_of_python()
        numpy = sys.modules.get("numpy")
        self._numpy = _state_of_numpy(numpy) if numpy is not None else None

    def restore(self) -> None:
        random.setstate(self._python())
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class ProgramGenerators:
    """A state (nanlocator.step.StepState): the same generators. ``leave``, after the last re-run, puts back
    what the program had when the first one began."""

    def __init__(self) -> None:
        self._began = GeneratorStates()
        self._left: GeneratorStates | None = None

    def save(self) -> None:
        self._began.save()

    def restore(self) -> None:
        if self._left is None:
            self._left = GeneratorStates()
            self._left.save()
        self._began.restore()

    @property
    def were_restored(self) -> bool:
        """Since the last ``leave``."""
        return self._left is not None

    def leave(self) -> None:
        if self._left is not None:
            self._left.restore()
        self._left = None


def _state_of_python() -> Callable[[], Any]:
    """A function that returns the state."""
    generator = _generator_of_python()
    if not _has_memory(generator):
        return functools.partial(_itself, random.getstate())
    memory = ctypes.string_at(id(generator) + object.__basicsize__, _MEMORY.size)
    return functools.partial(_python_state_of, memory, generator.gauss_next)


def _itself(state: Any) -> Any:
    return state


def _python_state_of(memory: bytes, next_normal: float | None) -> Any:
    index, *words = _MEMORY.unpack(memory)  # Modules/_randommodule.c, RandomObject
    return 3, (*words, index), next_normal


def _generator_of_python() -> Any:
    return getattr(random.getstate, "__self__", None)


@functools.lru_cache(1)
def _has_memory(generator: Any) -> bool:
    """Whether this interpreter has the memory of this generator, Python's, where it is read."""
    if type(generator) is not random.Random or not isinstance(generator, _random.Random):
        return False
    if _random.Random.__basicsize__ < object.__basicsize__ + _MEMORY.size:
        return False
    memory = ctypes.string_at(id(generator) + object.__basicsize__, _MEMORY.size)
    state = random.getstate()
    return bool(_python_state_of(memory, state[2]) == state)


_latest: tuple[bytes | None, Any] = (None, None)  # memory and state of numpy's generator
_numpy_generator: tuple[Any, int] = (None, 0)  # and the address of its memory


def _state_of_numpy(numpy: Any) -> Any:
    """Of its global generator. The latest one is used again if the memory is the same and held no second
    normal number, whose use changes no memory."""
    global _latest
    memory, (latest, state) = _memory_of_numpy(numpy), _latest
    if memory is None or memory != latest or state[3]:
        state = numpy.random.get_state()
        _latest = memory, state
    return state


def _memory_of_numpy(numpy: Any) -> bytes | None:
    """numpy/random/src/mt19937/mt19937.h, mt19937_state."""
    global _numpy_generator
    try:
        bits = numpy.random.mtrand._rand._bit_generator
        if bits is not _numpy_generator[0]:
            is_known = type(bits).__name__ == "MT19937"
            _numpy_generator = bits, bits.ctypes.state_address if is_known else 0
    except Exception:  # another version
        return None
    address = _numpy_generator[1]
    return ctypes.string_at(address, _MEMORY.size) if address else None
