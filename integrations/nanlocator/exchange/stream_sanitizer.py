"""Runs PyTorch's stream sanitizer (torch/cuda/_sanitizer.py) over one pass of a re-run: finds operators that
used the same memory on two streams of a GPU, neither of which waited for the other.

It sees each operator from Python, and events, streams and allocations through callbacks that cannot be
removed (torch/cuda/_gpu_trace.py): each later allocation calls Python until the process ends. So it is only
for runs that stop. The sanitizer itself ends a program at its first finding; here the pass continues.

Those callbacks import a module, which fails while an exception propagates through C++: "SystemError: ...
returned NULL without setting an exception" (seen with torch 2.11 on an H100). Checkpointed regions end their
recomputation with an exception (torch/utils/checkpoint.py) that releases tensors, so from here on they are
recomputed to their end.
"""

import contextlib
import dataclasses
import itertools
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_OWN = tuple(os.path.join(folder, "") for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PYTHONS = os.path.join(sysconfig.get_path("stdlib"), "")
_MOST_OPERATORS = 50_000  # each keeps its call stack: about 100 us and 4 KB
_INSTALLED = ("/site-packages/", "/dist-packages/")

Line = tuple[str, int, str, str]  # file, line, function, text


@dataclasses.dataclass(frozen=True)
class StreamAccess:
    """An operator that used memory that another operator uses on another stream."""

    is_write: bool
    operator: str
    line: Line | None  # of the program; None in backward
    other_operator: str
    other_line: Line | None
    is_backward: bool
    address: int  # of the tensor's first element
    parameter: str = ""  # its weight or gradient begins at ``address``

    @property
    def place(self) -> tuple[Any, ...]:
        return (self.is_write, self.operator, self.line, self.other_operator, self.other_line)


def is_available() -> bool:
    """Whether this process uses a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


@contextlib.contextmanager
def sanitised_streams() -> Iterator[list[StreamAccess]]:
    """Yields the findings until the block ends, each place of the program once. Waits for the device first,
    because earlier work is in order."""
    from torch.cuda import _gpu_trace

    registries = [each for each in vars(_gpu_trace).values() if hasattr(each, "callback_list")]
    callbacks = [list(registry.callback_list) for registry in registries]
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    found: dict[tuple[Any, ...], StreamAccess] = {}
    operators = itertools.count()
    Patches(__name__).put(points.CHECKPOINT_EARLY_STOP, False)  # for good
    torch.cuda.synchronize()
    mode = CUDASanitizerDispatchMode()

    def collect(handle: Any, *arguments: Any) -> list[Any]:
        if next(operators) >= _MOST_OPERATORS:
            return []
        is_backward = torch._C._current_graph_task_id() != -1
        for error in handle(*arguments):
            access = _access_of(error, is_backward)
            found.setdefault(access.place, access)
        return []  # no error, so that the pass continues

    Patches(__name__).wrap(points.STREAM_SANITIZER, collect, of=mode.event_handler)
    accesses: list[StreamAccess] = []
    try:
        with mode:
            yield accesses
    finally:
        accesses += found.values()
        for registry, known in zip(registries, callbacks, strict=True):
            registry.callback_list[:] = known


def _access_of(error: Any, is_backward: bool) -> StreamAccess:
    current, previous = error.current_access, error.previous_access
    return StreamAccess(
        is_write=current.type.name == "WRITE",
        operator=_name_of(current.operator),
        line=_line_of(current.stack_trace),
        other_operator=_name_of(previous.operator),
        other_line=_line_of(previous.stack_trace),
        is_backward=is_backward,
        address=error.data_ptr,
    )


def _name_of(schema: Any) -> str:
    """The operator's name, such as "aten::add.Tensor", from a schema or its text."""
    return str(schema).split("(", 1)[0]


def _line_of(stack: traceback.StackSummary) -> Line | None:
    """The program's innermost line, else an installed package's."""
    framework = None
    for frame in reversed(stack):
        is_installed = any(folder in frame.filename for folder in _INSTALLED)  # may lie below Python's folder
        if frame.filename.startswith((*_OWN, "<") if is_installed else (*_OWN, _PYTHONS, "<")):
            continue
        line = (frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip())
        if not is_installed:
            return line
        framework = framework or line
    return framework
