"""``DebugUnderflowOverflow``: hooks that look at every module call, and the rule of what is reported.

One frame per call, kept as numbers; text is made (frames.py) only where it is printed. Everything that is
remembered is an attribute of the object, and ``remove()`` takes away every hook.
"""

import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from nanlocator.transformers.frames import Frame, Role, Row, finding_lines, frame_text, report_text
from nanlocator.transformers.values import Values, measure

_MOST_NESTED = 8  # containers in containers; also ends one that holds itself


class DebugOption(str, Enum):  # noqa: UP042  (prints as transformers' does, which a StrEnum would not)
    """The words of ``--debug``; equal to those of transformers."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"

    @classmethod
    def _missing_(cls, value: object) -> None:
        words = [option.value for option in cls]
        raise ValueError(f"{value} is not a valid {cls.__name__}, please select one of {words}")


class DebugUnderflowOverflow:
    """Raises in the forward of the first module that has a NaN or Inf in its weights, inputs or output, and
    prints the frames that led there; or prints every frame of chosen batches.

        debug_overflow = DebugUnderflowOverflow(model)                          # detection
        debug_overflow = DebugUnderflowOverflow(model, trace_batch_nums=[1, 3])  # and these batches traced
        with DebugUnderflowOverflow(model, verbose=True): ...                    # hooks gone afterwards

    A batch is one completed forward of ``model``, counted from 0. In a traced batch nothing raises. Arguments
    and text are those of transformers' class; ``verbose`` and ``count_masks`` are ours.

    Looks at every tensor of positional and keyword arguments and of outputs, in tuples, lists, dictionaries,
    dataclasses and ModelOutputs. A parameter is looked at again after an optimizer step, after a write that
    autograd counts, and where its module has something bad; under ``torch.no_grad`` in each batch.
    Values are looked at as they pass: one scan per tensor, which waits for the device. Calls that
    torch.compile traces are not seen. Any thread may run the model, one at a time.

    Args:
        model: the model as it is called. The hooks see what hooks that were registered earlier made of an
            output.
        max_frames_to_save: how many of the last frames a report shows; None for all since the last report.
        trace_batch_nums: batches to print in full.
        abort_after_batch_num: raise when this batch has finished.
        verbose: the rows of keyword arguments and nested values too; dtype and shape behind the metadata, and
            for a bad tensor its counts, the index of the first bad element and the range of the finite ones;
            shared modules under the name by which they were called; frames of modules that were added or
            made later (a loss). Without it such rows and frames are shown only where they hold something bad.
        count_masks: also report an input that holds only zeros and −Inf, an additive attention mask.

    Attributes:
        batch_number: batches that have ended.
        total_calls: module calls so far.
        detected_overflow: whether this batch has had something bad.

    Raises:
        TypeError, ValueError: arguments that cannot work.
        ValueError: from the model's forward, as the original does: something bad, or the batch to stop after.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Iterable[int] | None = None,
        abort_after_batch_num: int | None = None,
        *,
        verbose: bool = False,
        count_masks: bool = False,
    ) -> None:
        _check_model(model)
        self.model = model
        self.trace_batch_nums = _batch_numbers(trace_batch_nums)
        self.abort_after_batch_num = (
            None
            if abort_after_batch_num is None
            else _batch_number("abort_after_batch_num", abort_after_batch_num)
        )
        self.verbose = verbose
        self.count_masks = count_masks
        self.batch_number = 0
        self.total_calls = 0
        self.detected_overflow = False
        self._frames: deque[Frame] = deque(maxlen=_frame_count(max_frames_to_save))
        self._is_batch_start = True
        self._running = _Running()
        self._weights = _WeightLooks()
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(module, []).append(name)
        self._hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._before_call),
            *(self._hook(module) for module in self._names),
        ]
        self._late_hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    @property
    def frames(self) -> list[str]:
        """The text of the frames kept so far, oldest first."""
        return [frame_text(frame, self.verbose) for frame in self._frames]

    def remove(self) -> None:
        """Takes every hook away. May be called twice."""
        for hook in (*self._hooks, *self._late_hooks.values()):
            hook.remove()
        self._hooks, self._late_hooks = [], weakref.WeakKeyDictionary()
        self._weights.remove()

    def __enter__(self) -> "DebugUnderflowOverflow":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DebugUnderflowOverflow":
        """A copied model's hooks lead here, where its modules are strangers and are passed over."""
        return self

    # ---- Hooks ----------------------------------------------------------------------------------

    def _hook(self, module: nn.Module) -> Any:
        return module.register_forward_hook(self._after_call, with_kwargs=True)

    def _hook_late(self, module: nn.Module) -> None:
        # A shallow copy (copy.copy) has its hooks in common with its original.
        if self._after_call not in module._forward_hooks.values():
            self._late_hooks[module] = self._hook(module)

    def _before_call(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """For every module of the process: only here can a call be seen of one that was added later."""
        if torch.compiler.is_compiling():
            return
        stack = self._running.stack
        names = self._names.get(module)
        # What a forward that raised has left goes here: checkpoints end their second forward so, too.
        if module is self.model:
            stack.clear()
        elif names is not None:
            self._running.leave(module)
        caller = stack[-1] if stack else None
        if names is not None:
            stack.append((module, names[0] if len(names) == 1 else _nearest(names, caller)))
        elif caller is not None:
            self._hook_late(module)
            stack.append((module, _name_below(caller, module)))

    def _after_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        names = self._names.get(module)
        called_as = self._running.leave(module) or (names[0] if names is not None else None)
        if called_as is None:
            return  # a copy of a watched module, outside the model
        rows = self._look(module, args, kwargs, output)
        overflows = [row for row in rows if self._is_overflow(row)]
        if names is None and not (self.verbose or overflows):
            return  # the original has no frame for it
        frame = Frame(
            name=called_as if self.verbose or names is None else names[0],
            module_class=type(module).__name__,
            rows=[row for row in rows if self.verbose or not row.is_extra or row in overflows],
            starts_batch=self.batch_number if self._is_batch_start else None,
        )
        self._take(frame, overflows, is_last_of_batch=module is self.model)

    # ---- Frames ---------------------------------------------------------------------------------

    def _take(self, frame: Frame, overflows: list[Row], is_last_of_batch: bool) -> None:
        batch = self.batch_number
        self.detected_overflow = bool(overflows) or (self.detected_overflow and not self._is_batch_start)
        self._is_batch_start = False
        self.total_calls += 1
        if is_last_of_batch:
            self._end_batch()
        for row in overflows:
            print("\n".join(finding_lines(row.values, row.context)))  # type: ignore[arg-type]
        self._frames.append(frame)
        if batch in self.trace_batch_nums:
            print(frame_text(frame, self.verbose))
            self._frames.clear()
        elif overflows:
            if self._running.is_in(self.model):
                self._end_batch()
            self._report(batch)
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise ValueError(
                f"DebugUnderflowOverflow: aborting after {self.batch_number} batches due to"
                f" `abort_after_batch_num={self.abort_after_batch_num}` arg"
            )

    def _end_batch(self) -> None:
        self.batch_number += 1
        self._is_batch_start = True
        if not torch.is_grad_enabled():  # no optimizer step will tell
            self._weights.forget_all()

    def _report(self, batch: int) -> None:
        print(report_text(self._frames, batch, self.verbose))
        self._frames.clear()
        self._running.stack.clear()
        raise ValueError(
            "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
            "Please scroll up above this traceback to see the activation values prior to this event."
        )

    # ---- Rows -----------------------------------------------------------------------------------

    def _look(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> list[Row]:
        rows = [*_input_rows(args, kwargs), *_output_rows(output)]
        if any(self._is_overflow(row) for row in rows):
            self._weights.forget(module)
        return [*self._weights.rows(module), *rows]

    def _is_overflow(self, row: Row) -> bool:
        if row.values is None or not row.values.is_bad:
            return False
        return self.count_masks or row.role is not Role.INPUT or not row.values.is_additive_mask


class _Running(threading.local):
    """The modules whose calls this thread is in, outermost first, each with the name of this call."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, str]] = []

    def leave(self, module: nn.Module) -> str | None:
        """The name of the innermost call of ``module``, which is over, with all below it that raised."""
        for depth in range(len(self.stack) - 1, -1, -1):
            if self.stack[depth][0] is module:
                name = self.stack[depth][1]
                del self.stack[depth:]
                return name
        return None

    def is_in(self, module: nn.Module) -> bool:
        return any(running is module for running, _ in self.stack)


class _WeightLooks:
    """What was seen of each parameter, for as long as it cannot have changed."""

    def __init__(self) -> None:
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> (state, Values)
        self._steps = 0
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def rows(self, module: nn.Module) -> list[Row]:
        return [Row(Role.WEIGHT, name, self._values(p)) for name, p in module.named_parameters(recurse=False)]

    def forget(self, module: nn.Module) -> None:
        """A write through ``.data`` leaves no trace: where it matters the memory is read again."""
        for parameter in module.parameters(recurse=False):
            self._seen.pop(parameter, None)

    def forget_all(self) -> None:
        self._seen.clear()

    def remove(self) -> None:
        self._hook.remove()
        self._seen.clear()

    def _values(self, parameter: torch.Tensor) -> Values:
        if parameter.is_inference() or type(parameter) is not nn.Parameter:
            return measure(parameter)  # nobody counts the writes, or the memory is hidden
        # The address: `parameter.data = other` and `model.half()` are not counted as writes.
        state = (self._steps, parameter._version, parameter.data_ptr())
        seen = self._seen.get(parameter)
        if seen is None or seen[0] != state:
            seen = self._seen[parameter] = (state, measure(parameter))
        return seen[1]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1


def _input_rows(args: Any, kwargs: dict[str, Any]) -> Iterator[Row]:
    for i, value in enumerate(args):
        yield from _rows(Role.INPUT, f"input[{i}]", value)
    for name, value in kwargs.items():
        yield from _nested_rows(Role.INPUT, f"input[{name}]", value, 0)


def _output_rows(output: Any) -> Iterator[Row]:
    """The original goes two tuples deep."""
    if not isinstance(output, tuple):
        yield from _rows(Role.OUTPUT, "output", output)
        return
    for i, value in enumerate(output):
        if isinstance(value, tuple):
            for j, item in enumerate(value):
                yield from _rows(Role.OUTPUT, f"output[{i}][{j}]", item)
        else:
            yield from _rows(Role.OUTPUT, f"output[{i}]", value)


def _rows(role: Role, context: str, value: Any) -> Iterator[Row]:
    """The row that the original has, and what it does not look into."""
    if isinstance(value, torch.Tensor):
        yield Row(role, context, measure(value))
    else:
        yield Row(role, context, None, type(value).__name__)
        yield from _nested_rows(role, context, value, 0)


def _nested_rows(role: Role, context: str, value: Any, depth: int) -> Iterator[Row]:
    """The tensors in ``value``; items as ``[key]``, fields as ``.name``."""
    if isinstance(value, torch.Tensor):
        yield Row(role, context, measure(value), is_extra=True)
        return
    if value is None or depth >= _MOST_NESTED:
        return
    fields = getattr(type(value), "__dataclass_fields__", None)
    if isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{context}.{key}" if fields else f"{context}[{key}]"
            yield from _nested_rows(role, where, item, depth + 1)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _nested_rows(role, f"{context}[{i}]", item, depth + 1)
    elif fields:
        for name in fields:
            yield from _nested_rows(role, f"{context}.{name}", getattr(value, name, None), depth + 1)


def _nearest(names: list[str], caller: tuple[nn.Module, str] | None) -> str:
    """Of several names the one closest below the caller, else the first."""
    if caller is None:
        return names[0]
    prefix = f"{caller[1]}." if caller[1] else ""
    below = [name for name in names if name.startswith(prefix) and name != caller[1]]
    return min(below or names, key=lambda name: name.count("."))


def _name_below(caller: tuple[nn.Module, str], module: nn.Module) -> str:
    """Of a module that was added later: where its caller holds it, else its class."""
    parent, path = caller
    held_as = next((name for name, m in parent.named_modules() if m is module), type(module).__name__)
    return f"{path}.{held_as}" if path else held_as


# ---- Arguments ----------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"DebugUnderflowOverflow: `model` must be a torch.nn.Module, got {type(model).__name__}; hand "
            "over the model itself, as it is called in training"
        )
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"DebugUnderflowOverflow: {type(model).__name__} has no parameters, so there is nothing to train "
            "in it; hand over the whole model, or use detect_overflow(tensor, 'context') for single tensors"
        )


def _frame_count(count: int | None) -> int | None:
    if count is not None and (not isinstance(count, int) or count < 0):
        raise ValueError(
            f"DebugUnderflowOverflow: `max_frames_to_save={count!r}` must be 0 or more, or None for all"
        )
    return count


def _batch_numbers(numbers: Iterable[int] | None) -> list[int]:
    if numbers is None:
        return []
    if not isinstance(numbers, Iterable) or isinstance(numbers, str):
        raise TypeError(
            f"DebugUnderflowOverflow: `trace_batch_nums={numbers!r}` must be a list of batch numbers, "
            "like [1, 3]"
        )
    return [_batch_number("trace_batch_nums", number) for number in numbers]


def _batch_number(argument: str, number: int) -> int:
    try:
        index = operator.index(number)  # numpy's integers too
    except TypeError:
        index = -1
    if index < 0:
        raise ValueError(
            f"DebugUnderflowOverflow: `{argument}` has {number!r}; batches are counted from 0, so a batch "
            "number is an integer that is 0 or more"
        )
    return index
