"""``watch``: one line added to an existing training loop."""

import atexit
import contextlib
import datetime
import functools
import gc
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Unpack  # torch brings it; typing has it from Python 3.11 on

from nanlocator import _C
from nanlocator.calls.modules import class_name, local_part, named_by_class
from nanlocator.engine.connection import meet
from nanlocator.engine.driver import LossScale, SkippedUpdate, note_numbers
from nanlocator.engine.endings import ending_error, first_line, is_failure_of_peers
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.locator import Locator
from nanlocator.engine.on_failure import OnFailure
from nanlocator.engine.options import Options, resolve_options
from nanlocator.engine.this_rank import log, log_once
from nanlocator.engine.verdict import Verdict
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches, weakly
from nanlocator.hooks.points import Point
from nanlocator.loops.errors import may_refuse_values
from nanlocator.loops.evaluation import Evaluation
from nanlocator.loops.loaded_batches import LoadedBatches
from nanlocator.loops.loop_reading import LoopReading
from nanlocator.loops.optimizer import LocatingOptimizer
from nanlocator.loops.ownership import keep_from_deepspeed, refuse_owned
from nanlocator.loops.plain import (
    PlainAdapter,
    PlainDriver,
    are_in_shards,
    held_parameters,
    parameters_of,
    plain_driver,
    scale_in_gradients,
)
from nanlocator.loops.recorder import RecordedPass, StepRecorder, WeightsState
from nanlocator.sharding import fsdp1
from nanlocator.sharding.pipelining import follow_steps, stages_of

_USED_IN_BACKWARD = 1 << 24  # groups of scans, one per optimizer
_UPDATED = 1 << 25
_END_TOGETHER = datetime.timedelta(seconds=5)

Models = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]


def watch(
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    step: int | None = None,
    **options: Unpack[Options],
) -> "Watch":
    """Finds NaN and Inf in the gradients of a training loop before they are clipped or used, and reports
    where they were born. The loop does not change:

        nanlocator.watch(model, optimizer)
        for batch in data:
            loss = loss_function(model(batch.x), batch.y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    A bad step is executed again at once, with every operator traced: the models' calls with the same inputs
    and random numbers, the operators between them, and all backwards.

    Gradients are scanned at the loop's first use of them: when their norm is computed
    (``torch.nn.utils.clip_grad_norm_``, ``get_total_norm``, ``clip_grads_with_norm_``), when a GradScaler
    unscales them, when an optimizer steps, and when ``zero_grad`` discards them.

    Args:
        model: the model, or several (a GAN's two, a policy and its critic): a list, or a dictionary whose
            keys go before the parameters' names. Wrapped or not (DistributedDataParallel, torch.compile).
        optimizer: the optimizer, or several.
        step: the number of the first step, as the program counts: 12001 for one that resumes after step
            12000. By default 1. ``Watch.step`` sets each step's.
        options: see docs/options.md.

    With torch.distributed initialised, every rank must call it, and scan equally often.

    There is one watch in a process. A further call takes over, as when a notebook's cell runs again, and says
    which models are no longer watched. Optimizers that are constructed later for the same models join at
    their first step; one that trains other parameters is reported.

    Raises:
        nanlocator.UsageError: if there is nothing to watch.
    """
    refuse_owned([], [optimizer])  # DeepSpeed's own optimizers are not torch's
    models, optimizers = named_models(model), _listed(optimizer, Optimizer)
    watch = Watch(models, optimizers, options)
    watch.follow_later_optimizers()
    if step is not None:
        watch.begin_at(step)
    return watch


