"""Errors that end a program's step before its gradients exist, and the values that they refuse."""

import dis
import itertools
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch

from nanlocator import _C
from nanlocator.loops.evaluation import is_bad

_MOST_FRAMES = 32
_MOST_TENSORS = 64

_TORCH = str(Path(torch.__file__).parent) + os.sep

# What no value causes.
_OTHERS = (
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    TypeError,
    torch.OutOfMemoryError,
)

# What torch says where it refuses values, rather than shapes or types.
_REFUSAL = re.compile(
    r"\b(nans?|infs?|non-?finite|finite|probability)\b|between 0 and 1|p_in|positive-definite|converge"
    r"|invalid values",
    re.IGNORECASE,
)


def may_refuse_values(error: BaseException) -> bool:
    """Whether the error may be about values that are not finite: torch's ``LinAlgError``, the ``ValueError``
    of a distribution, an ``assert`` of the program."""
    return isinstance(error, Exception) and not isinstance(error, _OTHERS)


def is_refusal_by_operator(error: BaseException) -> bool:
    """Whether an operator of torch refuses values. No variable needs to hold them: ``cholesky(a + b)``."""
    return (
        isinstance(error, RuntimeError)
        and _is_raised_by_torch(error)
        and _REFUSAL.search(str(error)) is not None
    )


def values_refused_by(
    error: BaseException,
    given: list[torch.Tensor],
    inputs: list[torch.Tensor],
    innermost: int = _MOST_FRAMES,
    is_filled: Callable[[torch.Tensor], bool] = lambda _: False,
) -> list[torch.Tensor]:
    """The tensors among the variables of a function in the traceback that ``error`` may refuse: of the
    innermost function that has any, among the ``innermost`` ones; otherwise of ``inputs``, which the operator
    that raised it was given. Waits for the device.

    Where torch refuses values, each one with NaN or +Inf counts. A program fills memory with NaN on purpose,
    so where it raises the error itself without naming a NaN, only results that need a gradient and ``given``
    count, and +Inf only where the error speaks of it; if it names one, all but what ``is_filled``. An error
    of torch about something else refuses none."""
    is_torchs = _is_raised_by_torch(error)
    speaks_of_values = isinstance(error, AssertionError) or _REFUSAL.search(str(error)) is not None
    if is_torchs and not speaks_of_values:
        return []
    names_nan = re.search(r"\bnan\b", str(error), re.IGNORECASE) is not None
    others = {id(tensor) for tensor in given}

    def is_refused(tensor: torch.Tensor) -> bool:
        if not (is_torchs or tensor.requires_grad or id(tensor) in others):
            return names_nan and has_nan(tensor) and not is_filled(tensor)
        return is_bad(tensor) if speaks_of_values else has_nan(tensor)

    for frame in frames_of(error)[:innermost]:
        tensors = {id(tensor): tensor for tensor in itertools.islice(_tensors_of(frame), _MOST_TENSORS)}
        if refused := [tensor for tensor in tensors.values() if is_refused(tensor)]:
            return refused
    return list(filter(is_bad, inputs)) if is_refusal_by_operator(error) else []


def has_nan(tensor: torch.Tensor) -> bool:
    stats = _C.scan_one(tensor)
    return stats is not None and stats.nan > 0


def frames_of(error: BaseException) -> list[FrameType]:
    """Of its traceback so far, innermost first; at most 32."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][: -_MOST_FRAMES - 1 : -1]


def _is_raised_by_torch(error: BaseException) -> bool:
    """By its Python code, or by an operator, which has no frame."""
    at = error.__traceback__
    if at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    code = at.tb_frame.f_code
    is_statement = dis.opname[code.co_code[at.tb_lasti]] == "RAISE_VARARGS"  # raise, assert
    is_operators = isinstance(error, RuntimeError) and not is_statement
    return is_operators or code.co_filename.startswith(_TORCH)


def _tensors_of(frame: FrameType) -> Iterator[torch.Tensor]:
    for value in frame.f_locals.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict) and len(value) <= _MOST_TENSORS:
            yield from _C.tensors_in(value)
