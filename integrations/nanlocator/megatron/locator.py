"""MegatronLocator: where the observers are hooked into Megatron-Core's step, and how a bad step ends.

One step on every rank, in this order:

    zero_grad_buffer     params_before (check_params)
    forward_backward     each pass of the schedule, boundaries watched:
      start_grad_sync    grad_local:   each parameter's main_grad, before the bucket's collective
      finish_grad_sync   grad_reduced: the same after it (the owned shard with a distributed optimizer)
      ... and at its end the losses, and the flag over all ranks: a bad step is repeated and judged here
    prepare_grads        grad_norm:    what the optimizer will clip; then a second flag is launched
    get_grad_norm        ... and read, before the clip
    step                 params_after (check_params)

Hooks replace methods of the instances and functions of Megatron's modules; ``remove`` takes them off.
"""

import contextlib
import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import schedules

from nanlocator import _C
from nanlocator.errors import NonFiniteGradientError
from nanlocator.megatron import state
from nanlocator.megatron.boundaries import Boundaries
from nanlocator.megatron.configuration import check_call, not_covered
from nanlocator.megatron.layout import (
    bucket_groups,
    module_names,
    named_parameters,
    optimizer_gradients,
    parameter_infos,
    rank_coordinates,
    shard_ranges,
)
from nanlocator.megatron.microbatches import Microbatches
from nanlocator.megatron.step_data import StepData
from nanlocator.module_calls import KeptModuleCalls, ModuleCalls
from nanlocator.modules import ModuleHooks, tensor_attributes
from nanlocator.patches import Patches
from nanlocator.rerun import GeneratorStates, ObjectState
from nanlocator.session import (
    RankConnection,
    first_line,
    is_failure_of_peers,
    log_once,
    raise_or_continue,
    resolve_options,
    warn_of_other_bits,
)

_STEPS_TO_OBSERVE = 20
_INSTALLED = "_nanlocator"  # attribute of the optimizer that holds the installed locator
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def install(
    model_chunks: torch.nn.Module | list[torch.nn.Module] | tuple[torch.nn.Module, ...],
    optimizer: MegatronOptimizer,
    *,
    level: str | None = None,
    on_bad: str | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    rerun: bool | str | None = None,
    check_params: bool | None = None,
    gather_deadline: float | None = None,
) -> "MegatronLocator":
    """Watches the training of a Megatron-Core model from now on. Call it on every rank, before the training
    loop asks Megatron for its ``get_forward_backward_func()``.

    Args:
        model_chunks: the DistributedDataParallel-wrapped chunks of this rank (one, or one per virtual
            pipeline stage), as handed to ``get_megatron_optimizer``.
        optimizer: what ``get_megatron_optimizer`` returned.
        level: what is watched at every step. ``"boundaries"`` (default): gradients, and whatever ranks hand
            to each other. ``"grads"``: gradients only. ``"modules"``: also every module. ``"operators"``:
            every operator, which waits for the device between them.
        on_bad: ``"stop"`` (default) raises ``nanlocator.NonFiniteGradientError`` on every rank, before
            anything is clipped or stepped; ``"report"`` goes on; ``"skip"`` goes on without the optimizer's
            step; ``"recover"`` goes on with the gradients of a clean repeat, and stops where there is none.
        output_dir: folder of the run, default ``nanlocator_run``.
        rerun: ``True`` (default) executes forward-backward of a bad step again, on all ranks, with every
            operator traced. ``False`` does not. ``"always"`` executes every step twice and warns where the
            two differ in a bit.
        check_params: scan the parameters before forward and after the step, too.
        gather_deadline: seconds to wait for ranks that do not answer when a finding is gathered.

    Options left at None are read from NANLOCATOR_LEVEL, NANLOCATOR_ON_BAD, NANLOCATOR_OUTPUT_DIR,
    NANLOCATOR_RERUN, NANLOCATOR_CHECK_PARAMS and NANLOCATOR_GATHER_DEADLINE.

    Raises ``nanlocator.UsageError`` for a wrong call and ``nanlocator.AgreementError``, on every rank
    alike, where ranks differ in versions or options.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    check_call(chunks, optimizer)
    if hasattr(optimizer, _INSTALLED):
        raise _C.UsageError(
            "nanlocator is installed on this optimizer already; call locator.remove() first to install "
            "it with other options"
        )
    options = resolve_options(
        on_bad=on_bad,
        output_dir=output_dir,
        level=level,
        rerun=rerun,
        check_params=check_params,
        gather_deadline=gather_deadline,
        integration="megatron",
        default_level="boundaries",
    )
    if options.on_bad == "recover" and options.rerun == "never":
        raise _C.UsageError("on_bad 'recover' goes on with a repeat of the step: it needs rerun=True")
    options.not_covered = not_covered(chunks, optimizer, options)
    return MegatronLocator(chunks, optimizer, options)


class _SkipStep(Exception):
    """From get_grad_norm to step: this step's gradients are not to be used."""


