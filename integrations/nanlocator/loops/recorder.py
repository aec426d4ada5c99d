"""Records a step so that it can be executed again without a closure.

Calls of the watched modules and of ``backward`` are kept with their arguments, data as copies; the engine
records the operators between them (nanlocator/recorder/step_recorder.hpp). Only the generators' states before
each call are copied besides, nothing is scanned, and no value, result or random number changes.

There is one recorder at a time, for the thread that made it. While it exists it wraps
``torch.nn.Module.__call__`` and autograd's entry of ``torch.autograd``.
"""

import contextlib
import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._C._distributed_c10d import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from nanlocator import _C
from nanlocator.calls.modules import class_name, local_part
from nanlocator.engine.blocked_rerun import not_blocked
from nanlocator.engine.driver import Named
from nanlocator.engine.this_rank import is_distributed, log
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches, weakly
from nanlocator.loops.errors import (
    frames_of,
    is_refusal_by_operator,
    may_refuse_values,
    values_refused_by,
)
from nanlocator.loops.evaluation import Evaluation, is_bad
from nanlocator.loops.loaded_batches import LoadedBatches, are_equal
from nanlocator.loops.plain import PlainAdapter, PlainPass, held_parameters
from nanlocator.sharding import fsdp2
from nanlocator.sharding.pipelining import Pipeline
from nanlocator.state import lightning_steps
from nanlocator.state.batches import KeptBatch
from nanlocator.state.buffers import Buffers
from nanlocator.state.containers import mapped, replaced, tensors_beside, tensors_of
from nanlocator.state.generators import GeneratorStates
from nanlocator.state.surroundings import Surrounded, Surroundings
from nanlocator.state.switches import Switches, switches_of

T = TypeVar("T")

# Calls under `no_grad` that a step keeps. A rollout has more; of its results only the line is known.
_MOST_CALLS_WITHOUT_GRADIENT = 16

# Data that is not copied, and samples of its content; None if it is not sampled.
_ByReference = list[tuple[torch.Tensor, torch.Tensor | None]]


class Follower(Protocol):
    def before_other_forward(self) -> None:
        """Before the first call of each module without a watched parameter."""

    def names_of_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """The watched modules; "" has no name."""

    def before_forward(self) -> None:
        """Before a call of a module that has watched parameters."""

    def before_backward(self, roots: list[torch.Tensor]) -> None:
        """``roots``: the backward's roots; empty for a pipeline, which has its own."""

    def after_backward(self) -> None:
        """After gradients have been written."""


