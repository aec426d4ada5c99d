"""DeepSpeedLocator: hooks the observers into a DeepSpeed engine, and ends a bad step.

One step on every rank, in this order (runtime/engine.py, DeepSpeedEngine):

    forward, backward    recorded, of each microbatch
      the reduction      grad_local: the gradients of a bucket, before it is reduced
    _take_model_step     at the accumulation boundary: grad_reduced, the losses, and the flag over all ranks;
                         a bad step is executed again and judged here, before the clip and the update; so in
                         the optimizer's step, if a program calls this one
      the optimizer's norm   if it overflows though every gradient is finite
    ... its end          params_after (check_params)

The engine's StepDriver owns the step. Hooks replace methods of the instances; ``remove`` removes them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import Unpack  # torch brings it; typing has it from Python 3.11 on

from nanlocator import _C
from nanlocator.deepspeed.adapter import DeepSpeedAdapter, EnginePass, EngineRecorder
from nanlocator.deepspeed.configuration import check, not_covered
from nanlocator.deepspeed.zero import layout_of
from nanlocator.engine.backward_order import BackwardOrder
from nanlocator.engine.connection import connect
from nanlocator.engine.driver import Driver, SkippedUpdate
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.locator import InstalledLocator
from nanlocator.engine.options import Options, resolve_options
from nanlocator.exchange.boundaries import Boundaries
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches


def install(engine: Any, **options: Unpack[Options]) -> "DeepSpeedLocator":
    """Watches the training of a DeepSpeed engine from now on: call it on every rank, after
    ``deepspeed.initialize``. The loop does not change:

        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        locator = nanlocator.deepspeed.install(engine)
        for batch in data:
            loss = loss_function(engine(batch.x), batch.y)
            engine.backward(loss)
            engine.step()

    Args:
        engine: of ZeRO stage 0 to 3, in fp32, bf16 or fp16.
        options: see :class:`nanlocator.engine.options.Options`.

    Raises ``nanlocator.UsageError`` for an engine that cannot be watched, with the reason, and
    ``nanlocator.AgreementError`` on every rank if ranks differ in versions or options.
    """
    check(engine)
    DeepSpeedLocator.check_owner(engine, "engine")
    resolved = resolve_options(options, "deepspeed", not_covered(engine))
    return DeepSpeedLocator(engine, resolved)


class DeepSpeedLocator(InstalledLocator):
    """Returned by ``install``."""

    def __init__(self, engine: Any, options: _C.LocatorOptions) -> None:
        self._engine = engine
        self._layout = layout_of(engine)
        self._adapter = DeepSpeedAdapter(engine, self._layout)
        self._recorder = EngineRecorder(engine, self._layout.parameters, self, options.recorded_bytes)
        try:
            self._driver = Driver(self._adapter, options, connect(options))
        except BaseException:
            self._recorder.remove()
            raise
        if options.level == "boundaries" and self._driver.connection is not None:
            self._driver.follow_boundaries(Boundaries(None, reads_gathered=True))
        self._order = BackwardOrder(self._layout.ids, self._driver.locator)
        self._bucket = 0  # number of the bucket in the running backward
        self._is_stepping = False  # the engine's own step is running, which calls the optimizer's
        self._steps_of_optimizer = 0  # number of optimizer steps outside of the engine's
        self._patches = Patches(__name__)
        self._install_hooks()
        count, stage = len(self._layout.parameters), int(engine.zero_optimization_stage())
        self._install_on(engine, f"{count} parameters of a DeepSpeed engine, ZeRO stage {stage}", options)

    def _remove_hooks(self) -> None:
        self._patches.remove()
        self._order.remove()
        self._recorder.remove()

    # --- called by the recorder --------------------------------------------------------------------------

    def before_other_forward(self) -> None:
        """Not used with a DeepSpeed engine."""

    def names_of_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self._engine.module.named_modules()

    def before_forward(self) -> None:
        if not self._driver.is_in_pass:
            step_pass = EnginePass(self._adapter, self._layout, self._recorder, self._scan_reduced)
            if self._is_in_accumulation():
                step_pass.problem = "its first microbatches were not recorded"
            if self._driver.boundaries is not None:
                self._layout.clear_padding_of_weights()
            self._driver.begin_pass(step_pass, self._engine.global_steps + self._steps_of_optimizer + 1)

    def before_backward(self, roots: list[torch.Tensor]) -> None:
        self.before_forward()
        if getattr(self._engine.optimizer, "_coalesce_grad_reduction", False):
            step_pass = self._driver.step_pass
            step_pass.problem = "coalesce_grad_reduction reduced its gradients outside a backward pass"

    def after_backward(self) -> None:
        """Nothing to do before the engine's step."""

    def _is_in_accumulation(self) -> bool:
        """By the engine's counter, unless the program sets the step's end."""
        engine = self._engine
        if engine._is_gradient_accumulation_boundary is not None:
            return False
        return engine.micro_steps % engine.gradient_accumulation_steps() != 0

    # --- hooks ---------------------------------------------------------------------------------------

    def _install_hooks(self) -> None:
        wrap = self._patches.wrap
        for name, wrapper in (
            ("backward", self._around_backward),
            ("scale", self._around_scale),
            ("_backward_prologue", self._before_backward),
            ("_take_model_step", self._around_step),
        ):
            wrap(points.ENGINE[name], wrapper, of=self._engine)
        wrap(points.OPTIMIZER_STEP, self._around_optimizer_step, of=self._engine.optimizer)
        reduction = points.ZERO_REDUCE[self._layout.reduction]
        wrap(reduction, self._before_reduction, of=self._layout.reducer)
        for owner, name in self._layout.norms:
            wrap(points.ZERO_NORM[name], self._around_norm, of=owner)
        if self._driver.boundaries is not None and self._layout.gathers_weights:
            gather = functools.partial(self._around_gather, self._driver.boundaries)
            wrap(points.ZERO_GATHER, gather)
        self._driver.locator.add_not_covered([*self._recorder.lost, *self._patches.lost])

    def _around_backward(
        self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self._driver.is_closed or not self._recorder.is_outside():
            return original(loss, *args, **kwargs)
        with self._ending_with("backward failed on this rank"):
            return self._recorder.record_backward(original, (loss, *args), kwargs)

    def _around_scale(self, original: Callable[..., Any], loss: torch.Tensor) -> torch.Tensor:
        scaled = original(loss)
        self._recorder.unscaled[scaled] = loss.detach()
        return scaled

    def _before_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._bucket = 0
        return original(*args, **kwargs)

    def _before_reduction(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = self._layout.about_to_be_reduced(*args, **kwargs)
        if parts:
            self._scan("grad_local", self._bucket, parts)
            self._bucket += 1
        if self._driver.is_rerunning:
            self._adapter.keep_bad(parts)
        if self._driver.boundaries is None:
            return original(*args, **kwargs)
        with self._driver.boundaries.transferring("", reduces_gradients=True):
            return original(*args, **kwargs)

    def _around_gather(
        self, boundaries: Boundaries, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with boundaries.transferring("", reduces_gradients=False):
            return original(*args, **kwargs)

    def _scan(self, phase: str, group: int, parts: Any) -> None:
        self._driver.scan(phase, group, "grad", [i for i, _ in parts], [tensor for _, tensor in parts])

    def _around_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """For gradients that were scanned. If the norm is not finite, or -1 in its place (runtime/utils.py,
        mask_nan_or_inf_with_val_inplace), DeepSpeed leaves out the update."""
        norms = original(*args, **kwargs)
        listed = norms if isinstance(norms, list) else [norms]
        if self._driver.is_judged or all(0 <= float(norm) < math.inf for norm in listed):
            return norms
        decision = self._driver.set_gradient_norm(math.inf)
        if decision == _C.Decision.SKIP and not self._adapter.skips_bad_updates():
            raise SkippedUpdate
        return norms

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_stepping = True
        try:
            return self._step(original, functools.partial(self._without_update, original), *args, **kwargs)
        finally:
            self._is_stepping = False

    def _around_optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's Fabric calls the optimizer's step, never the engine's."""
        if self._is_stepping:
            return original(*args, **kwargs)
        result = self._step(original, lambda *_, **__: self._layout.clear_gradients(), *args, **kwargs)
        self._steps_of_optimizer += 1
        return result

    def _step(
        self, update: Callable[..., Any], without_update: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._driver.is_closed:
            return update(*args, **kwargs)
        with self._ending_with("the step failed on this rank"), self._recorder.suspended():
            try:
                if self._scan_and_agree() == _C.Decision.SKIP:
                    raise SkippedUpdate
                self._driver.begin_update()
                result = update(*args, **kwargs)
            except SkippedUpdate:
                result = without_update(*args, **kwargs)
            self._driver.end_step()
            self._order.end_step()
        self._recorder.begin_step()
        return result

    def _scan_and_agree(self) -> _C.Decision:
        if not self._driver.is_in_pass:
            return self._driver.scan_and_agree()
        self._scan_reduced()
        decision = self._driver.end_pass([_C.LossView(loss, None) for loss in self._recorder.losses])
        self._adapter.forget_kept()
        return decision

    def _scan_reduced(self) -> None:
        if parts := self._layout.reduced():
            self._scan("grad_reduced", 0, parts)

    def _without_update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like DeepSpeed after an overflow: does everything but the optimizer's step."""
        optimizer = self._engine.optimizer
        had_overflow = hasattr(optimizer, "overflow")

        def leave_out(*_: Any, **__: Any) -> None:
            self._layout.clear_gradients()
            optimizer.overflow = True

        try:
            with Patches(__name__) as patches:
                patches.wrap(points.OPTIMIZER_STEP, leave_out, of=optimizer)
                return original(*args, **kwargs)
        finally:
            if not had_overflow:
                del optimizer.overflow

    @contextlib.contextmanager
    def _ending_with(self, reason: str) -> Iterator[None]:
        """If this block ends with an exception, abandons the step, in DeepSpeed's engine as well."""
        try:
            with self._driver.abandoning(), self._driver.concluding(reason):
                yield
        except NonFiniteGradientError:
            self._leave_step()
            raise
        except BaseException:
            self._recorder.forget()
            raise

    def _leave_step(self) -> None:
        """Does the rest of the engine's step(), for a caller that continues."""
        engine = self._engine
        self._layout.clear_gradients()
        self._recorder.forget()
        if not self._is_stepping:
            return
        engine._stop_timers(engine.engine_timers.step_timers)
        engine._running_engine_step = False
        engine.micro_steps += 1
