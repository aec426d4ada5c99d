"""MegatronLocator: hooks the observers into Megatron-Core's step, and ends a bad step.

One step on every rank, in this order:

    zero_grad_buffer     params_before (check_params)
    forward_backward     each pass of the schedule, boundaries watched:
      start_grad_sync    grad_local:   each parameter's main_grad, before the bucket's collective
      finish_grad_sync   grad_reduced: the same after it (the owned shard with a distributed optimizer)
      ... and at its end the losses, and the flag over all ranks: a bad step is re-run and judged here
    prepare_grads        grad_norm:    what the optimizer will clip; then a second flag is launched
    get_grad_norm        ... and read, before the clip
    step                 params_after (check_params)

The engine's StepDriver owns the step. Hooks replace methods of the instances and functions of Megatron's
modules; ``remove`` removes them.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from typing_extensions import Unpack  # torch brings it; typing has it from Python 3.11 on

from nanlocator import _C
from nanlocator.calls.modules import common_module
from nanlocator.engine.backward_order import BackwardOrder
from nanlocator.engine.connection import RankConnection
from nanlocator.engine.driver import Driver, SkippedUpdate, note_numbers
from nanlocator.engine.locator import InstalledLocator
from nanlocator.engine.options import Options, resolve_options
from nanlocator.exchange.boundaries import Boundaries
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.megatron import state
from nanlocator.megatron.adapter import MegatronAdapter, MegatronPass
from nanlocator.megatron.boundaries import boundaries_of
from nanlocator.megatron.configuration import (
    check_call,
    checkpoint_dir,
    current_iteration,
    loaded_checkpoint,
    not_covered,
)
from nanlocator.megatron.data_parallel import DataParallelChunk
from nanlocator.megatron.first_step import FirstStep
from nanlocator.megatron.layout import optimizer_gradients, rank_coordinates
from nanlocator.megatron.microbatches import Microbatches


def install(
    model_chunks: torch.nn.Module | list[torch.nn.Module] | tuple[torch.nn.Module, ...],
    optimizer: MegatronOptimizer,
    **options: Unpack[Options],
) -> "MegatronLocator":
    """Watches the training of a Megatron-Core model from now on. Call it on every rank, before the training
    loop calls Megatron's ``get_forward_backward_func()``.

    Args:
        model_chunks: the DistributedDataParallel-wrapped chunks of this rank (one, or one per virtual
            pipeline stage), as given to ``get_megatron_optimizer``.
        optimizer: the result of ``get_megatron_optimizer``.
        options: see :class:`nanlocator.engine.options.Options`. Level is ``"boundaries"`` by default, and
            ``"modules"`` watches boundaries, too. A re-run repeats forward-backward, on all ranks.

    Raises ``nanlocator.UsageError`` for a wrong call, and ``nanlocator.AgreementError`` on every rank if
    ranks differ in versions or options.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    check_call(chunks, optimizer)
    MegatronLocator.check_owner(optimizer, "optimizer")
    resolved = resolve_options(options, "megatron", checkpoint_dir=checkpoint_dir())
    if resolved.on_bad == "recover" and resolved.rerun == "never":
        raise _C.UsageError("on_bad='recover' continues with a re-run of the step: it needs rerun=True")
    resolved.not_covered = not_covered(chunks, optimizer, resolved)
    return MegatronLocator(chunks, optimizer, resolved)


