"""Errors that end a program's step before its gradients exist, and the values that they refuse."""

import dis
import itertools
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

_TORCH = str(Path(torch.__file__).parent)

# What no value causes.
_OTHERS = (ImportError, OSError, MemoryError, NameError, AttributeError, torch.OutOfMemoryError)


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


def values_refused_by(error: BaseException, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """What of ``bad_values_at`` the error may be about. A program fills memory with NaN on purpose, too, so
    unless torch itself refuses values, only results that need a gradient and ``given`` count."""
    inputs = {id(tensor) for tensor in given}
    is_refusal = _is_raised_by_torch(error) and _REFUSAL.search(str(error)) is not None
    return bad_values_at(error, lambda each: is_refusal or each.requires_grad or id(each) in inputs)


def bad_values_at(
    error: BaseException, counts: Callable[[torch.Tensor], bool] = lambda _: True
) -> list[torch.Tensor]:
    """The tensors with NaN or +Inf among the variables of the innermost function in the traceback that has
    any that ``counts``. Waits for the device."""
    for frame in _frames_of(error):
        tensors = {id(tensor): tensor for tensor in itertools.islice(_tensors_of(frame), _MOST_TENSORS)}
        if bad := [tensor for tensor in tensors.values() if counts(tensor) and is_bad(tensor)]:
            return bad
    return []


def _frames_of(error: BaseException) -> list[FrameType]:
    """Innermost first."""
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