class StepRecorder:
    """Records the steps that train ``parameters``.

    Args:
        parameters: a module that has one of them below it is kept as a call, every other module as the
            operators that it executes.
        follower: is called at the events of the program.
        most_bytes: limit of the memory for operators outside of modules; a step that needs more is not
            executed again and reports it.
    """

    _active: "StepRecorder | None" = None

    def __init__(
        self,
        parameters: list[torch.Tensor],
        follower: Follower,
        most_bytes: int,
        batches: LoadedBatches | None = None,
    ) -> None:
        if StepRecorder._active is not None:
            raise _C.UsageError(
                "this process already records a training step: pass all models and optimizers to one "
                "nanlocator.watch, or call remove() on the other one first"
            )
        self._engine = _C.StepRecorder(weakly(self._function_call), most_bytes)
        self._thread = threading.get_ident()
        self._follower = weakref.proxy(follower)  # because its wrappers keep it until it is removed
        self._depth = 0  # number of running calls and backwards, nested
        self._is_in_module = False  # the outermost of them is a module's call
        self.is_in_backward = False  # a backward into the leaves' gradients is running
        self._batches = batches or LoadedBatches()
        self.has_seen_other_thread = False  # which calls a watched module
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called there, and not watched
        self.has_update = False  # an optimizer has stepped within the current or latest backward
        self.has_gradients = False  # gradients were written in this step
        self.has_only_broken = False  # by backwards that an error ended, and by no other
        self._obstacle = ""  # why this step cannot be executed again
        self._ours: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] | None = None  # once one is asked for
        self._switches: weakref.WeakKeyDictionary[nn.Module, Switches] = weakref.WeakKeyDictionary()
        self._surroundings: weakref.WeakKeyDictionary[nn.Module, Surroundings] = weakref.WeakKeyDictionary()
        self.evaluation: Evaluation | None = None  # calls belong to it, not to a step
        self.losses: list[torch.Tensor] = []  # losses of this step's backwards, detached
        self._broken: _BrokenCall | None = None  # the latest call that an error has ended
        self._survived: list[_BrokenBackward] = []  # those of this step that had written gradients
        self._without_gradient = 0  # calls of modules under `no_grad` that this step has kept
        self.unscaled = WeakIdKeyDictionary()  # a loss scaler's inputs, by its results
        self._loaded: dict[int, int] = {}  # parameter's id: its version after the latest load into it
        self.set_parameters(parameters)
        StepRecorder._active = self
        self._patches = Patches(__name__)
        self._patches.wrap(points.MODULE_CALL, self._around_call)
        self._patches.wrap(points.FUNCTIONAL_CALL, self._around_functional_call)
        self._patches.wrap(points.RUN_BACKWARD, self._around_backward)
        self._patches.wrap(points.REGISTER_HOOK, self._around_register_hook)
        self._patches.wrap(points.MODULE_LOAD, self._around_load)
        if "torch.distributed.checkpoint" in sys.modules:
            self._patches.wrap(points.DISTRIBUTED_LOAD, self._around_load)
        if is_distributed():
            for name in ("recv", "recv_anysource"):
                self._patches.wrap(points.PROCESS_GROUP[name], self._around_receive)
        if points.FUNCTION_APPLY.is_due():
            _show_frames_of_custom_functions(self._patches)

    @property
    def lost(self) -> list[str]:
        """Observations that this torch does not allow, for a verdict's coverage."""
        return self._patches.lost

    def set_parameters(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = set(parameters)
        self._engine.set_parameters(parameters)
        self._sharded: list[Any] = [p for p in parameters if hasattr(p, "_local_tensor")]  # DTensors
        self._ours.clear()

    def remove(self) -> None:
        """Removes the wrappers and forgets the recording. May be called twice."""
        self._patches.remove()
        if StepRecorder._active is self:
            StepRecorder._active = None
            self._depth = 1  # running calls record nothing more
            self._engine.close()
        self.losses.clear()

    @property
    def backwards(self) -> int:
        """The number in this step so far."""
        return self._engine.backwards

    @property
    def problem(self) -> str:
        """Why this step cannot be executed again, as a clause; "" if it can."""
        return self._obstacle or self._engine.problem()

    def give_up(self, obstacle: str) -> None:
        """Excludes this step from re-execution; ``obstacle`` is the reason."""
        self._obstacle = obstacle

    def begin_step(self) -> None:
        """After the update. Keeps values that wait for a backward."""
        self._engine.begin_step()
        self._leave_step()

    def forget(self) -> None:
        self._engine.forget()
        self._leave_step()

    def _leave_step(self) -> None:
        self.losses.clear()
        self._broken = None
        self._survived = []
        self._by_reference: _ByReference = []  # from the latest `_named`
        self._obstacle = ""
        self._without_gradient = 0
        self.has_update = self.has_gradients = self.has_only_broken = False

    def suspended(self) -> "_Suspension":
        """For code outside of a step: an update, a re-run."""
        return _Suspension(self)

    def suspend(self) -> None:
        self._depth += 1
        self._engine.pause()

    def resume(self) -> None:
        self._depth -= 1
        self._engine.resume()

    @property
    def is_suspended(self) -> bool:
        """The running code is not part of a step. A program may run its steps within a module's call."""
        return self._depth > 0 and not self.is_in_module

    @property
    def is_in_module(self) -> bool:
        return self._is_in_module and self._depth == 1 and threading.get_ident() == self._thread

    # --- recording -----------------------------------------------------------------------------------

    def _around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._depth != 0:  # inlines is_outside: hot path
                return original(module, *args, **kwargs)
            if threading.get_ident() != self._thread:
                self._note_other_thread(module)
                return original(module, *args, **kwargs)
            return self.call_module(original, module, args, kwargs)

        return call

    def _note_other_thread(self, module: nn.Module) -> None:
        if self.has_seen_other_thread or not torch.is_grad_enabled() or module in self._others:
            return
        if self._parameters.isdisjoint(held_parameters([module])):
            self._others.add(module)
        else:
            self.has_seen_other_thread = True
            log(
                f"{class_name(module)} is called on another thread than nanlocator.watch was: its steps are "
                "not recorded, so a NaN is found in the gradients, but not traced to its origin. Call "
                "nanlocator.watch on the thread that trains"
            )

    def _around_functional_call(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """A module's call with other tensors in place of its parameters: these are its arguments."""
        if not self.is_outside() or _is_in_transform():
            return original(module, *args, **kwargs)
        return self.call_module(original, module, args, kwargs, is_functional=True)

    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_outside():
            return self.run_backward(original, args, kwargs)
        if self.is_in_module and kwargs.get("accumulate_grad", False):
            return self.run_backward_in_module(original, args, kwargs)
        return original(*args, **kwargs)

    def _around_register_hook(
        self, original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]
    ) -> Any:
        value = self._engine.value_of(tensor) if self.is_outside() and not tensor.is_leaf else None
        if value is None:
            return original(tensor, hook)
        with self.suspended():  # a subclass's method may come back here
            handle = original(tensor, hook)
        self._engine.add_hook(_Hook(hook, value), tensor)
        return handle

    def _around_receive(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def receive(group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            if self.is_outside():  # a re-run module receives its messages again
                self._engine.note_received(args[0] if args else kwargs["tensors"])
            return original(group, *args, **kwargs)

        return receive

    def is_outside(self) -> bool:
        """Whether a call that begins now is a top-level call of the step."""
        return self._depth == 0 and threading.get_ident() == self._thread

    def call_module(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        *,
        is_functional: bool = False,
    ) -> Any:
        self._broken = None
        if _is_in_transform():
            return self._call_by_operators(original, module, args, kwargs)
        trains = self.trains(module)
        if self.evaluation is not None and trains:
            self._engine.take_read()
            with self.suspended():
                return self.evaluation.call(functools.partial(original, module, *args, **kwargs))
        run = functools.partial(original, module) if is_functional else module
        if not torch.is_grad_enabled():
            return self._call_without_gradient(original, module, run, args, kwargs)
        if not trains:
            return self._call_by_operators(original, module, args, kwargs)
        self._follower.before_forward()
        if (surroundings := self._surroundings.get(module)) is None:
            self._follow_switches(module)
            surroundings = self._surroundings[module] = Surroundings(module)
        kept = self._keep_call(_ModuleCall, module, run, args, kwargs)
        if kept is None:
            self.give_up(f"the arguments of {class_name(module)} cannot be kept")
        else:
            kept[0].note_surroundings(surroundings)
        self._engine.begin_call()
        try:
            self._is_in_module = True
            with self.suspended():
                output = original(module, *args, **kwargs)
        except Exception as error:
            self._note_error(kept, error)
            raise
        finally:
            self._is_in_module = False
        self._engine.end_call()
        if kept is not None:
            self._engine.add_call(*kept, _results_in(output))
        return output

    def _keep_call(
        self, kind: "type[_ModuleCall]", module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> "tuple[_ModuleCall, list[torch.Tensor]] | None":
        """The call and the tensors in its arguments; None if they cannot be kept."""
        try:
            given = tensors_of((args, kwargs))
            call = kind(module, run, *self._named((args, kwargs), given), self._now(module))
            call.by_reference = self._by_reference
        except Exception:  # the program's classes may raise when inspected
            return None
        return call, given

    def _call_without_gradient(
        self, original: Callable[..., Any], module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A teacher, a target network, a reward. A rollout has more calls than are kept."""
        self._engine.take_read()
        kept = None
        is_event = self.evaluation is None and not self._engine.is_inside_event
        if is_event and self._without_gradient < _MOST_CALLS_WITHOUT_GRADIENT:
            self._without_gradient += 1
            kept = self._keep_call(_CallWithoutGradient, module, run, args, kwargs)
        try:
            with self.suspended():
                output = original(module, *args, **kwargs)
        except Exception as error:
            self._note_error(kept, error)
            raise
        if kept is not None:
            self._engine.add_call(*kept, _results_in(output))
        return output

    def _note_error(self, kept: "tuple[_ModuleCall, list[torch.Tensor]] | None", error: Exception) -> None:
        if kept is not None and may_refuse_values(error):
            self._broken = _BrokenCall(*kept, error)

    def trains(self, module: nn.Module) -> bool:
        """Whether the module holds a watched parameter."""
        is_ours = self._ours.get(module)
        if is_ours is None:
            is_ours = self._ours[module] = not self._parameters.isdisjoint(held_parameters([module]))
            if not is_ours:
                self._follower.before_other_forward()
        return is_ours

    def _state_of_gradients(self) -> tuple[int, int]:
        """Changes when a gradient is written. FSDP2 adds to the tensor inside of a DTensor."""
        inner = (p.grad._local_tensor for p in self._sharded if p.grad is not None)
        return self._engine.state_of_gradients(), sum(tensor._version for tensor in inner)

    def _has_unreduced(self) -> bool:
        return bool(self._sharded) and any(map(fsdp2.has_unreduced, self._switches))

    def _follow_switches(self, module: nn.Module) -> None:
        if module not in self._switches:
            self._switches[module] = switches_of(module)

    def _now(self, module: nn.Module | None = None) -> "_SwitchesNow":
        """The switches of this module, or of all that were called."""
        own = self._switches.get(module) if module is not None else None
        switches = [own] if own is not None else list(self._switches.values())
        return _SwitchesNow([(each, each.now()) for each in switches])

    def _call_by_operators(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        self._engine.enter_module(_C.ModulePath(self._name_of(module)))
        try:
            return original(module, *args, **kwargs)
        finally:
            self._engine.enter_module(None)

    def _name_of(self, module: nn.Module) -> str:
        if self._names is None:
            self._names = weakref.WeakKeyDictionary()
            for name, each in self._follower.names_of_modules():
                self._names.setdefault(each, name)
        return self._names.get(module) or class_name(module)

    def run_backward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Autograd's entry: a backward, or ``torch.autograd.grad``."""
        if _is_in_transform():
            return original(*args, **kwargs)
        if kwargs.get("accumulate_grad", False):
            return self.record_backward(original, args, kwargs)
        given = _C.tensors_in((args, kwargs))
        call = _EngineCall(original, *self._named((args, kwargs)), self._now(), accumulates=False)
        with self.suspended():
            gradients = original(*args, **kwargs)
        self._engine.add_call(call, given, _C.tensors_in(gradients))
        call.losses = self._losses_in(args)
        return gradients

    def take_assigned(self) -> list[torch.Tensor]:
        """Parameters to which the program has assigned gradients that it computed in this step, for example
        from the results of ``torch.autograd.grad``. The assignment then counts as a backward."""
        values = self._assigned()
        if not values:
            return []
        gradients = [p.grad for p in values if p.grad is not None]
        self._follower.before_backward(gradients)
        self._engine.add_backward(_Assigned(values), gradients)
        for event in self._engine.needed():
            if isinstance(event.payload, _EngineCall) and not event.payload.has_losses:
                event.payload.has_losses = True
                self.losses += event.payload.losses
        self.has_gradients = True
        self._follower.after_backward()
        return list(values)

    @property
    def has_reduced_gradients(self) -> bool:
        return self._engine.has_reduced_gradients()

    @property
    def has_checked_gradients(self) -> bool:
        return self._engine.has_checked_gradients()

    def _assigned(self) -> dict[torch.Tensor, _C.RecordedValue]:
        """The gradients that the program has computed by operators and assigned."""
        return dict(self._engine.assigned_gradients())

    def changed_after_backward(self) -> list[torch.Tensor]:
        """Parameters whose gradients something has written to since their last recorded write."""
        return self._engine.changed_gradients()

    def note_restored(self, parameters: list[torch.Tensor]) -> None:
        """The gradients of these are again what was written last."""
        self._engine.note_restored(parameters)

    def zeroed_gradients(self) -> list[torch.Tensor]:
        """Parameters whose gradients the program itself has filled with zeros since the last backward."""
        return self._engine.zeroed_gradients()

    def changed_gradients(self) -> list[torch.Tensor]:
        """Parameters whose gradients the program changed after its last backward in a way that a re-run does
        not repeat. It repeats operators on gradients, and ``p.grad = p.grad * 0.5``. To be asked before a
        re-run."""
        for broken in self._survived:
            broken.look()
        changed = set(self._engine.changed_gradients())
        values = {p: value for p, value in self._assigned().items() if p in changed}
        if values:
            self._engine.add_backward(_Assigned(values), [p.grad for p in values if p.grad is not None])
        return [p for p in changed if p not in values]

    def record_backward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``original`` writes the gradients of leaves; the losses are in its first argument."""
        self._broken = None
        self._follower.before_backward(_C.tensors_in(args[0]))
        call = _EngineCall(original, *self._named((args, kwargs)), self._now(), accumulates=True)
        given = _C.tensors_in((args, kwargs))
        call.node_hooks = _C.count_node_hooks(given)
        with self._writing_gradients(call, given, self._losses_in(args)):
            return original(*args, **kwargs)

    def run_backward_in_module(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Scans its gradients; the step cannot be executed again."""
        self._follower.before_backward(_C.tensors_in(args[0]))
        with self._writing_gradients(None, [], self._losses_in(args)):
            return original(*args, **kwargs)

    def record_pass(self, pipeline: Pipeline, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One step of the pipeline's schedule: all its forwards and backwards."""
        self._follower.before_backward([])
        for module in pipeline.modules:
            self._follow_switches(module)
        call = _PipelineCall(pipeline, step, *self._named((args, kwargs)), self._now())
        call.by_reference = self._by_reference
        given = _C.tensors_in((args, kwargs))
        with self._writing_gradients(call, given, pipeline.losses), pipeline.watching():
            return pipeline.run(step, args, kwargs, call.take_generators)

    @contextlib.contextmanager
    def _writing_gradients(
        self,
        call: "_EngineCall | _PipelineCall | None",
        given: list[torch.Tensor],
        losses: list[torch.Tensor],
    ) -> Iterator[None]:
        """Surrounds the execution of ``call``; None: it cannot be executed again. ``losses`` is read after
        it."""
        before = self._state_of_gradients()
        self.is_in_backward, self.has_update = True, False
        try:
            with self.suspended():
                yield
        except Exception as error:
            broken = None
            if isinstance(call, _EngineCall):
                broken = _BrokenBackward(call, given, error, self._parameters)
                self._broken = broken if torch.is_anomaly_enabled() else None
            if not self.has_update and self._has_written(before):
                self.has_only_broken = self.has_only_broken or not self.has_gradients
                self._add_backward(broken, given, losses)
            raise
        finally:
            self.is_in_backward = False
        if not self._has_written(before) and not self.has_update:
            return
        if self.has_update:
            self.give_up("an optimizer steps during its backward pass, and would step again")
        self.has_only_broken = False
        self._add_backward(call, given, losses)
        self._follower.after_backward()

    def _has_written(self, before: tuple[int, int]) -> bool:
        """Whether a watched gradient was written since then."""
        return self._state_of_gradients() != before or self._has_unreduced()

    def _add_backward(
        self,
        call: "_EngineCall | _PipelineCall | _BrokenBackward | None",
        given: list[torch.Tensor],
        losses: list[torch.Tensor],
    ) -> None:
        self.losses += losses
        if call is not None:
            self._engine.add_backward(call, given)
        else:
            self.give_up("a backward pass ran inside a module's forward (in Lightning: manual optimization)")
        if isinstance(call, _BrokenBackward):
            self._survived.append(call)
            call.is_added = True
        self.has_gradients = True

    def _around_load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint brings into the weights is no write of the program's own."""
        before = [(p, local_part(p)._version) for p in self._parameters]
        self._engine.set_loading(True)
        try:
            return original(*args, **kwargs)
        finally:
            self._engine.set_loading(False)
            now = [(p, local_part(p)._version, version) for p, version in before]
            self._loaded |= {id(p): version for p, version, earlier in now if version != earlier}

    def note_weights(self) -> None:
        """Notes the weights with which a pass begins."""
        self._engine.note_weights()

    def note_updated(self) -> None:
        """An update has ended: what it wrote is not the program's."""
        self._engine.note_updated()

    def written_by_program(self) -> list[torch.Tensor]:
        return self._engine.written_by_program()

    def loaded_last(self) -> list[torch.Tensor]:
        """Parameters to which nothing has written since a load."""
        return [p for p in self._parameters if self._loaded.get(id(p)) == local_part(p)._version]

    def changed_weights(self) -> list[torch.Tensor]:
        """Weights that the program itself has written to in this pass."""
        return self._engine.changed_weights()

    def take_read(self) -> list[torch.Tensor]:
        """Returns the values that wait for a backward and that the program has read. Called when a call
        begins that may belong to another step."""
        return self._engine.take_read()

    def latest_event(self) -> int:
        return self._engine.latest_event()

    def forget_since(self, event: int) -> None:
        """A re-run does not repeat what came after that event."""
        self._engine.forget_since(event)

    def unfinished(self) -> list[torch.Tensor]:
        """Values that wait for a backward."""
        return self._engine.unfinished()

    def describe_samples(self) -> list[str]:
        """A line for each batch of a DataLoader that this step has read. Waits for the device."""
        given = [
            tensor
            for event in self._engine.needed()
            if isinstance(event.payload, _Call)
            for tensor in _C.tensors_in(event.payload.kept.item)
        ]

        def has_read(tensor: torch.Tensor) -> bool:
            return any(are_equal(tensor, each) for each in given) or self._engine.has_read(tensor)

        with self.suspended(), torch.no_grad():
            return self._batches.describe(has_read)

    def bad_among(self, waiting: list[torch.Tensor]) -> list[torch.Tensor]:
        """Waits for the device."""
        with self.suspended():
            return [tensor for tensor in waiting if is_bad(tensor)]

    def have_common_calls(self, some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        """Whether tensors of both lists were computed from the same call; true if unknown."""
        return self._engine.have_common_calls(some, others)

    def note_losses(self, losses: list[torch.Tensor]) -> None:
        """A backward begins from these."""
        self._engine.note_losses(losses)

    def like_losses(self, waiting: list[torch.Tensor], *, in_function: bool) -> list[torch.Tensor]:
        """Those that a line of the program, or a function, has made that has made losses, too. The others it
        may only have measured."""
        return [each for each in waiting if self._engine.is_like_losses(each, in_function)]

    def scan(self, waiting: list[torch.Tensor]) -> bool:
        """Scans values that wait for a backward that will not come; waits for the device. Values with NaN or
        +Inf become losses of this step. Returns whether any exist."""
        bad = self.bad_among(waiting)
        for tensor in bad:
            self._engine.add_backward(_Unfinished(self._named([tensor])), [tensor])
            self.losses.append(tensor.detach())
        return bool(bad)

    def scan_error(self, error: BaseException, *, is_alone: bool) -> bool:
        """Scans the values that ``error``, which ended the step before its gradients, may have refused: a NaN
        in the logits of a distribution. Those with NaN or +Inf become losses of this step. Returns whether
        any exist. ``is_alone``: no other ranks exist, so a call may be executed again to see what an operator
        inside it has refused."""
        broken, own = self._broken_by(error)
        with self.suspended():
            is_filled = self._engine.is_filled_with_bad
            refused = self._engine.refused()
            bad = broken.refused(own) if broken else values_refused_by(own, [], refused, is_filled=is_filled)
        if type(broken) is _BrokenCall and not bad and is_alone and is_refusal_by_operator(own):
            bad = self._refused_again(broken)
        if broken is not None and bad:
            if not broken.is_added:
                self._engine.add_backward(broken, broken.given)
        elif bad := [tensor for tensor in bad if self._engine.value_of(tensor) is not None]:
            self._engine.add_backward(_Unfinished(self._named(bad)), bad)
        self.losses += [tensor.detach() for tensor in bad]
        return bool(bad)

    def _refused_again(self, broken: "_BrokenCall") -> list[torch.Tensor]:
        self._engine.add_backward(broken, broken.given)
        broken.is_added = True
        others = GeneratorStates()
        others.save()
        called = {each.payload.module for each in self._engine.needed() if type(each.payload) is _ModuleCall}
        try:
            with contextlib.ExitStack() as buffers:
                for module in called | broken.modules:
                    buffers.enter_context(_restoring_buffers(module))
                buffers.enter_context(not_blocked())
                return [tensor for _, tensor in self.run_again() if is_bad(tensor)]
        except Exception:  # it cannot be executed again
            return []
        finally:
            others.restore()

    def take_anomaly(self, error: BaseException) -> bool:
        """Whether autograd's anomaly mode has ended a backward with ``error``, for a NaN. A re-run repeats it
        without that mode."""
        broken, own = self._broken_by(error)
        if not isinstance(broken, _BrokenBackward) or "returned nan values" not in str(own):
            return False
        broken.goes_on = True
        if not broken.is_added:  # it had written no gradient yet
            self._engine.add_backward(broken, broken.given)
        return True

    def _broken_by(self, error: BaseException) -> "tuple[_BrokenCall | None, BaseException]":
        """The call that the error has ended, or the one that caused it, and which of them it was."""
        for each in (error, error.__cause__, error.__context__):
            if self._broken is not None and each is not None and self._broken.is_ended_by(each):
                return self._broken, each
        return None, error

    def _losses_in(self, args: Any) -> list[torch.Tensor]:
        return [self.unscaled.get(t, t).detach() for t in _C.tensors_in(args[0]) if t.numel() == 1]

    def _function_call(
        self, function: type[torch.autograd.Function], args: Any, kwargs: Any
    ) -> "tuple[_FunctionCall, list[torch.Tensor]]":
        call = _FunctionCall(function, *self._named((args, kwargs)), self._by_reference)
        return call, _C.tensors_in((args, kwargs))

    def _named(self, value: T, tensors: list[torch.Tensor] | None = None) -> T:
        """Returns ``value`` with each tensor that the step has computed replaced by its name, and with copies
        of tensors that the program may load the next batch into. ``tensors``: the tensors in it, if known."""
        tensors = tensors_of(value) if tensors is None else tensors
        stand_ins: dict[int, Any] = {id(each): self._engine.value_of(each) or each for each in tensors}
        data = [each for each in tensors if stand_ins[id(each)] is each and _is_plain(each)]
        copies = self._engine.steady(data) if data else []
        stand_ins.update(zip(map(id, data), copies, strict=True))
        by_reference = [tensor for tensor, copy in zip(data, copies, strict=True) if copy is tensor]
        by_reference += filter(_is_plain, tensors_beside(value))
        self._by_reference = [(tensor, _C.content_sample(tensor)) for tensor in by_reference]
        return replaced(value, stand_ins)

    # --- execution -----------------------------------------------------------------------------------

    def run_again(self) -> Named:
        """Returns the losses."""
        replay = _C.StepReplay(events := self._engine.needed())
        losses: list[torch.Tensor] = []
        numbered = self._are_microbatches(events)
        self._engine.note_earlier_writes()
        switches = self._now()
        try:
            with self.suspended(), lightning_steps.without_logging():
                while events:
                    event = events.pop(0)
                    _C.set_current_microbatch(event.backwards_before if numbered else None, None)
                    if event.is_operator:
                        replay.execute(event)
                    else:
                        run = functools.partial(event.payload.run_again, replay, losses)
                        replay.set_outputs(event, replay.run(event, run))
                    replay.leave(event)
        finally:
            _C.set_current_microbatch(None, None)
            switches.set()
        if len(losses) == 1:
            return [("loss", losses[0])]
        return [(f"loss[{i}]", loss) for i, loss in enumerate(losses)]

    def _are_microbatches(self, events: list[_C.RecordedEvent]) -> bool:
        """Whether each backward follows calls of the same modules, so that gradients are accumulated."""
        called: list[list[int]] = [[]]
        for event in events:
            if type(event.payload) is _ModuleCall:
                called[-1].append(id(event.payload.module))
            elif isinstance(event.payload, _EngineCall) and event.payload.accumulates:
                called.append([])
        called.pop()
        return len(called) > 1 and all(each == called[0] for each in called)

    def lost_surroundings(self) -> list[str]:
        """After a re-run: what the program had set around its calls and has undone since."""
        payloads = [event.payload for event in self._engine.needed()]
        calls = [each for each in payloads if isinstance(each, _ModuleCall | _EngineCall)]
        return list(dict.fromkeys(clause for each in calls for clause in each.lost))

    def repeats_compiled_code(self) -> bool:
        payloads = [event.payload for event in self._engine.needed()]
        return any(isinstance(each, _FunctionCall) and each.is_compiled for each in payloads)

    @property
    def number_of_microbatches(self) -> int | None:
        events = self._engine.needed()
        pipelines = [each.payload.pipeline for each in events if isinstance(each.payload, _PipelineCall)]
        if len(pipelines) == 1:
            return pipelines[0].number_of_microbatches
        return self.backwards if self._are_microbatches(events) else None

    def changed_data(self) -> list[str]:
        payloads = [event.payload for event in self._engine.needed()]
        changed = [text for each in payloads if isinstance(each, _Call) for text in each.kept.changed(None)]
        changed += [text for each in payloads if isinstance(each, _Call) for text in each.overwritten()]
        return changed + ([self.problem] if self.problem else [])


def _is_in_transform() -> bool:
    """Whether a transform of torch.func runs: it is recorded by its operators on plain tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _stop_in_child() -> None:
    """A forked worker of a data loader does not train."""
    if (recorder := StepRecorder._active) is not None:
        recorder.remove()


os.register_at_fork(after_in_child=_stop_in_child)


class _Suspension:
    """A block that is no part of a step. Entered many times in each step, so no generator."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.suspend()

    def __exit__(self, *_: object) -> None:
        self._recorder.resume()


@dataclass(frozen=True)
class _SwitchesNow:
    """The current switches of the called modules, and torch's."""

    values: list[tuple[Switches, list[Any]]]
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def set(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        for switches, values in self.values:
            switches.set(values)


class _Call:
    """A call that runs code of the program, with everything it depends on beside its arguments."""

    def __init__(self, run: Callable[..., Any], args: Any, kwargs: Any, switches: _SwitchesNow) -> None:
        self._run = run
        self._switches = switches
        self.kept = KeptBatch([args, kwargs])
        self.by_reference: _ByReference = []
        self._generators = _Generators()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ]

    def overwritten(self) -> list[str]:
        return [
            f"a tensor of shape {list(tensor.shape)} was overwritten later"
            for tensor, sample in self.by_reference
            if sample is not None and not _C.has_content(tensor, sample)
        ]

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.execute(*self.arguments(replay))

    def arguments(self, replay: _C.StepReplay) -> Any:
        return _given(self.kept.item, replay, {id(tensor) for tensor, _ in self.by_reference})

    def execute(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        self._generators.restore()
        self._switches.set()
        with contextlib.ExitStack() as stack:
            for device, is_enabled, dtype in self._autocast:
                if is_enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_enabled))
            return _results_in(self._run(*args, **kwargs))


class _ModuleCall(_Call):
    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        switches: _SwitchesNow,
    ) -> None:
        super().__init__(run, args, kwargs, switches)
        self.module = module
        self.lost: list[str] = []  # in the latest re-run, see ``Surrounded.lost``
        self._surrounded: tuple[Surroundings, Surrounded] | None = None

    def note_surroundings(self, surroundings: Surroundings) -> None:
        self._surrounded = surroundings, surroundings.now()

    def execute(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        if self._surrounded is not None:
            surroundings, then = self._surrounded
            self.lost = then.lost(surroundings.now())
        return super().execute(args, kwargs)


class _CallWithoutGradient(_ModuleCall):
    """A call under `no_grad`. Its module may be none of the watched ones, so that it restores its buffers
    itself."""

    def execute(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        with torch.no_grad(), _restoring_buffers(self.module):
            return super().execute(args, kwargs)


@contextlib.contextmanager
def _restoring_buffers(module: nn.Module) -> Iterator[None]:
    """Those that are written to, and those that are replaced."""
    places = Buffers()
    places.follow(module.named_modules())
    places.save()
    tensors = [tensor for _, tensor in places.now()]
    copies = _C.steady_copies(tensors)
    try:
        yield
    finally:
        places.restore()
        for tensor, copy in zip(tensors, copies, strict=True):
            with torch.inference_mode(tensor.is_inference()):
                tensor.copy_(copy)


class _PipelineCall(_Call):
    """One pass over this rank's stages."""

    def __init__(
        self, pipeline: Pipeline, step: Callable[..., Any], args: Any, kwargs: Any, switches: _SwitchesNow
    ) -> None:
        super().__init__(self._execute, args, kwargs, switches)
        self.pipeline = pipeline
        self._step = step

    def take_generators(self) -> None:
        self._generators = _Generators()

    def _execute(self, *args: Any, **kwargs: Any) -> Any:
        return self.pipeline.run(self._step, args, kwargs, self._generators.restore)

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = super().run_again(replay, losses)
        losses += self.pipeline.losses
        return outputs


class _FunctionCall:
    """A custom autograd function that is applied outside of modules."""

    def __init__(
        self, function: type[torch.autograd.Function], args: Any, kwargs: Any, by_reference: _ByReference
    ) -> None:
        self._function = function
        self._args, self._kwargs = args, kwargs
        self._by_reference = {id(tensor) for tensor, _ in by_reference}
        self._generators = _Generators()

    @property
    def is_compiled(self) -> bool:
        return self._function.__name__ == "CompiledFunction"  # torch/_functorch/_aot_autograd

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor | None]:
        self._generators.restore()
        args, kwargs = _given((self._args, self._kwargs), replay, self._by_reference)
        result = self._function.apply(*args, **kwargs)
        recorded = [tensor for tensor in _C.tensors_in(result) if tensor.grad_fn is not None]
        outputs: list[torch.Tensor | None] = [None] * (1 + max((t.output_nr for t in recorded), default=-1))
        for tensor in recorded:
            outputs[tensor.output_nr] = tensor
        return outputs


class _EngineCall:
    """A backward, or ``torch.autograd.grad``."""

    def __init__(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        switches: _SwitchesNow,
        *,
        accumulates: bool,
    ) -> None:
        self._run = run
        self._switches = switches
        self._args, self._kwargs = args, kwargs
        self.accumulates = self.has_losses = accumulates
        self.losses: list[torch.Tensor] = []  # for torch.autograd.grad
        self.node_hooks = 0  # in the graph below its roots
        self.lost: list[str] = []  # in the latest re-run, see ``Surrounded.lost``

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = mapped((self._args, self._kwargs), _Now(replay))
        self._switches.set()
        if self.has_losses:
            losses += [t for t in _C.tensors_in(args[0]) if t.numel() == 1]
        if self.node_hooks > 0:
            is_lost = self.node_hooks > _C.count_node_hooks(_C.tensors_in((args, kwargs)))
            self.lost = ["a hook of a node of autograd's graph"] if is_lost else []
        return _C.tensors_in(self._run(*args, **kwargs))


class _Hook:
    """On the gradient of a value."""

    def __init__(self, hook: Callable[..., Any], value: _C.RecordedValue) -> None:
        self._hook = hook
        self._value = value

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        replay.tensor(self._value).register_hook(self._hook)
        return []


class _Generators:
    """The current states of torch's, Python's and numpy's generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._others = GeneratorStates()
        self._others.save()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        self._others.restore()


class WeightsState:
    """Weights are not copied: if the program itself has changed them within a step, they cannot be
    restored."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def save(self) -> None:
        self._recorder.note_weights()

    def restore(self) -> None:
        if self._recorder.changed_weights():
            raise RuntimeError("the program changed them after the step used them")


class RecordedPass(PlainPass):
    """The recorded step, for the driver."""

    def __init__(
        self, adapter: PlainAdapter, recorder: StepRecorder, own_code: Callable[[], list[str]]
    ) -> None:
        super().__init__(adapter)
        self._recorder = recorder
        self._own_code = own_code
        self._leftovers: dict[torch.Tensor, int] = {}
        self._changed_gradients: list[str] = []
        self._left_is_bad = False  # a gradient of an earlier step

    def take_gradients(self, zeroed: set[int]) -> bool:
        """Before the first backward. Existing gradients that are not of a parameter among ``zeroed`` (ids)
        belong to another step. True if some of them are bad after a bad step; a healthy run scans none
        here."""
        tensors = self._adapter.tensors
        self._had_gradient, gradients = _C.gradients_of(tensors)
        self._leftovers = {
            tensors[number]: _version_of(gradient)
            for number, gradient in zip(self._had_gradient, gradients, strict=True)
            if id(tensors[number]) not in zeroed
        }
        left = [p.grad for p in self._leftovers if self._adapter.verdicts and p.grad is not None]
        self._left_is_bad = any(map(is_bad, left))
        return self._left_is_bad

    @contextlib.contextmanager
    def leaving_out(self, used: Iterable[torch.Tensor]) -> Iterator[None]:
        """Leaves out another step's gradients unless this step uses them: those of a discriminator, for
        example, while its generator is trained. They are restored afterwards. If the program has changed
        weights since, they are not scanned: they are not the ones that the step used."""
        left_out = self._leftovers.keys() - set(used) if self._leftovers else set()
        gradients = [(parameter, parameter.grad) for parameter in left_out]
        self._adapter.left_out = left_out
        self._adapter.has_changed_weights = bool(self._recorder.changed_weights())
        try:
            yield
        finally:
            self._adapter.left_out = set()
            self._adapter.has_changed_weights = False
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for parameter in self._adapter.left_out:
            parameter.grad = None

    def run_again(self) -> Named:
        with self._adapter.naming_modules():
            return self._recorder.run_again()

    def repeats_compiled_code(self) -> bool:
        return self._recorder.repeats_compiled_code()

    def obstacle(self) -> str:
        added = ["it added to gradients of an earlier step"] if self._adds_to_left() else []
        if added and self._left_is_bad:
            return added[0]
        self._changed_gradients = self._describe_changed_gradients() + added
        if problem := self._recorder.problem:
            return problem
        if any(is_bad(weight.detach()) for weight in self._recorder.changed_weights()):
            return "weights changed after it used them, and are now NaN or Inf"
        return ""

    def _adds_to_left(self) -> bool:
        """Whether the step has written to gradients that existed before it."""
        return any(
            p not in self._adapter.left_out and (p.grad is None or _version_of(p.grad) != version)
            for p, version in self._leftovers.items()
        )

    def _describe_changed_gradients(self) -> list[str]:
        changed = [p for p in self._recorder.changed_gradients() if p not in self._adapter.left_out]
        if not changed:
            return []
        adapter = self._adapter
        names = {part.tensor: n for (n, _), part in zip(adapter.parameters, adapter.parts, strict=True)}
        return [
            f"the gradient of {names.get(p, 'a parameter')} was changed after its backward, by no operator "
            "that can be executed again"
            for p in changed
        ]

    def changed_data(self) -> list[str]:
        return self._recorder.changed_data() + self._changed_gradients

    def leaves_out_reduction(self) -> bool:
        return self._recorder.has_reduced_gradients

    def microbatches(self) -> list[tuple[int, int | None, list[str]]]:
        return [(i, None, [line]) for i, line in enumerate(self._recorder.describe_samples())]

    def unseen_reads(self) -> str:
        """The loop has gone on since the calls. What their code reads of it is not bounded: replicas that
        were finite have read the same, and else nothing tells it from a device that erred once."""
        if surrounded := self._recorder.lost_surroundings():
            return f"{' and '.join(surrounded)}, which the loop had set around the call and then undone"
        if self._adapter.has_replicas or not (names := self._own_code()):
            return ""
        also = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return f"what {' and '.join(names[:2])}{also} may read of the loop, which had gone on"


def _version_of(gradient: torch.Tensor) -> int:
    return getattr(gradient, "_local_tensor", gradient)._version


class _Assigned:
    """Takes the place of a backward: the program has assigned these gradients."""

    def __init__(self, gradients: dict[torch.Tensor, Any]) -> None:
        self._gradients = gradients

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        for parameter, value in self._gradients.items():
            parameter.grad = _Now(replay)(value)
        return []


class _BrokenCall:
    """A call that ended by an error. It takes the place of a backward: the values that the error refuses are
    its losses."""

    def __init__(
        self, call: "_ModuleCall | _EngineCall", given: list[torch.Tensor], error: Exception
    ) -> None:
        self._call = call
        self.given = given
        self.is_added = False  # to the engine's events
        # Not the error itself: its traceback holds all that the call has computed.
        self._type, self._id, self._depth = type(error), id(error), len(frames_of(error))

    @property
    def modules(self) -> set[nn.Module]:
        return {self._call.module} if isinstance(self._call, _ModuleCall) else set()

    def is_ended_by(self, error: BaseException) -> bool:
        return (type(error), id(error)) == (self._type, self._id)

    def refused(self, error: BaseException) -> list[torch.Tensor]:
        return values_refused_by(error, self.given, [], self._depth)

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        assert isinstance(self._call, _ModuleCall)
        args, kwargs = self._call.arguments(replay)
        refused = _C.RefusedInputs()
        try:
            with refused:
                losses += self._call.execute(args, kwargs)
        except self._type as error:
            losses += values_refused_by(error, tensors_of((args, kwargs)), refused.tensors)
        return []


class _BrokenBackward(_BrokenCall):
    """A backward that ended by an error, and so wrote a part of the gradients. ``goes_on``: autograd's
    anomaly mode had found a NaN; a re-run goes on without that mode."""

    def __init__(
        self, call: "_EngineCall", given: list[torch.Tensor], error: Exception, parameters: set[torch.Tensor]
    ) -> None:
        # A failed backward has not freed its graph; only a program's own end needs the loss again.
        super().__init__(call, given if torch.is_anomaly_enabled() else [], error)
        self._parameters = parameters
        self._text = _without_numbers(error)
        self._written = [weakref.ref(p.grad) for p in parameters if p.grad is not None]
        self._is_discarded = False
        self.goes_on = False

    def look(self) -> None:
        """Notes whether the program has discarded what it has written. To be asked before a re-run."""
        kept = {id(p.grad) for p in self._parameters if p.grad is not None}
        written = [each() for each in self._written]
        self._is_discarded = not any(each is not None and id(each) in kept for each in written)

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._is_discarded:
            return []
        results: list[torch.Tensor] = []
        try:
            with torch.autograd.set_detect_anomaly(False) if self.goes_on else contextlib.nullcontext():
                results = self._call.run_again(replay, losses)
        except Exception as error:
            if self.goes_on or type(error) is not self._type or _without_numbers(error) != self._text:
                raise
            return results
        if not any(p.grad is not None and is_bad(p.grad) for p in self._parameters):
            raise RuntimeError(f"a backward that {self._type.__name__} had ended went on, without NaN or Inf")
        return results


def _without_numbers(error: Exception) -> str:
    return re.sub(r"\d+", "", str(error))


class _Unfinished:
    """Takes the place of the backward of these values."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def run_again(self, replay: _C.StepReplay, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        losses += mapped(self._values, _Now(replay))
        return []


class _Now:
    """Maps a name to its tensor in a re-run."""

    def __init__(self, replay: _C.StepReplay) -> None:
        self._replay = replay

    def __call__(self, value: Any) -> Any:
        return self._replay.tensor(value) if isinstance(value, _C.RecordedValue) else value


def _given(kept: Any, replay: _C.StepReplay, by_reference: set[int]) -> Any:
    """The re-run's values of the arguments ``kept`` of a call that may write to its data. Data that was not
    copied the first time is not copied now."""
    tensors = [each for each in tensors_of(kept) if _is_plain(each) and id(each) not in by_reference]
    copies = dict(zip(map(id, tensors), _C.steady_copies(tensors), strict=True))
    now = _Now(replay)
    return mapped(kept, lambda each: copies.get(id(each), each) if torch.is_tensor(each) else now(each))


def _results_in(output: Any) -> list[torch.Tensor]:
    """Also those in objects of other classes: a distribution's logits."""
    results = _C.tensors_in(output)
    if isinstance(output, torch.Tensor):  # nearly always, in each step
        return results
    known = {id(tensor) for tensor in results}
    return [*results, *(tensor for tensor in tensors_beside(output) if id(tensor) not in known)]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not vars(tensor)


def _show_frames_of_custom_functions(patches: Patches) -> None:
    """The engine reads a custom function's arguments from the frame of ``Function.apply``
    (torch/autograd/function.py). From torch 2.15 on that is no Python function, and this makes it one. An
    ``apply`` that the program took from its class earlier is not seen."""
    original = vars(torch.autograd.Function)["apply"]
    if isinstance(original, classmethod):
        return

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **kwargs)

    patches.put(points.FUNCTION_APPLY, classmethod(apply))
