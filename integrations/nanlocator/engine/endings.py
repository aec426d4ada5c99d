"""The end of a run: the error of a bad step, and the errors of ranks that have failed."""

import contextlib
import json
import os
import sys
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from nanlocator import _C
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.this_rank import is_distributed
from nanlocator.engine.tracebacks import stack_of_program
from nanlocator.engine.verdict import Verdict


def ending_error() -> BaseException | None:
    """At the interpreter's exit: the exception that ends the process."""
    return getattr(sys, "last_value", None)


def is_failure_of_peers(error: BaseException) -> bool:
    """Whether the error says that a collective or a transfer between ranks has failed, so that a peer may be
    lost. gloo and NCCL raise plain RuntimeErrors for it, too."""
    if isinstance(error, _C.AgreementError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _C.is_failure_of_peers(str(error))


def abort_collectives() -> None:
    """Aborts all groups' pending collectives; waiting threads get an error. Training cannot continue."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):  # a backend that has no abort
            group.abort()


def first_line(error: BaseException) -> str:
    """Returns ``ValueError: message`` without the message's further lines."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 300 else text[:297] + "..."


def raise_for(verdict: Verdict, run_dir: str) -> NoReturn:
    """Ends a run under policy ``stop``, on every rank. With several ranks the error's text is the headline:
    rank 0 has printed the full text, and every rank prints a traceback."""
    text = _C.format_verdict(json.dumps(verdict), run_dir)
    where = "Rank 0 printed the verdict" if is_distributed() else "The verdict is printed above"
    printed = f"{_headline(text)}\n{where}; it is also in {run_dir}/verdict.json"
    error = NonFiniteGradientError(printed if is_distributed() else text, verdict, printed)
    try:
        raise error
    except NonFiniteGradientError:
        error.__traceback__ = stack_of_program()  # for the record
        record_for_torchrun(NonFiniteGradientError(text, verdict))
    raise error.with_traceback(None)


def _headline(text: str) -> str:
    """The first line and its continuation, which is indented more than the labels."""
    first, *others = text.splitlines()
    for line in others:
        if not line.startswith("    "):
            break
        first += " " + line.strip()
    return first


def record_for_torchrun(error: BaseException) -> None:
    """Writes torchrun's error file, like torch's decorator ``record`` in scripts that use it: `error` as the
    message, with the traceback of the exception that is being handled. torchrun's summary shows both
    (elastic/multiprocessing/errors). Does nothing if torchrun has not started this process."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)
