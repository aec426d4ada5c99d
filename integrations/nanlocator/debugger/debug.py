"""``DebugUnderflowOverflow``: hooks on every module call, and the rule for reports.

The scans of a call's values start when it returns (scans.py). They are judged in the order of the calls once
the results are known: host memory's at once, an accelerator's when the batch's forward ends. There is one
frame per call, kept as numbers; text is made (frames.py) only when it is printed. The object holds all state,
and ``remove()`` removes every hook.
"""

import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nanlocator.calls.modules import nearest_path
from nanlocator.debugger.backward import BackwardCall, BackwardFrames, StartedCall, is_in_backward
from nanlocator.debugger.frames import Frame, Role, Row, frame_text, overflow_lines, report_text
from nanlocator.debugger.masks import IntendedMasks
from nanlocator.debugger.output import Output, describe_rank
from nanlocator.debugger.places import Place, input_places, output_places
from nanlocator.debugger.process_hooks import ProcessHooks
from nanlocator.debugger.ranks import Finding, PeerRanks, next_number
from nanlocator.debugger.scans import Scans
from nanlocator.debugger.values import Values
from nanlocator.engine.endings import record_for_torchrun
from nanlocator.engine.python_versions import add_note
from nanlocator.engine.this_rank import is_distributed


class DebugOption(str, Enum):
    """The values of ``--debug``; equal to those of transformers."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"

    @classmethod
    def _missing_(cls, value: object) -> None:
        words = [option.value for option in cls]
        raise ValueError(f"{value} is not a valid {cls.__name__}, please select one of {words}")


class DebugUnderflowOverflow:
    """Raises in the forward of the first module that has a NaN or Inf in its weights, inputs or output, and
    prints the frames before it; or prints every frame of chosen batches.

        debug_overflow = DebugUnderflowOverflow(model)                          # detection
        debug_overflow = DebugUnderflowOverflow(model, trace_batch_nums=[1, 3])  # and these batches traced
        with DebugUnderflowOverflow(model, verbose=True): ...                    # hooks gone afterwards

    A batch is one completed forward of ``model``, counted from 0. In a traced batch nothing raises. The first
    four arguments and the text are those of transformers' class; the other arguments are ours.

    With several ranks in torch.distributed, construct it on each of them. Each writes its text to a file,
    rank 0 also prints it, and when one raises all do (see ranks.py). It uses no collective.

    Checks every tensor of positional and keyword arguments and of outputs, in tuples, lists, dictionaries,
    dataclasses and ModelOutputs. A parameter is read again after an optimizer step, after a write that
    autograd counts, and if its module has a bad value; under ``torch.no_grad`` in each batch. Other values
    are scanned once per tensor. Tensors in host memory are judged at once, and the module's own forward
    raises. Those on an accelerator cause no wait: they are read together and judged in order when the forward
    of ``model``, the forward of a module called outside of it, or the backward pass ends, which then raises;
    earlier in a traced batch, after some thousand tensors, in ``remove()`` and ``frames``. If another error
    leaves the forward, the report is printed and the error gets a note. Calls that torch.compile traces are
    not seen. Any thread may run the model, one at a time.

    Args:
        model: the model as it is called. The hooks see an output after hooks that were
            registered earlier have changed it.
        max_frames_to_save: number of latest frames in a report; None for all since the last report.
        trace_batch_nums: batches to print in full.
        abort_after_batch_num: raise when this batch has finished; with ``backward`` before the next one.
        verbose: the rows of keyword arguments and nested values too; dtype and shape behind the metadata, and
            for a bad tensor its counts, the index of the first bad element and the range of the finite ones;
            shared modules under the name by which they were called; frames of modules that were added or
            made later (a loss). Without it such rows and frames are shown only if they hold a bad value.
        count_masks: also report infinities that are intended: an input that holds only zeros and −Inf, an
            additive attention mask, and scores with −Inf at just the elements that a mask among the inputs
            of their module masks (masks.py). An accelerator's tensors are freed before the rule runs: from
            the next batch on, a module whose first bad values are only −Inf is judged as it returns.
        backward: also frames of backward, and detection there: for each call of a module the gradients of its
            outputs, and what this call alone contributes to those of its inputs and weights. If the loss
            is scaled for fp16, this reports each overflow that the scaler would have skipped.
        output_dir: for the text of each rank, ``debug_rank{r}.txt``; and for text that stdout does not take.

    Attributes:
        batch_number: batches that have ended. All three attributes count judged values only.
        total_calls: module calls so far.
        detected_overflow: whether this batch has had a bad value.

    Raises:
        TypeError, ValueError: arguments that cannot work.
        ValueError: from the model's forward, as the original does, or from backward: a bad value, on this
            rank or another, or the batch to stop after.
        OSError: stdout, the file and stderr all failed; the error holds the text.
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
        backward: bool = False,
        output_dir: str | os.PathLike[str] = "nanlocator_run",
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
        self._scans = Scans()
        self._weights = _WeightScans(self._scans)
        self._judged_at_once: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # because of their −Inf
        self._pass_to_settle: int | None = None  # the backward pass at whose end the scans are read
        self._masks = IntendedMasks()
        self._output = Output(output_dir)
        self._number = next_number()
        self._peers: PeerRanks | None = None
        self._has_heard = False  # another rank has a finding
        self._backward = (
            BackwardFrames(self._scans, self._take_backward, lambda batch: batch in self.trace_batch_nums)
            if backward
            else None
        )
        self._last_backward: int | None = None  # batch of the backward whose frames came last
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(module, []).append(name)
        self._hooks = [
            ProcessHooks(self._before_call, self._weights.count_step),
            *(self._hook(module) for module in self._names),
            model.register_forward_hook(self._after_model, always_call=True),
        ]
        if backward:
            self._hooks += [
                module.register_forward_pre_hook(self._before_call_with_keywords, with_kwargs=True)
                for module in self._names
            ]
        self._late_hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    @property
    def frames(self) -> list[str]:
        """The text of the kept frames, oldest first. Waits for scans that are not yet judged."""
        self._scans.settle()
        return [frame_text(frame, self.verbose) for frame in self._frames]

    def remove(self) -> None:
        """Judges the pending scans and removes every hook. May be called twice."""
        try:
            self._scans.settle()
        finally:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in (*self._hooks, *self._late_hooks.values()):
            hook.remove()
        self._hooks, self._late_hooks = [], weakref.WeakKeyDictionary()
        self._weights.forget_all()
        if self._backward is not None:
            self._backward.remove()
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def __enter__(self) -> "DebugUnderflowOverflow":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: Any) -> None:
        if error is not None:
            self._settle_before(error)
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DebugUnderflowOverflow":
        """A copied model's hooks lead here; its modules are unknown and ignored."""
        return self

    # ---- Hooks ----------------------------------------------------------------------------------

    def _hook(self, module: nn.Module) -> Any:
        return module.register_forward_hook(self._after_call, with_kwargs=True)

    def _hook_late(self, module: nn.Module) -> None:
        # A shallow copy (copy.copy) shares its hooks with the original.
        if self._after_call not in module._forward_hooks.values():
            self._late_hooks[module] = self._hook(module)

    def _before_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Runs for every module of the process: only here can calls of modules be seen that were added
        later."""
        stack = self._running.stack
        names = self._names.get(module)
        # Removes leftovers of a forward that raised: checkpoints also end their second forward so.
        if module is self.model:
            stack.clear()
        elif names is not None:
            self._running.leave(module)
        caller = stack[-1] if stack else None
        if names is not None:
            if caller is None:
                self._before_outermost_call()
            call = _Call(module, nearest_path(names, caller.name if caller is not None else None))
        elif caller is not None:
            self._hook_late(module)
            call = _Call(module, _name_below(caller, module))
        else:
            return
        self._raise_for_another_rank()
        if self._backward is not None and torch.is_grad_enabled():
            call.started = StartedCall(args)
        stack.append(call)

    def _before_call_with_keywords(
        self, module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._running.stack
        if kwargs and stack and stack[-1].module is module and stack[-1].started is not None:
            stack[-1].started.add_inputs((), kwargs)

    def _before_outermost_call(self) -> None:
        if self._peers is None and is_distributed():
            self._peers = PeerRanks(self._number, self._hear)
        self._scans.forget_passing()
        if is_in_backward():
            return
        self._scans.settle()  # leftovers of a forward or backward that raised
        if self._backward is not None:
            self._backward.forget_open()
            self._raise_after_last_batch()

    def _after_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        names = self._names.get(module)
        call = self._running.leave(module)
        if call is not None:
            called_as = call.name
        elif names is not None:
            called_as = names[0]
        else:
            return  # a copy of a watched module, outside the model
        name = called_as if self.verbose or names is None else names[0]
        if self._backward is not None and call is not None and call.started is not None:
            self._backward.follow(call.started, module, output, name, self.batch_number)
        ended = _EndedCall(
            module,
            name,
            is_late=names is None,
            is_inside_model=self._running.is_in(self.model),
            inputs=[(place, self._row_of(place)) for place in input_places(args, kwargs)],
            outputs=[(place, self._row_of(place)) for place in output_places(output)],
            weights=self._weights.rows(module),
        )
        self._scans.then(lambda: self._judge(ended))
        if self._scans.are_waiting:
            self._settle_where_due(module)
            ended.let_tensors_go()

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also runs if the forward raises, without an output."""
        error = sys.exc_info()[1]
        if module is self.model and self._scans.are_waiting and error is not None:
            self._settle_before(error)

    # ---- Reading the scans -----------------------------------------------------------------------

    def _settle_where_due(self, module: nn.Module) -> None:
        is_outermost = module is self.model or not self._running.stack
        if (
            (is_outermost and not is_in_backward())
            or self.batch_number in self.trace_batch_nums
            or module in self._judged_at_once
            or self._scans.are_many
        ):
            self._scans.settle()
        elif is_in_backward():
            self._settle_after_pass()

    def _settle_after_pass(self) -> None:
        """For the second forward of a checkpoint, which runs part by part: its scans are read together,
        too."""
        number = torch._C._current_graph_task_id()
        if number != self._pass_to_settle:
            self._pass_to_settle = number
            torch.autograd.Variable._execution_engine.queue_callback(self._scans.settle)

    def _settle_before(self, error: BaseException) -> None:
        """Values seen before ``error`` may be its cause: prints the report and adds a note to the error."""
        try:
            self._scans.settle()
        except ValueError as finding:
            add_note(error, f"nanlocator: before this, {finding}")

    # ---- Frames ---------------------------------------------------------------------------------

    def _judge(self, call: "_EndedCall") -> None:
        bad_values = [
            row for place, row in call.values() if row.is_bad and not self._is_meant(place, row, call)
        ]
        if bad_values:
            call.weights = self._weights.scan_again(call.module)
        overflows = [*(row for row in call.weights if row.is_bad), *bad_values]
        if call.is_late and not (self.verbose or overflows):
            return  # the original has no frame for it
        rows = [*call.weights, *(row for _, row in call.values())]
        frame = Frame(
            name=call.name,
            module_class=type(call.module).__name__,
            rows=[row for row in rows if self.verbose or not row.is_extra or row in overflows],
            starts=f"batch number={self.batch_number}" if self._is_batch_start else None,
        )
        self._take(frame, overflows, call)

    def _is_meant(self, place: Place, row: Row, call: "_EndedCall") -> bool:
        if self.count_masks or row.values is None:
            return False
        is_meant = self._masks.is_meant(place, row.values, [(p, r.values) for p, r in call.inputs])
        if is_meant is None:
            self._judged_at_once.add(call.module)
        return is_meant is not False

    def _take(self, frame: Frame, overflows: list[Row], call: "_EndedCall") -> None:
        batch = self.batch_number
        self.detected_overflow = bool(overflows) or (self.detected_overflow and not self._is_batch_start)
        self._is_batch_start = False
        self.total_calls += 1
        if call.module is self.model:
            self._end_batch()
        self._keep(frame, overflows, batch)
        if overflows and batch not in self.trace_batch_nums:
            if call.is_inside_model:
                self._end_batch()
            self._report(f"during batch_number={batch}", batch, frame, overflows)
        if self._backward is None:
            self._raise_after_last_batch()

    def _keep(self, frame: Frame, overflows: list[Row], batch: int) -> None:
        for row in overflows:
            self._output.write("\n".join(overflow_lines([row])))
        self._frames.append(frame)
        if batch in self.trace_batch_nums:
            self._output.write(frame_text(frame, self.verbose))
            self._frames.clear()

    def _end_batch(self) -> None:
        self.batch_number += 1
        self._is_batch_start = True
        self._last_backward = None
        if not torch.is_grad_enabled():  # no optimizer step to notice
            self._weights.forget_all()

    def _take_backward(self, call: BackwardCall, rows: list[Row]) -> None:
        overflows = [row for row in rows if row.is_bad]
        is_first = self._last_backward != call.batch
        self._last_backward = call.batch
        frame = Frame(
            name=call.name,
            module_class=call.module_class,
            rows=rows,
            starts=f"backward of batch number={call.batch}" if is_first else None,
        )
        self.detected_overflow = self.detected_overflow or bool(overflows)
        self._keep(frame, overflows, call.batch)
        if overflows and call.batch not in self.trace_batch_nums:
            self._report(f"during backward of batch_number={call.batch}", call.batch, frame, overflows)

    def _report(self, when: str, batch: int, frame: Frame, overflows: list[Row]) -> None:
        text = self._write_last_frames(f"Detected inf/nan {when}")
        self._running.stack.clear()
        message = (
            "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
            "Please scroll up above this traceback to see the activation values prior to this event."
        )
        if self._peers is not None:
            what = f"{frame.name} {frame.module_class}: {', '.join(overflow_lines(overflows))}".strip()
            file = str(self._output.path)
            self._peers.publish(batch, what, text, file)
            message += f" This is {describe_rank()}, {when}: {what}. Its frames are in {file}"
        _raise(message)

    def _write_last_frames(self, headline: str) -> str:
        kind = "forward frames" if self._backward is None else "frames"
        text = report_text(self._frames, headline, kind, self.verbose)
        self._output.write(text)
        self._frames.clear()
        return text

    def _raise_after_last_batch(self) -> None:
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise ValueError(
                f"DebugUnderflowOverflow: aborting after {self.batch_number} batches due to"
                f" `abort_after_batch_num={self.abort_after_batch_num}` arg"
            )

    # ---- Other ranks ----------------------------------------------------------------------------

    def _hear(self, finding: Finding) -> None:
        """Runs on a thread: this rank may be waiting in a collective that the other will never enter."""
        self._has_heard = True
        self._output.write_on_rank_0(f"{finding.report}\nDebugUnderflowOverflow: {finding}")

    def _raise_for_another_rank(self) -> None:
        if self._peers is None or not self._has_heard:
            return
        self._has_heard = False
        self._scans.settle()  # raises if this rank has a finding, too
        if (finding := self._peers.take_finding()) is None:
            return
        self._write_last_frames(f"Stopped during batch_number={self.batch_number}: {finding}")
        self._running.stack.clear()
        _raise(
            "DebugUnderflowOverflow: inf/nan detected on another rank, aborting as there is no point running "
            f"further: {finding}. This is {describe_rank()}; its last frames are in {self._output.path}"
        )

    def _row_of(self, place: Place) -> Row:
        value = place.value
        if isinstance(value, torch.Tensor):
            return Row(place.role, place.context, self._scans.scan_in_passing(value), is_extra=place.is_extra)
        return Row(place.role, place.context, None, type(value).__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """A running call."""

    module: nn.Module
    name: str
    started: StartedCall | None = None  # for frames of backward


@dataclass(slots=True, eq=False)
class _EndedCall:
    """A returned call, until it is judged."""

    module: nn.Module
    name: str
    is_late: bool  # the module was added or made after the debugger
    is_inside_model: bool
    inputs: list[tuple[Place, Row]]
    outputs: list[tuple[Place, Row]]
    weights: list[Row]

    def values(self) -> Iterator[tuple[Place, Row]]:
        yield from self.inputs
        yield from self.outputs

    def let_tensors_go(self) -> None:
        """Releases the tensors before they are judged, because their memory is needed."""
        for place, _ in self.values():
            place.value = None


class _Running(threading.local):
    """The running module calls of this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []

    def leave(self, module: nn.Module) -> "_Call | None":
        """Removes the innermost call of ``module``, which has ended, and all calls below it that raised."""
        for depth in range(len(self.stack) - 1, -1, -1):
            if self.stack[depth].module is module:
                call = self.stack[depth]
                del self.stack[depth:]
                return call
        return None

    def is_in(self, module: nn.Module) -> bool:
        return any(call.module is module for call in self.stack)


class _WeightScans:
    """The scan of each parameter, kept while the parameter cannot have changed."""

    def __init__(self, scans: Scans) -> None:
        self._scans = scans
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> (state, Values)
        self._steps = 0

    def count_step(self) -> None:
        self._steps += 1

    def rows(self, module: nn.Module) -> list[Row]:
        return [Row(Role.WEIGHT, name, self._values(p)) for name, p in module.named_parameters(recurse=False)]

    def scan_again(self, module: nn.Module) -> list[Row]:
        """Reads the memory again, because a write through ``.data`` leaves no trace."""
        for parameter in module.parameters(recurse=False):
            self._seen.pop(parameter, None)
        rows = self.rows(module)
        self._scans.settle()
        return rows

    def forget_all(self) -> None:
        self._seen.clear()

    def _values(self, parameter: torch.Tensor) -> Values:
        if parameter.is_inference() or type(parameter) is not nn.Parameter:
            return self._scans.scan(parameter)  # writes are not counted, or the memory is hidden
        # Includes the address: `parameter.data = other` and `model.half()` do not count as writes.
        state = (self._steps, parameter._version, parameter.data_ptr())
        seen = self._seen.get(parameter)
        if seen is None or seen[0] != state:
            seen = self._seen[parameter] = (state, self._scans.scan(parameter))
        return seen[1]


def _raise(message: str) -> None:
    try:
        raise ValueError(message)
    except ValueError as error:
        record_for_torchrun(error)
        raise


def _name_below(caller: _Call, module: nn.Module) -> str:
    """For a module that was added later: its caller's attribute, else its class."""
    held_as = next((name for name, m in caller.module.named_modules() if m is module), type(module).__name__)
    return f"{caller.name}.{held_as}" if caller.name else held_as


# ---- Arguments ----------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"DebugUnderflowOverflow: `model` must be a torch.nn.Module, got {type(model).__name__}; pass "
            "the model itself, as it is called in training"
        )
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"DebugUnderflowOverflow: {type(model).__name__} has no parameters, so there is nothing to train "
            "in it; pass the whole model, or use detect_overflow(tensor, 'context') for single tensors"
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
        index = operator.index(number)  # also accepts numpy's integers
    except TypeError:
        index = -1
    if index < 0:
        raise ValueError(
            f"DebugUnderflowOverflow: `{argument}` has {number!r}; expected an integer, 0 or more, "
            "because batches are counted from 0"
        )
    return index