@dataclass
class _Step:
    """The forward-backward that runs now."""

    forward_backward: Callable[..., Any]
    arguments: dict[str, Any]
    data: StepData
    result: Any = None  # of the latest pass


class MegatronLocator:
    """What ``install`` returns. ``verdicts`` are the findings so far, ``dismissed`` counts routine
    overflows of a dynamic loss scale, ``run_dir`` is where the files are."""

    def __init__(
        self, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, options: _C.LocatorOptions
    ) -> None:
        self.verdicts: list[dict[str, Any]] = []
        self._chunks = chunks
        self._optimizer = optimizer
        self._optimizers: list[MegatronOptimizer] = optimizer.chained_optimizers
        self._on_bad: str = options.on_bad
        self._check_params: bool = options.check_params
        # overlap_param_gather: forward replaces what the distributed optimizer of another rank updates.
        self._gathers_in_forward = any(chunk.ddp_config.overlap_param_gather for chunk in chunks)
        self._rerun_policy: str = options.rerun

        self._named = named_parameters(chunks)
        infos = parameter_infos(chunks, self._optimizers, self._named)
        self._ids = {entry.parameter: info.id for entry, info in zip(self._named, infos, strict=True)}
        self._shards = shard_ranges(self._optimizers, self._named)

        device = self._named[0].parameter.device if self._named else torch.device("cpu")
        coordinates = rank_coordinates(device)
        self._connection = RankConnection()
        self._locator = _C.GradientLocator(
            _C.ParameterMap(coordinates, sorted(infos, key=lambda info: info.id)),
            options,
            self._connection.communicator,
        )
        self._rerun = _C.StepRerun(self._locator)
        self._step: _Step | None = None
        self._module_calls = KeptModuleCalls()  # around the origins of the bad step
        self._machine = state.RerunMachine()
        self._steps = 0  # completed
        self._is_open = False  # begin_step has been called for the step that runs now
        self._is_judged = False  # ... and it needs no second agreement
        self._skips_step = False  # ... and the optimizer is to leave it out
        self._has_seen_schedule = False
        self._loss_scale = 0.0  # before prepare_grads updates it

        self._patches = Patches()
        self._microbatches = Microbatches(chunks, self._patches)
        self._boundaries: Boundaries | None = None
        self._watch: _C.ModuleWatch | None = None
        self._install_observers(options.level)
        self._install_hooks()
        self._set_step()
        setattr(optimizer, _INSTALLED, self)
        log_once(
            f"watching {len(self._named)} parameters (rank 0), level {options.level}, "
            f"on_bad={self._on_bad}; files of a finding go to {self.run_dir}"
        )
        if options.not_covered:
            log_once("not seen in this configuration: " + "; ".join(options.not_covered))

    @property
    def run_dir(self) -> str:
        return self._locator.run_dir

    @property
    def dismissed(self) -> int:
        return self._locator.dismissed

    def remove(self) -> None:
        """Takes every hook off and closes the connection. Collective; call it on every rank."""
        if getattr(self._optimizer, _INSTALLED, None) is not self:
            return
        self._rerun.stop_tracing()
        self._patches.remove()
        delattr(self._optimizer, _INSTALLED)
        self._connection.close()

    # --- hooks ---------------------------------------------------------------------------------------

    def _install_observers(self, level: str) -> None:
        if level in ("boundaries", "modules"):
            self._boundaries = Boundaries(self._chunks, threads=torch.get_num_threads())
            self._microbatches.listeners.append(self._boundaries)
            self._patches.on_removal(self._boundaries.remove)
        if level == "modules":
            self._watch = _C.ModuleWatch(torch.get_num_threads())
            self._hook_modules(self._watch)
        if level == "operators":
            self._hook_modules(None)

    def _hook_modules(self, watch: Any) -> None:
        for hooks in self._module_hooks(watch):
            self._patches.on_removal(hooks.remove)

    def _module_hooks(self, watch: Any) -> list[ModuleHooks]:
        return [ModuleHooks(chunk, watch, name_of=module_names(chunk)) for chunk in self._chunks]

    def _install_hooks(self) -> None:
        wrap = self._patches.wrap
        for name in _SCHEDULES:
            wrap(schedules, name, self._around_forward_backward)
        groups = [group for chunk in self._chunks for group in bucket_groups(chunk)]
        for number, group in enumerate(groups):
            wrap(group, "start_grad_sync", self._before_collective(number, group))
        for number, chunk in enumerate(self._chunks):
            wrap(chunk, "finish_grad_sync", self._after_collective(number))
        if self._check_params:
            wrap(self._chunks[0], "zero_grad_buffer", self._before_forward)
        wrap(self._optimizer, "prepare_grads", self._around_prepare_grads)
        wrap(self._optimizer, "get_grad_norm", self._around_get_grad_norm)
        wrap(self._optimizer, "step", self._around_step)
        self._observe_backward_order()

    def _before_collective(self, number: int, group: Any) -> Callable[..., Any]:
        parameters = [p for bucket in group.buckets for p in bucket.params_list]
        ids = [self._ids[p] for p in parameters]

        def start_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The guard of _ParamAndGradBucketGroup.start_grad_sync itself: in the first batch
            # finish_grad_sync calls it again while the collective is in flight.
            if group.is_first_batch and group.grad_reduce_handle is not None:
                return original(*args, **kwargs)
            self._begin_step()
            self._scan("grad_local", number, "main_grad", ids, [p.main_grad for p in parameters])
            with self._concluding("Megatron raised before the data-parallel collective"):
                return original(*args, **kwargs)

        return start_grad_sync

    def _after_collective(self, number: int) -> Callable[..., Any]:
        parameters = [entry.parameter for entry in self._named if entry.chunk == number]

        def finish_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._concluding("the data-parallel collective failed on this rank"):
                result = original(*args, **kwargs)
            self._begin_step()
            ids, tensors, offsets = [], [], []
            for p in parameters:
                begin, end = self._shards.get(p, (0, p.main_grad.numel()))
                if begin < end or p.main_grad.numel() == 0:
                    is_whole = (begin, end) == (0, p.main_grad.numel())
                    ids.append(self._ids[p])
                    tensors.append(p.main_grad if is_whole else p.main_grad.view(-1)[begin:end])
                    offsets.append(begin)
            self._scan("grad_reduced", number, "main_grad", ids, tensors, offsets)
            return result

        return finish_grad_sync

    def _before_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._rerun.is_repeating:
            self._begin_step()
            self._scan_parameters("params_before")
        return result

    def _around_prepare_grads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        self._begin_step()
        self._note_loss_scale()
        found_inf = original(*args, **kwargs)
        self._end_observation()
        if self._is_judged:
            return found_inf
        views = [view for optimizer in self._optimizers for view in optimizer_gradients(optimizer)]
        self._locator.scan(
            "grad_norm",
            0,
            "grad",
            [self._ids[p] for p, _, _ in views],
            [gradient for _, gradient, _ in views],
            [offset for _, _, offset in views],
        )
        self._locator.start_agreement()
        if found_inf:  # step() returns at once; the host has just waited for found_inf
            self._finish_agreement(is_overflow=True)
        return found_inf

    def _around_get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        norm = original(*args, **kwargs)  # waits for the norm, all scans and the flag before it
        if not self._is_judged:
            self._locator.set_gradient_norm(float(norm))
            self._finish_agreement(is_overflow=False)
        return norm

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            if self._skips_step:
                return False, None, None  # as Megatron's optimizers say that they did not step
            try:
                result = original(*args, **kwargs)
            except _SkipStep:
                return False, None, None
            if self._check_params and not self._is_judged:
                self._begin_step()
                self._scan_parameters("params_after")
                self._locator.start_agreement()
                self._finish_agreement(is_overflow=False)
            return result
        finally:
            self._steps += 1
            self._is_open = False

    def _observe_backward_order(self) -> None:
        """Notes the order in which backward finishes gradients: the order of registration is not that of
        execution (linear_proj is registered before linear_qkv)."""

        def observe(p: torch.nn.Parameter) -> None:
            self._locator.gradient_is_ready(self._ids[p])
            self._not_yet_ready.discard(p)

        self._not_yet_ready = {entry.parameter for entry in self._named}
        hooks = [p.register_post_accumulate_grad_hook(observe) for p in self._not_yet_ready]
        self._order_hooks = hooks
        self._patches.on_removal(lambda: [hook.remove() for hook in hooks])

    def _end_observation(self) -> None:
        """After a step in which every gradient became ready the order is known. Where some never does (an
        expert without tokens), a few steps are enough to wait for it."""
        if not self._order_hooks:
            return
        if not self._not_yet_ready or self._steps >= _STEPS_TO_OBSERVE:
            while self._order_hooks:
                self._order_hooks.pop().remove()
        self._not_yet_ready = {entry.parameter for entry in self._named}

    # --- forward-backward, and its repeat ------------------------------------------------------------

    def _around_forward_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_ours = not args and not kwargs.get("forward_only") and self._is_our_model(kwargs.get("model"))
        if not is_ours or self._machine.is_in_its_own_rerun():
            return original(*args, **kwargs)
        self._has_seen_schedule = True
        self._begin_step()
        self._locator.now_in("forward_backward")
        self._step = step = _Step(original, kwargs, StepData(kwargs.get("data_iterator")))
        try:
            self._rerun.save()
            with self._concluding("forward-backward failed on this rank"):
                errors = self._run_first_pass(step)
            self._locator.scan_losses(self._microbatches.losses)
            self._locator.start_agreement()
            with self._concluding("the ranks could not agree on this step"):
                is_bad = self._locator.finish_agreement()
                if is_bad:
                    self._note_loss_scale()
                if is_bad and self._is_routine_overflow():
                    self._locator.dismiss()
                    self._is_judged = True
                elif is_bad:
                    self._judge_pass(step, errors)
                elif self._rerun_policy == "always":
                    warn_of_other_bits(self._iteration(), self._rerun.compare())
            if errors:
                raise errors[0]  # Megatron's own check: what it would have done, now that all is told
            return step.result
        finally:
            self._step = None
            self._locator.now_in("training")

    def _run_first_pass(self, step: _Step) -> list[RuntimeError]:
        """Returns what Megatron's own checks wanted to raise on this rank."""
        watching = self._boundaries.watching() if self._boundaries else contextlib.nullcontext()
        with self._pass(), watching, self._machine.errors_held_back() as errors:
            step.result = step.forward_backward(
                **{**step.arguments, "data_iterator": step.data.recording}
            )
        return errors

    @contextlib.contextmanager
    def _pass(self) -> Iterator[None]:
        self._microbatches.begin_pass()
        try:
            yield
        finally:
            self._microbatches.end_pass()

    def _is_our_model(self, model: Any) -> bool:
        chunks = model if isinstance(model, list) else [model]
        return len(chunks) == len(self._chunks) and all(map(_is, chunks, self._chunks))

    def _judge_pass(self, step: _Step, errors: list[RuntimeError]) -> None:
        """The gradients or the losses of this forward-backward are bad, as all ranks know."""
        if not self._check_params or self._gathers_in_forward:
            self._scan_parameters("params_before", 1)  # the optimizer has not touched them since
        self._hand_over_observations(step)
        self._locator.now_in("rerun")
        is_clean_now = self._rerun.find_births(True, self._gradients())
        self._module_calls.forget()
        is_recovered = self._on_bad == "recover" and is_clean_now
        self._skips_step = self._on_bad == "skip"
        if is_recovered or self._skips_step:
            self._machine.forget()
            errors.clear()
        self._is_judged = not is_recovered
        self._conclude(stops=self._on_bad == "stop" or (self._on_bad == "recover" and not is_recovered))

    def _hand_over_observations(self, step: _Step | None) -> None:
        crossed: list[Any] = []
        if self._boundaries is not None:
            crossed, coverage = self._boundaries.collect(self._iteration())
            self._locator.set_crossings(crossed, coverage)
        if self._watch is not None:
            parameters = [(entry.name, entry.parameter) for entry in self._named]
            _, births = self._watch.collect(
                self._iteration(), parameters, self._named_buffers() + self._named_attributes()
            )
            self._locator.set_births(_without_receipts(births, crossed))
        if step is not None:
            self._locator.set_microbatches(step.data.describe())

    def _set_step(self) -> None:
        # The engine holds these functions, and this object the engine: they must not hold this object.
        this = weakref.ref(self)

        def run() -> list[tuple[str, torch.Tensor]]:
            return this()._run_again(None)

        def run_and_keep_module_calls(modules: list[str]) -> None:
            this()._run_again(this()._module_calls.begin(modules))

        self._rerun.set_step(
            run=run,
            gradients=lambda: this()._gradients(),
            clear_gradients=lambda: this()._clear_gradients(),
            parameters=[(entry.name, entry.parameter) for entry in self._named],
            buffers=self._named_buffers(),
            attributes=lambda: this()._named_attributes(),
            run_and_keep_module_calls=run_and_keep_module_calls,
            module_call=self._module_calls.of,
        )
        for name, owner in {
            "the generators of Python and numpy": GeneratorStates(),
            "Megatron's RNG tracker": state.RngTracker(),
            "the routers' auxiliary losses": state.router_losses(),
            "the losses of multi-token prediction": state.multi_token_losses(),
            "Megatron's rerun state machine": self._machine,
            "the data": _UnchangedData(self),
            **{
                f"the loss scale of optimizer {number}": ObjectState(optimizer.grad_scaler)
                for number, optimizer in enumerate(self._optimizers)
                if getattr(optimizer, "grad_scaler", None) is not None
            },
        }.items():
            self._rerun.add_state(name, owner.save, owner.restore)

    def _run_again(self, module_calls: ModuleCalls | None) -> list[tuple[str, torch.Tensor]]:
        """One more pass over the step's microbatches; returns its losses."""
        step = self._step
        assert step is not None
        with contextlib.ExitStack() as stack:
            for hooks in self._module_hooks(module_calls):
                stack.enter_context(hooks)
            stack.enter_context(self._pass())
            stack.enter_context(self._machine.muted())
            step.result = step.forward_backward(**{**step.arguments, "data_iterator": step.data.replay()})
        return self._microbatches.named_losses

    def _gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        return (
            [self._ids[entry.parameter] for entry in self._named],
            [entry.parameter.main_grad for entry in self._named],
        )

    def _clear_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (module_names(chunk)(name), buffer)
            for chunk in self._chunks
            for name, buffer in chunk.named_buffers()
        ]

    def _named_attributes(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (module_names(chunk)(name), tensor)
            for chunk in self._chunks
            for name, tensor in tensor_attributes(chunk)
        ]

    # --- a step --------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if not self._is_open:
            self._locator.begin_step(self._iteration())
            self._is_open, self._is_judged, self._skips_step = True, False, False
            if self._boundaries is not None:
                self._boundaries.begin_step()
            if self._watch is not None:
                self._watch.begin_step()

    def _iteration(self) -> int:
        """As Megatron's log prints it, counted from 1; in a loop of one's own: calls of step."""
        global_vars = sys.modules.get("megatron.training.global_vars")
        args = getattr(global_vars, "_GLOBAL_ARGS", None)
        current = getattr(args, "curr_iteration", None)
        return (self._steps if current is None else current) + 1

    def _scan(self, *gradients: Any) -> None:
        """Of the pass that runs now: the step's own, or one of its repeat."""
        (self._rerun if self._rerun.is_repeating else self._locator).scan(*gradients)

    def _scan_parameters(self, phase: str, number: int = 0) -> None:
        tensors = [entry.parameter.detach() for entry in self._named]
        self._locator.scan(phase, number, "weight", [self._ids[e.parameter] for e in self._named], tensors)

    def _finish_agreement(self, *, is_overflow: bool) -> None:
        """What was bad only once forward-backward had ended: it cannot be repeated any more."""
        with self._concluding("the ranks could not agree on this step"):
            if not self._locator.finish_agreement():
                return
            if is_overflow and self._is_routine_overflow():
                self._locator.dismiss()
                return
            if not self._has_seen_schedule:
                self._locator.add_note(
                    "forward-backward could not be repeated: the training loop asked Megatron for its "
                    "schedule (get_forward_backward_func) before nanlocator was installed"
                )
            self._hand_over_observations(None)
            self._is_judged = True
            self._conclude(stops=self._on_bad in ("stop", "recover"))
        if self._on_bad == "skip":
            raise _SkipStep

    def _conclude(self, *, stops: bool) -> None:
        verdict = json.loads(self._locator.conclude())
        self.verdicts.append(verdict)
        if stops:
            self._is_open = False
            raise_or_continue(verdict, "stop", self._locator.run_dir)

    def _dynamic_scalers(self) -> list[Any]:
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in self._optimizers)
        return [scaler for scaler in scalers if scaler is not None and hasattr(scaler, "min_scale")]

    def _note_loss_scale(self) -> None:
        """What this step's gradients are multiplied by; 0 where the scale is not dynamic."""
        self._loss_scale = max((scaler.scale.item() for scaler in self._dynamic_scalers()), default=0.0)
        if self._loss_scale > 0:
            self._locator.set_loss_scale(self._loss_scale, self._may_fall())

    def _may_fall(self) -> bool:
        """The loss scale, after an overflow."""
        smallest = (scaler.min_scale.item() for scaler in self._dynamic_scalers())
        return self._loss_scale > max(smallest, default=math.inf)

    def _is_routine_overflow(self) -> bool:
        """fp16 with a dynamic loss scale looks for its scale by overflowing in backward; at the smallest
        scale an overflow is no longer the scale's doing (grad_scaler.py, DynamicGradScaler), and a loss
        that is not finite never was. The same on all ranks."""
        if not self._may_fall():
            return False
        losses = [loss for _, loss in self._microbatches.named_losses]
        return not self._locator.is_true_anywhere(not all(bool(torch.isfinite(x).all()) for x in losses))

    @contextlib.contextmanager
    def _concluding(self, reason: str) -> Iterator[None]:
        """An exception on its way through one rank must not take its findings with it: the other ranks
        will not come to the agreement, so this rank's ledger is written now and the error goes on."""
        try:
            yield
        except (_SkipStep, NonFiniteGradientError):
            raise
        except Exception as error:
            if not self._rerun.is_repeating:  # the repeat's errors are the engine's to tell
                self._conclude_alone(f"{reason}: {first_line(error)}", is_failure_of_peers(error))
            raise

    def _conclude_alone(self, reason: str, is_of_peers: bool) -> None:
        with contextlib.suppress(Exception):  # the device may have failed
            self._hand_over_observations(self._step)
        text = self._locator.conclude_alone(reason, is_of_peers)
        if text is None:
            return
        verdict = json.loads(text)
        if not self.verdicts or self.verdicts[-1] != verdict:  # the same again where nothing new was seen
            self.verdicts.append(verdict)


class _UnchangedData:
    """A microbatch that the step has written to cannot be put back: it is named in the verdict."""

    def __init__(self, locator: MegatronLocator) -> None:
        self._locator = weakref.ref(locator)

    def save(self) -> None:
        pass

    def restore(self) -> None:
        step = self._locator()._step
        changed = step.data.changed() if step is not None else []
        if changed:
            raise RuntimeError("; ".join(changed[:4]))


def _without_receipts(births: "list[_C.Birth]", crossed: "list[_C.Sighting]") -> "list[_C.Birth]":
    """A module that makes something bad of finite inputs may have received it, in a collective of its own:
    so it is in a microbatch in which the first bad thing that crossed this rank's boundary came in."""
    first: dict[int | None, str] = {}
    for sighting in crossed:
        first.setdefault(sighting.microbatch, sighting.role)
    return [birth for birth in births if first.get(birth.sighting.microbatch) != "received"]


def _is(one: Any, other: Any) -> bool:
    return one is other