class Watch(Locator):
    """Returned by ``watch``."""

    _driver: PlainDriver
    _latest: "weakref.ref[Watch] | None" = None

    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: list[Optimizer],
        options: Options,
        *,
        trains_copies: bool = False,
        batches: LoadedBatches | None = None,
    ) -> None:
        if not models or not optimizers:
            raise _C.UsageError("nanlocator.watch needs a model and an optimizer")
        if any(isinstance(each, LocatingOptimizer) for each in optimizers):
            raise _C.UsageError(
                "a LocatingOptimizer does its own scans: pass watch the optimizer inside it (.inner)"
            )
        refuse_owned(models.values(), optimizers)
        resolved = resolve_options(options, "watch")
        self._known_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models, self._options = models, options
        self._adapter = PlainAdapter(optimizers, models, trains_copies=trains_copies)
        self._adapter.why_no_pass = "no call of a watched model was recorded in it"
        self._adapter.loss_scale = weakly(self._loss_scale)
        self._scaler: GradScaler | None = None
        if (before := Watch.latest()) is not None:
            before.give_way_to(models)
        self._driver = plain_driver(self._adapter, resolved, None, scale_in_gradients)
        self._driver.compare_names()
        self._may_go_on = resolved.on_bad == "stop"
        if self._may_go_on:
            self._driver.allow_going_on()
        self._own_code = weakly(self._driver.own_code)
        self._recorder = StepRecorder(self._adapter.tensors, self, resolved.recorded_bytes, batches)
        self._driver.add_state("the weights", WeightsState(self._recorder))
        self._adapter.written_by_program = self._recorder.written_by_program
        self._adapter.loaded_last = self._recorder.loaded_last
        self._loop = LoopReading()
        self._is_left_out = False  # the update, of gradients that were scanned
        self._adds_after_norm = False  # the loop clips after each microbatch
        self._is_discarding = False
        # Since a norm of bad gradients, which the program may have looked at (deferred): those, and the
        # parameters whose gradient nothing but a backward or an operator had written to.
        self._is_deferred = False
        self._bad_gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._as_written: list[torch.Tensor] = []
        self._latest_event = 0  # when they were kept
        self._was_training = False  # in the latest forward
        self._is_in_closure = False  # of an optimizer, which may evaluate it several times in a step
        self._has_had_backward = False  # one has written gradients that the optimizers use
        # scan group, part indices
        self._used_in_backward: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[int]]]
        self._used_in_backward = weakref.WeakKeyDictionary()
        self._norm: torch.Tensor | None = None  # the latest that the program has taken, by squares
        self._patches = Patches(__name__)
        self._follow_loop()
        for each in optimizers:
            self._follow_optimizer(each)
        self._follow_end()
        Watch._latest = weakref.ref(self)
        self._driver.locator.add_not_covered([*self._recorder.lost, *self._patches.lost])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[list[Verdict]]:
        """For evaluation and generation: calls of the models in this block are not training steps. Each
        call's results are scanned, which waits for the device. If one holds a NaN or +Inf, the call is
        executed again with every operator traced. Yields the verdicts. Under ``stop`` it raises in the call;
        with several ranks it only reports.

            with watch.evaluating():
                logits = model(batch)
        """
        evaluation = Evaluation(self._models, os.path.dirname(self.run_dir), self._options)
        self._recorder.evaluation = evaluation
        try:
            yield evaluation.verdicts
        finally:
            self._recorder.evaluation = None
            evaluation.close()

    def remove(self) -> None:
        """Removes all hooks and wrappers. May be called twice."""
        self._patches.remove()
        self._recorder.remove()
        self._driver.stop_following()
        self._loop.forget()

    # --- called by the recorder --------------------------------------------------------------------------

    def before_other_forward(self) -> None:
        self._adapter.check_parameters()

    def names_of_modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self._adapter.names_of_modules()

    def before_forward(self) -> None:
        if self._is_deferred:
            self._end_deferred([])
            self._is_left_out = True
        if self._is_left_out:
            with self._abandoning():
                self._end_step()
        elif self._driver.has_ended_pass:
            self._adds_after_norm = True
        read = self._recorder.take_read()
        self._loop.begin_forward(read if self._was_training else [], self._recorder.bad_among)
        self._was_training = self._is_training
        self._begin()

    def _begin(self) -> None:
        self._loop.begin_computation()
        if self._driver.has_ended_pass:  # LBFGS, and loops that clip after each microbatch
            self._recorder.begin_step()
        if not self._driver.is_in_pass:
            self._driver.begin_pass(RecordedPass(self._adapter, self._recorder, self._own_code))

    @property
    def is_left(self) -> bool:
        """The program has dropped its optimizers, and no step is unfinished. Never with several ranks, which
        collect garbage at different times."""
        is_used = self._adapter.optimizers or self._driver.is_in_pass
        return not is_used and self._driver.connection is None

    @property
    def is_on(self) -> bool:
        """It has not been removed."""
        return self._patches.are_on

    @classmethod
    def latest(cls) -> "Watch | None":
        """The one that this process has, also if it is removed."""
        return cls._latest() if cls._latest is not None else None

    @property
    def step(self) -> int:
        """The number of the step that runs, or of the next one. Setting it gives the steps that begin from
        now on this number, until it is set again, so that several updates in one iteration of the program
        have its number:

            for watch.step in range(first, last): ...

        With several ranks, which must have the same, only ``nanlocator.watch(..., step=...)`` can set it.
        """
        return self._driver.step_number

    @step.setter
    def step(self, number: int) -> None:
        if self._driver.connection is not None:
            raise _C.UsageError(
                "with several ranks, pass the first step's number to nanlocator.watch (step=)"
            )
        self._driver.number_steps(number, True)

    def begin_at(self, number: int) -> None:
        """The next step has this number, and those that follow count on. With several ranks, on all alike."""
        if self._driver.connection is not None:
            self._driver.connection.check_same("the first step's number", str(number))
        self._driver.number_steps(number, False)

    def give_way_to(self, models: Mapping[str, nn.Module]) -> None:
        """Another watch, of these models, takes the place of this one."""
        is_used = self._patches.are_on
        self.remove()
        gc.collect()  # a notebook may have dropped what it trains
        is_used = is_used and bool(self._adapter.optimizers)
        others = list(models.values())
        left = [each for each in self._models.values() if not any(each is other for other in others)]
        if left and is_used:
            log_once(
                f"watches {_listing(others)} from now on, and no longer what it watched before "
                f"({_listing(left)}): to watch both, pass both to one nanlocator.watch"
            )

    def follow_later_optimizers(self) -> None:
        """Those that the program constructs from now on: for a next phase, or in a notebook."""
        look = weakly(self._look_at_optimizer)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                look(optimizer)

        self._patches.on_removal(register_optimizer_step_pre_hook(before_step).remove)

    def _look_at_optimizer(self, optimizer: Optimizer) -> None:
        """Before each step of any optimizer."""
        if optimizer in self._known_optimizers or self._recorder.is_suspended:
            return
        self._known_optimizers.add(optimizer)
        if not self.take_optimizers([optimizer]):
            log_once(
                f"{type(optimizer).__name__} trains parameters that no watched model holds: its gradients "
                "are not scanned. Pass its models and it to nanlocator.watch"
            )
        elif self._scan_gradients(used := self._adapter.used_by(optimizer)) == _C.Decision.SKIP:
            for parameter in used:  # its step, which has begun, leaves out parameters without a gradient
                parameter.grad = None

    def take_optimizers(self, optimizers: Iterable[Optimizer]) -> bool:
        """Follows optimizers that the program has created since, as some do in each epoch. False if they
        train other models, too."""
        new = [each for each in optimizers if each not in self._adapter.optimizers]
        trained = {p for each in new for p in parameters_of(each)}
        if not trained <= held_parameters(self._models.values()):
            return False
        for each in new:
            self._adapter.use(each)
            self._follow_optimizer(each)
        self._take_parameters_again()
        return True

    def take_earlier_gradients(self) -> None:
        """The step has begun before this watch: its gradients are scanned, and it is not executed again."""
        self._take_gradients_of_program("it began before nanlocator was attached")

    def _take_gradients_of_program(self, why_no_rerun: str) -> None:
        self._begin()
        self._recorder.has_gradients = True
        self._recorder.give_up(why_no_rerun)

    def begins_unrecorded(self) -> None:
        """The program has computed something in this step before this watch."""
        self._driver.note_unrecorded_beginning()

    def before_backward(self, roots: list[torch.Tensor]) -> None:
        self._recorder.note_losses(roots)
        read, are_zeroed = self._loop.take_left_losses()
        left = self._recorder.like_losses(read, in_function=are_zeroed)
        if left and not self._recorder.have_common_calls(left, roots):
            self._scan_left_step(left)
        self._begin()
        self._take_gradients()

    def _take_gradients(self) -> None:
        step_pass = self._driver.step_pass
        if self._recorder.backwards == 0 and step_pass is not None:
            if step_pass.take_gradients(self._loop.zeroed.union(map(id, self._recorder.zeroed_gradients()))):
                self._driver.note_left_gradients()

    def after_backward(self) -> None:
        self._has_had_backward = True
        self._loop.write_gradients()
        if not self._driver.is_in_pass:  # the engine is off while a CUDA graph is captured
            self._recorder.begin_step()
        elif self._recorder.has_update:  # no update follows
            self._scan_gradients()
            with self._abandoning():
                self._end_step()

    # --- where gradients are scanned -----------------------------------------------------------------

    def _scan_gradients(
        self, used: Iterable[torch.Tensor] = (), *, are_dropped: bool = False, may_defer: bool = False
    ) -> _C.Decision:
        """Scans gradients that were not yet scanned, and returns the decision. ``used``: parameters whose
        gradients the program is about to use, or to drop; ``may_defer``: to look at, see ``_defer``."""
        if self._recorder.is_suspended:
            return self._loop.decision
        if not (self._is_unseen or self._driver.has_ended_pass):
            used = [*used, *self._recorder.take_assigned()]
            is_by_program = not (self._has_had_backward or are_dropped)
            if is_by_program and any(p.grad is not None for p in used):  # float32 copies
                self._take_gradients_of_program(
                    "it ran on another thread than nanlocator.watch was called on"
                    if self._recorder.has_seen_other_thread
                    else "the program itself writes the gradients that it uses"
                )
        if self._is_unseen:
            self._end_pass(used, may_defer=may_defer)
        return self._loop.decision

    @property
    def _is_unseen(self) -> bool:
        """Gradients were written and not yet scanned."""
        return self._driver.is_in_pass and self._recorder.has_gradients

    def _end_pass(self, used: Iterable[torch.Tensor] = (), *, may_defer: bool = False) -> None:
        self._loop.scan_gradients()
        if self._is_deferred:
            self._recorder.forget_since(self._latest_event)
            if not self._is_discarding:
                self._take_kept()
        with self._abandoning(), self._recorder.suspended(), self._driver.step_pass.leaving_out(used):
            if self._recorder.has_update:
                self._driver.scan("params_after", _UPDATED, "weight", *self._adapter.weights_now())
            losses = self._loss_views()
            may_defer = may_defer and self._may_go_on and not self._adds_after_norm
            if may_defer and self._driver.may_go_on(losses) and self._defer():
                return
            self._loop.decision = self._driver.end_pass(losses)
        self._forget_kept()

    def _loss_views(self) -> list[_C.LossView]:
        losses = self._recorder.losses
        is_numbered = len(losses) > 1 and self._recorder.number_of_microbatches == len(losses)
        return [_C.LossView(loss, i if is_numbered else None) for i, loss in enumerate(losses)]

    def _abandoning(self) -> OnFailure:
        return OnFailure(self._abandon)

    def _abandon(self) -> None:
        self._driver.abandon()
        self._forget()

    @contextlib.contextmanager
    def _discarding(self, *, may_rerun: bool = False) -> Iterator[None]:
        """What is found meanwhile is reported and does not stop the program, which throws it away. In general
        it is not executed again: the program's code would count, write or draw once more, and gradients,
        buffers and attributes would be the re-run's. The next such step is traced."""
        self._is_discarding = True
        self._driver.set_discarded(True)
        if not may_rerun:
            self._recorder.give_up("the program discards it, and its code would run once more")
        try:
            yield
        finally:
            self._driver.set_discarded(False)
            self._is_discarding = False

    def _leaves_nothing_behind(self) -> bool:
        """Whether a re-run of a forward changes nothing: it runs libraries' modules without buffers, and no
        gradient exists that it would put aside."""
        has_gradients, _ = _C.gradients_of(self._adapter.tensors)
        return not (self._driver.own_code() or self._adapter.buffers_now() or has_gradients)

    def _forget(self) -> None:
        self._forget_kept()
        self._recorder.forget()
        self._loop.forget()

    # --- a program that ends within a step -----------------------------------------------------------------

    def _follow_end(self) -> None:
        """A program that checks its loss itself may raise, leave its loop or call ``sys.exit``, and no
        backward or update follows."""
        at_exit = functools.partial(_scan_at_exit, weakref.ref(self))
        atexit.register(at_exit)
        self._patches.on_removal(functools.partial(atexit.unregister, at_exit))
        self._patches.wrap(points.EXIT, self._exit)

    def _exit(self, original: Callable[..., Any], *status: Any) -> Any:
        self.scan_at_end(has_failed=any(status))
        return original(*status)

    def scan_now(self) -> None:
        """Scans what the program has computed since the last step, also in evaluation.

        Raises:
            nanlocator.NonFiniteGradientError: if it is bad, under ``stop``.
        """
        if not self._driver.is_in_pass:
            return
        self._take_gradients()
        if self._recorder.scan(self._recorder.unfinished()) or self._is_unseen:
            self._end_pass(self._adapter.tensors)

    def scan_at_end(self, has_failed: bool = False) -> None:
        """Reports bad values in a step that the program leaves unfinished. Raises nothing. ``has_failed``: it
        says so by its exit status."""
        error = ending_error()
        is_told_otherwise = isinstance(error, NonFiniteGradientError | KeyboardInterrupt) or (
            error is not None and is_failure_of_peers(error)
        )
        if is_told_otherwise or not self._recorder.is_outside():
            return
        may_refuse = error is not None and may_refuse_values(error)
        try:
            is_together = self._do_all_end(may_refuse or (error is None and has_failed))
            has_bad_loss = False
            if self._driver.is_in_pass:
                waiting = self._recorder.unfinished()
                if error is None:
                    waiting = self._recorder.like_losses(waiting, in_function=True)
                has_bad_loss = self._has_bad_loss(waiting)
            elif may_refuse or is_together:
                self._begin()  # a rollout is between two steps
            else:
                return
            is_left = self._is_unseen and (not self._recorder.has_only_broken or error is None or may_refuse)
            is_bad = has_bad_loss or self._is_of_bad_values(error) or is_left
            if not (is_bad or is_together):
                return
            if self._driver.connection is not None and not is_together:
                self._scan_alone("the program ended" if error is None else first_line(error))
                return
            if error is not None:
                self._driver.locator.add_standing_note(f"The program ended by {first_line(error)}")
            if self._is_deferred and error is None and not has_failed:
                self._end_deferred([], may_rerun=True)
            else:
                self._end_pass()
        except NonFiniteGradientError:
            pass  # already printed
        except Exception as failure:  # a device that has failed, which the program knows
            print(f"nanlocator: the last step could not be scanned: {failure}", file=sys.stderr, flush=True)

    def _do_all_end(self, may_be_for_values: bool) -> bool:
        """Whether all of several ranks are here. They may be if the program ends for what all have seen: a
        bad norm, a loss that it has reduced over the ranks."""
        if self._driver.connection is None or not (self._is_deferred or may_be_for_values):
            return False
        try:
            return meet(f"the end of step {self._driver.step_number} of {self.run_dir}", _END_TOGETHER)
        except Exception:  # the Store has gone with its rank
            return False

    @property
    def _is_training(self) -> bool:
        """Otherwise it evaluates."""
        return any(model.training for model in self._models.values())

    def _has_bad_loss(self, waiting: list[torch.Tensor]) -> bool:
        self._take_gradients()
        return self._is_training and self._recorder.scan(waiting)

    def _is_of_bad_values(self, error: BaseException | None) -> bool:
        """The error ended the step before its gradients, for a NaN or Inf."""
        if error is None or not self._is_training or not may_refuse_values(error):
            return False
        if self._recorder.take_anomaly(error):
            self._driver.set_gradient_norm(math.nan)  # what it would have been
            return True
        return self._recorder.scan_error(error, is_alone=self._driver.connection is None)

    def _scan_left_step(self, read: list[torch.Tensor]) -> None:
        """The program has read its loss and starts the backward of another one."""
        if not self._driver.is_in_pass or not self._has_bad_loss(read):
            return
        if self._driver.connection is None:
            with self._discarding(may_rerun=self._leaves_nothing_behind()):
                self._end_pass()
            with self._abandoning():
                self._end_step()
            return
        print(  # the other ranks may be elsewhere
            f"nanlocator: a loss of rank {torch.distributed.get_rank()} is NaN or Inf, but the program "
            "abandoned the step: with several ranks, only a step that reaches its backward pass is explained",
            file=sys.stderr,
            flush=True,
        )
        self._abandon()

    def _scan_alone(self, reason: str) -> None:
        self._driver.scan_gradients()
        why_not = "a re-run needs all ranks: only a step that reaches its backward pass is explained"
        self._driver.conclude_alone(f"{reason} ({why_not})", False, self._loss_views())

    def _loss_scale(self) -> LossScale | None:
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return scale_in_gradients(self._scaler)

    def _follow_loop(self) -> None:
        wrap = self._patches.wrap
        self._wrap_everywhere(points.TOTAL_NORM, self._total_norm)
        self._wrap_everywhere(points.CLIP, self._clip)
        wrap(points.SCALE, self._scale)
        wrap(points.UNSCALE, self._unscale)
        wrap(points.SCALER_STEP, self._step_scaled)
        wrap(points.MODULE_ZERO_GRAD, self._zero_module)
        follow_steps(self._patches, self._schedule_step)
        if self._driver.connection is not None:
            wrap(points.JOIN, self._enter_join)
        if fsdp1.wrapper_class() is not None:
            wrap(points.FSDP1_CLIP, self._clip_module)
            wrap(points.SHARDED_SCALE, self._scale)
            wrap(points.SHARDED_UNSCALE, self._unscale)

    def _enter_join(self, original: Callable[..., Any], join: Any) -> Any:
        """Ranks make different numbers of steps in it; those that have ended would not answer."""
        result = original(join)
        if join._enable:
            log("follows no further step: in torch.distributed.algorithms.Join, ranks step unequally often")
            self.remove()
        return result

    def _follow_optimizer(self, optimizer: Optimizer) -> None:
        self._known_optimizers.add(optimizer)
        self._patches.on_removal(keep_from_deepspeed(optimizer))
        self._patches.on_removal(optimizer.register_step_pre_hook(note_numbers).remove)
        self._patches.on_removal(optimizer.register_step_post_hook(self._after_update).remove)
        for point, wrapper in (
            (points.OPTIMIZER_STEP, self.around_step),
            (points.OPTIMIZER_ZERO_GRAD, self._zero_optimizer),
            (points.OPTIMIZER_ADD_GROUP, self._add_parameters),
        ):
            self._patches.wrap(point, functools.partial(wrapper, optimizer), of=optimizer)

    def _wrap_everywhere(self, point: Point, wrapper: Callable[..., Any]) -> None:
        """Wraps the function in all modules that have bound it, for example by ``from torch.nn.utils import
        get_total_norm``."""
        function = getattr(point.find_owner(), point.attribute, None)
        bound: list[tuple[Any, str]] = [
            (module, name)
            for name in (point.attribute, point.attribute.lstrip("_"))
            for module in list(sys.modules.values())
            if function is not None and vars(module).get(name) is function
        ]
        for module, name in bound or [(None, "")]:
            self._patches.wrap(point, wrapper, of=module, name=name)

    def _total_norm(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        used: list[torch.Tensor] = []
        if not (self._driver.has_ended_pass or self._is_deferred):
            owners = {id(p.grad): p for p in self._adapter.tensors if p.grad is not None}
            used = [owners[id(each)] for each in tensors if id(each) in owners]
        if used:
            raises = args[1] if len(args) > 1 else kwargs.get("error_if_nonfinite", False)
            self._scan_gradients(used, may_defer=not raises)
            # A re-run replaces the gradients.
            tensors = [owners[id(each)].grad if id(each) in owners else each for each in tensors]
        with self._recorder.suspended():
            norm = original(tensors, *args, **kwargs)
        norm_type = args[0] if args else kwargs.get("norm_type", 2.0)
        self._norm = norm if float(norm_type) == 2.0 else None
        return norm

    def _defer(self) -> bool:
        """A norm of bad gradients stops the program only where it uses them: it may look at the norm itself,
        and leave the update out. Until then they are kept as they are now: it may clip, mend or clear them.
        On all ranks alike, as they have agreed on it. False if they do not fit into memory."""
        bad = {p: p.grad for p in self._adapter.tensors if p.grad is not None}
        try:
            self._adapter.kept_gradients = {id(p): gradient.detach().clone() for p, gradient in bad.items()}
        except torch.OutOfMemoryError:
            return False
        changed = set(self._recorder.changed_after_backward())
        self._as_written = [p for p in bad if p not in changed]
        self._bad_gradients = bad
        self._latest_event = self._recorder.latest_event()
        self._is_deferred = True
        return True

    def _end_deferred(self, used: Iterable[torch.Tensor], *, may_rerun: bool = False) -> None:
        """The program goes on after a norm of bad gradients. Stops it if it uses them, unless they were bad
        on this rank and are no longer: of several ranks, each has seen its own. Of shards, each holds a part:
        the norm was of all."""
        used = list(used)
        kept = [self._adapter.kept_gradients[id(p)] for p in used if id(p) in self._adapter.kept_gradients]
        was_bad = are_in_shards(self._models.values()) or self._are_bad_here(kept)
        is_mended = was_bad and not self._are_bad_here(p.grad for p in used if p.grad is not None)
        is_discarded = is_mended or not used
        with self._discarding(may_rerun=may_rerun) if is_discarded else contextlib.nullcontext():
            self._end_pass(used)

    def _are_bad_here(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Of shards, this rank's."""
        return bool(self._recorder.bad_among([local_part(each) for each in gradients]))

    def _take_kept(self) -> None:
        """The step is stopped: its gradients are again those that were bad."""
        with self._recorder.suspended():
            for parameter, gradient in self._bad_gradients.items():
                gradient.data.copy_(self._adapter.kept_gradients[id(parameter)])
                parameter.grad = gradient
        self._recorder.note_restored(self._as_written)
        self._forget_kept()

    def _forget_kept(self) -> None:
        self._is_deferred = False
        self._adapter.kept_gradients = {}
        self._bad_gradients = {}
        self._as_written = []

    def _clip(
        self,
        original: Callable[..., Any],
        parameters: Any,
        max_norm: Any,
        total_norm: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        may_scan = not (self._driver.has_ended_pass or self._is_deferred)
        if may_scan and not set(self._adapter.tensors).isdisjoint(parameters):
            self._scan_gradients(parameters)
        norm, self._norm = self._norm, None
        if norm is not None and norm is total_norm:
            self._judge_norm(norm, parameters)
        with self._recorder.suspended():
            return original(parameters, max_norm, total_norm, *args, **kwargs)

    def _judge_norm(self, norm: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """A clip by a norm that overflows makes finite gradients zero. Waits for the norm."""
        is_of_step = self._driver.has_ended_pass and not self._recorder.is_suspended
        if not is_of_step or not self._is_same_on_all_ranks(norm) or math.isfinite(value := float(norm)):
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not set(self._adapter.tensors).issuperset(parameters) or self._recorder.bad_among(gradients):
            return  # of something that was not scanned
        with self._abandoning(), self._recorder.suspended():
            self._loop.decision = self._driver.set_gradient_norm(value)

    def _is_same_on_all_ranks(self, norm: torch.Tensor) -> bool:
        return self._driver.connection is None or (
            not hasattr(norm, "device_mesh") and all(map(_is_on_all_ranks, self._models.values()))
        )

    def _clip_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """For FullyShardedDataParallel's own clip."""
        if not (self._driver.has_ended_pass or self._is_deferred):
            self._scan_gradients(fsdp1.sharded_parameters(module), may_defer=True)
        with self._recorder.suspended():
            return original(module, *args, **kwargs)

    def _schedule_step(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline = None
        if self._recorder.is_outside() and any(
            self._recorder.trains(stage.submod) for stage in stages_of(schedule)
        ):
            pipeline = self._driver.pipeline_of(schedule)
            if pipeline is None:
                self._recorder.give_up("this torch executes a pipeline schedule's step in an unknown way")
        if pipeline is None or not schedule._has_backward:
            return original(schedule, *args, **kwargs)
        return self._recorder.record_pass(pipeline, original, args, kwargs)

    def _scale(self, original: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
        self._scaler = scaler
        scaled = original(scaler, outputs)
        if isinstance(outputs, torch.Tensor):  # the scaler handles its overflow
            self._recorder.unscaled[scaled] = outputs.detach()
        return scaled

    def _unscale(self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer) -> Any:
        self._scaler = scaler
        self._scan_gradients(self._adapter.used_by(optimizer))
        with self._recorder.suspended():
            return original(scaler, optimizer)

    def _step_scaled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The scaler may leave out the update, which ends the step all the same."""
        result = original(*args, **kwargs)
        if not self._recorder.is_suspended:
            with self._abandoning():
                self._end_step()
        return result

    def around_step(
        self,
        optimizer: Optimizer,
        original: Callable[..., Any],
        closure: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Takes the place of the optimizer's ``step``, which is ``original``."""
        if self._recorder.is_suspended:
            if self._recorder.is_in_backward:
                self._use_in_backward(optimizer)
            return original(closure, *args, **kwargs) if closure is not None else original(*args, **kwargs)
        with self._abandoning():
            try:
                if closure is not None:
                    evaluate = functools.partial(self._evaluate, closure, optimizer)
                    self._is_in_closure = True
                    result = original(evaluate, *args, **kwargs)
                else:
                    result = self._update(optimizer, original, args, kwargs)
            except SkippedUpdate:
                result = None
            finally:
                self._is_in_closure = False
            self._end_step()
        return result

    def _use_in_backward(self, optimizer: Optimizer) -> None:
        """From a hook: the optimizer uses its gradients as soon as they exist, and then frees them."""
        self._recorder.has_update = True
        parts = self._adapter.parts
        if optimizer not in self._used_in_backward:
            held = set(self._adapter.used_by(optimizer))
            numbers = [i for i, part in enumerate(parts) if part.tensor in held]
            group = _USED_IN_BACKWARD + len(self._used_in_backward)
            self._used_in_backward[optimizer] = group, numbers
        group, numbers = self._used_in_backward[optimizer]
        found = [(i, gradient) for i in numbers if (gradient := parts[i].tensor.grad) is not None]
        gradients = [parts[i].view(gradient) for i, gradient in found]
        self._driver.scan(self._adapter.gradient_phase, group, "grad", [i for i, _ in found], gradients)

    def _after_update(self, *_: Any) -> None:
        """For a step outside of ``around_step``: it began before the optimizer was watched."""
        if self._recorder.is_suspended:
            return
        if self._is_unseen:  # too late: the weights have moved
            self._abandon()
        self._end_step()

    def _update(self, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        used = self._adapter.used_by(optimizer)
        if self._is_deferred:
            self._end_deferred(used)
        if self._scan_gradients(used) == _C.Decision.SKIP:
            return None
        self._adapter.use(optimizer)
        self._driver.begin_update()
        with self._recorder.suspended():
            return original(*args, **kwargs)

    def _evaluate(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        loss = closure()
        if self._scan_gradients(self._adapter.used_by(optimizer)) == _C.Decision.SKIP:
            raise SkippedUpdate
        return loss

    def _end_step(self) -> None:
        """With several optimizers on the same gradients, the first one ends the step."""
        self._is_left_out = False
        if self._driver.has_ended_pass:
            self._driver.end_step()
            self._recorder.note_updated()
            self._recorder.begin_step()

    def _add_parameters(self, _: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._take_parameters_again()

    def _take_parameters_again(self) -> None:
        self._driver.take_parameters_again()
        self._recorder.set_parameters(self._adapter.tensors)
        self._used_in_backward.clear()

    def _zero_optimizer(
        self,
        optimizer: Optimizer,
        original: Callable[..., Any],
        set_to_none: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        zero = functools.partial(original, set_to_none, *args, **kwargs)
        return self._zero(zero, self._adapter.used_by(optimizer))

    def _zero_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._zero(functools.partial(original, module, *args, **kwargs), module.parameters())

    def _zero(self, zero: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> Any:
        """Scans unused gradients before they are discarded: the loop has left out the update. Not those of a
        backward that an error ended: this rank alone may discard them (after it has run out of memory)."""
        if self._recorder.is_suspended:
            return zero()
        ours = self._adapter.held_among(parameters)
        if ours and self._recorder.has_only_broken and self._is_unseen:
            self._abandon()
        elif ours and not self._is_in_closure:  # those of its last evaluation were scanned
            with self._discarding() if self._are_discarded(ours) else contextlib.nullcontext():
                self._scan_gradients(ours, are_dropped=True)
            # The next forward ends the step; a backward belongs to it: PCGrad zeroes before each task's.
            self._is_left_out = self._driver.has_ended_pass
        had_backward = self._recorder.backwards > 0
        with self._recorder.suspended():
            result = zero()
        if ours:
            self._loop.zero_gradients(ours, had_backward=had_backward)
        return result

    def _are_discarded(self, zeroed: list[torch.Tensor]) -> bool:
        """The program has looked at this step's gradients, keeps none of them, and now zeroes them all."""
        has_looked = self._driver.connection is None and self._recorder.has_checked_gradients
        if not (self._is_deferred or has_looked):
            return False
        written = [p for p in self._adapter.tensors if p.grad is not None]
        ours = int(self._is_deferred)  # references, in `_bad_gradients`
        return set(zeroed).issuperset(written) and not any(_is_gradient_held(p, ours) for p in written)


def _is_on_all_ranks(model: nn.Module) -> bool:
    """Whether one DistributedDataParallel reduces its gradients over all ranks. A pipeline has one for each
    stage."""
    group: Any = getattr(model, "process_group", None)
    is_replicated = isinstance(model, DistributedDataParallel) and group is not None
    return is_replicated and group.size() == torch.distributed.get_world_size()


def _references_to_gradient(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _references_alone() -> int:
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    return _references_to_gradient(parameter)


_ALONE = _references_alone()  # differs between versions of torch


def _is_gradient_held(parameter: torch.Tensor, ours: int) -> bool:
    """Whether a variable or a list of the program refers to the gradient; ``ours`` references are not its."""
    return _references_to_gradient(parameter) > _ALONE + ours


def _scan_at_exit(watch: "weakref.ref[Watch]") -> None:
    if (found := watch()) is not None:
        found.scan_at_end()


def named_models(model: Models) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        return dict(model)
    return named_by_class(_listed(model, nn.Module))


def _listing(models: Iterable[nn.Module]) -> str:
    return ", ".join(map(class_name, models))


def _listed(value: Any, kind: type) -> list[Any]:
    values = [value] if isinstance(value, kind) else value
    values = list(values) if isinstance(values, Iterable) else [values]
    for each in values:
        if not isinstance(each, kind):
            is_megatrons = type(each).__module__.startswith("megatron.")
            instead = "; pass it to nanlocator.megatron.install(model_chunks, optimizer)"
            raise _C.UsageError(
                f"nanlocator.watch takes a torch {kind.__name__}, not a {type(each).__name__}"
                + (instead if is_megatrons else "")
            )
    return values