class MegatronLocator(InstalledLocator):
    """Returned by ``install``."""

    def __init__(
        self, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, options: _C.LocatorOptions
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._adapter = MegatronAdapter(chunks, optimizer)
        self._driver = Driver(self._adapter, options, RankConnection(options.gather_deadline))
        self._machine = state.RerunMachine()
        self._patches = Patches(__name__)
        self._microbatches = Microbatches(chunks, self._patches)
        self._first_step = FirstStep(chunks, self._adapter.data_parallel, self._adapter.named)
        self._is_first_step = True
        self._microbatches.listeners.append(self._first_step)
        self._boundaries: Boundaries | None = None
        if options.level == "modules":
            self._boundaries = self._whole_boundaries()
        elif options.level == "boundaries":
            self._boundaries = boundaries_of(chunks)
        if self._boundaries is not None:
            self._microbatches.listeners.append(self._boundaries)
            self._driver.follow_boundaries(self._boundaries)
            self._first_step.exchanges = self._boundaries.exchanges = set()
        if options.level == "operators":
            for hooks in self._adapter.module_hooks(None):
                self._patches.on_removal(hooks.remove)
        for name, owner in state.states_of(self._adapter.optimizers, self._machine).items():
            self._driver.add_state(name, owner)
        for each in self._adapter.optimizers:
            if isinstance(each.optimizer, torch.optim.Optimizer):
                self._patches.on_removal(each.optimizer.register_step_pre_hook(note_numbers).remove)
        self._install_hooks(options.check_params)
        self._install_on(optimizer, f"{len(self._adapter.named)} parameters (rank 0)", options)

    def _remove_hooks(self) -> None:
        self._patches.remove()

    def _whole_boundaries(self) -> Boundaries:
        """Boundaries that also read gathered tensors on arrival, weights included."""
        data_parallel = self._adapter.data_parallel
        groups = [group for chunk in data_parallel for group in chunk.gathering_groups()]
        boundaries = boundaries_of(self._chunks, groups, reads_gathered=True)
        name_of = {entry.parameter: entry.name for entry in self._adapter.named}

        def transferring(
            parameters: list[torch.nn.Parameter], *, reduces_gradients: bool
        ) -> contextlib.AbstractContextManager[None]:
            owner = common_module([name_of[p] for p in parameters if p in name_of])
            return boundaries.transferring(owner, reduces_gradients=reduces_gradients)

        for chunk in data_parallel:
            chunk.watch_transfers(self._patches, transferring)
        return boundaries

    # --- hooks ---------------------------------------------------------------------------------------

    def _install_hooks(self, check_params: bool) -> None:
        wrap = self._patches.wrap
        for point in points.SCHEDULES:
            wrap(point, self._around_forward_backward)
        first = 0
        for chunk in self._adapter.data_parallel:
            chunk.watch_reductions(self._patches, functools.partial(self._reducing, chunk, first))
            first += len(chunk.groups)
        for number, wrapper in enumerate(self._chunks):
            wrap(points.FINISH_GRAD_SYNC, self._after_collective(number), of=wrapper)
        if check_params:
            wrap(points.ZERO_GRAD_BUFFER, self._before_forward, of=self._chunks[0])
        wrap(points.PREPARE_GRADS, self._around_prepare_grads, of=self._optimizer)
        if isinstance(self._optimizer, ChainedOptimizer):
            wrap(points.GRAD_NORM, self._around_get_grad_norm, of=self._optimizer)
        else:  # computes the norm in the clip, or not at all without one
            wrap(points.CLIP_GRAD_NORM, self._around_get_grad_norm, of=self._optimizer)
            wrap(points.READY_UPDATE, self._around_update, of=self._optimizer)
        wrap(points.MEGATRON_STEP, self._around_step, of=self._optimizer)
        self._order = BackwardOrder(self._adapter.ids, self._driver.locator)
        self._patches.on_removal(self._order.remove)
        self._driver.locator.add_not_covered(self._patches.lost)

    def _before_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._driver.begin(current_iteration())
        return result

    def _around_forward_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_ours = not args and not kwargs.get("forward_only") and self._is_our_model(kwargs.get("model"))
        if not is_ours or self._driver.is_closed or self._machine.is_in_its_own_rerun():
            return original(*args, **kwargs)
        if self._is_first_step and (loaded := loaded_checkpoint()):
            _C.note_loaded_checkpoint(loaded)
        step = MegatronPass(self._adapter, self._microbatches, original, kwargs)
        try:
            with self._driver.abandoning():
                self._driver.begin_pass(step, current_iteration())
                with self._driver.concluding("forward-backward failed on this rank"):
                    # Megatron's own checks would raise on this rank only; the other ranks would not know.
                    with self._machine.errors_held_back() as errors:
                        step.run(step.data.recording)
                self._first_step.losses += len(self._microbatches.losses)
                decision = self._driver.end_pass(self._microbatches.losses)
                if decision in (_C.Decision.RECOVERED, _C.Decision.SKIP):
                    self._machine.forget()
                    errors.clear()
                if errors:
                    raise errors[0]  # Megatron's error, after the report
                return step.result
        finally:
            self._driver.locator.now_in("training")

    @contextlib.contextmanager
    def _reducing(
        self,
        chunk: DataParallelChunk,
        first: int,
        number: int,
        parameters: list[torch.nn.Parameter],
        gradients: list[torch.Tensor],
    ) -> Iterator[None]:
        """Surrounds the start of a group's data-parallel collective; ``first``: number of the chunk's first
        group."""
        if self._driver.is_rerunning:
            chunk.clear_padding_of_gradients(number)
        self._first_step.buckets.add(first + number)
        self._driver.begin(current_iteration())
        ids = [self._adapter.ids[p] for p in parameters]
        self._driver.scan("grad_local", first + number, "main_grad", ids, gradients)
        with self._driver.concluding("Megatron raised an error before the data-parallel collective"):
            yield

    def _after_collective(self, number: int) -> Callable[..., Any]:
        def finish_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._driver.concluding("the data-parallel collective failed on this rank"):
                result = original(*args, **kwargs)
            self._first_step.chunks.add(number)
            self._driver.begin(current_iteration())
            self._driver.scan("grad_reduced", number, "main_grad", *self._adapter.owned_gradients(number))
            return result

        return finish_grad_sync

    def _around_prepare_grads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        self._first_step.hooks.add("prepare_grads")
        self._driver.begin(current_iteration())
        overflow = self._adapter.loss_scale_now()  # before the optimizer lowers it
        if overflow is not None:
            self._driver.locator.set_loss_scale(*overflow[:2])
        found_inf = original(*args, **kwargs)
        self._order.end_step()
        if self._driver.is_judged:
            return found_inf
        views = [
            view
            for optimizer in self._adapter.optimizers
            for view in optimizer_gradients(optimizer, self._adapter.shards)
        ]
        ids = [self._adapter.ids[p] for p, _, _ in views]
        offsets = [offset for _, _, offset in views]
        self._driver.scan("grad_norm", 0, "grad", ids, [gradient for _, gradient, _ in views], offsets)
        self._driver.start_agreement()
        if found_inf:  # step() returns at once; the host has just waited for found_inf
            self._finish_agreement(overflow)
        return found_inf

    def _around_get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        self._first_step.hooks.add("get_grad_norm")
        norm = original(*args, **kwargs)  # waits for the norm, all scans and the flag before it
        if self._driver.is_agreeing:
            self._driver.set_gradient_norm(float(norm))
            self._finish_agreement(None)
        return norm

    def _around_update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        if self._driver.is_agreeing:
            self._finish_agreement(None)
        return original(*args, **kwargs)

    def _finish_agreement(self, overflow: Any) -> None:
        """For values that became bad only after forward-backward, which cannot be executed again then."""
        if self._driver.finish_agreement(overflow) == _C.Decision.SKIP:
            raise SkippedUpdate

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = False, None, None  # Megatron's optimizers return this for a skipped step
        with self._driver.abandoning():
            if not self._driver.skips_update:
                with contextlib.suppress(SkippedUpdate):
                    result = original(*args, **kwargs)
            self._driver.end_step()
        if self._is_first_step and result[0]:
            self._end_first_step()
        return result

    def _end_first_step(self) -> None:
        """Reports expected observations that are missing; one rank of each pipeline stage prints them."""
        self._is_first_step = False
        self._microbatches.listeners.remove(self._first_step)
        if self._boundaries:
            self._boundaries.exchanges = None
        missing = self._first_step.missing()
        if not missing:
            return
        text = "expected in the first step but not seen: " + "; ".join(missing)
        self._driver.locator.add_standing_note(f"{text[0].upper()}{text[1:]}.")
        self._driver.locator.add_not_covered(missing)
        place = rank_coordinates(torch.device("cpu"))
        if (place.tp.rank, place.dp.rank, place.cp.rank) == (0, 0, 0):
            print(f"nanlocator: rank {place.rank}: {text}", file=sys.stderr, flush=True)

    def _is_our_model(self, model: Any) -> bool:
        chunks = model if isinstance(model, list) else [model]
        return len(chunks) == len(self._chunks) and all(map(operator.is_, chunks, self._chunks))
