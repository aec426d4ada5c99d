"""MegatronLocator: where the scans are hooked into Megatron-Core's step, and how a bad step ends.

One step on every rank, in this order:

    zero_grad_buffer     params_before (check_params)
    start_grad_sync      grad_local:   each parameter's main_grad, before the bucket's collective
    finish_grad_sync     grad_reduced: the same after it (the owned shard with a distributed optimizer)
    prepare_grads        grad_norm:    what the optimizer will clip; then the flag reduction is launched
    get_grad_norm        ... and read: a bad step ends here, before the clip
    step                 params_after (check_params)

Hooks replace methods on the instances, never on Megatron's classes; ``remove`` takes them off.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import megatron.core
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config
from nanlocator import _C
from nanlocator.megatron.layout import (
    bucket_groups,
    named_parameters,
    optimizer_gradients,
    parameter_infos,
    rank_coordinates,
    shard_ranges,
)
from nanlocator.session import RankConnection, log_once, raise_or_continue, resolve_options

_TESTED_MEGATRON = "0.16.1"
_STEPS_TO_OBSERVE = 20
_INSTALLED = "_nanlocator"  # attribute of the optimizer that holds the installed locator


def install(
    model_chunks: torch.nn.Module | list[torch.nn.Module] | tuple[torch.nn.Module, ...],
    optimizer: MegatronOptimizer,
    *,
    level: str = "grads",
    on_bad: str | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    check_params: bool | None = None,
    gather_deadline: float | None = None,
) -> "MegatronLocator":
    """Watches the gradients of a Megatron-Core model from now on. Call it on every rank.

    Args:
        model_chunks: the DistributedDataParallel-wrapped chunks of this rank (one, or one per virtual
            pipeline stage), as handed to ``get_megatron_optimizer``.
        optimizer: what ``get_megatron_optimizer`` returned.
        level: ``"grads"``.
        on_bad: ``"stop"`` (default) raises ``nanlocator.NonFiniteGradientError`` on every rank, out of
            ``optimizer.step``, before anything is clipped or stepped; ``"report"`` goes on.
        output_dir: folder of the run, default ``nanlocator_run``.
        check_params: scan the parameters before forward and after the step, too.
        gather_deadline: seconds to wait for ranks that do not answer when a finding is gathered.

    Options left at None are read from NANLOCATOR_ON_BAD, NANLOCATOR_OUTPUT_DIR,
    NANLOCATOR_CHECK_PARAMS and NANLOCATOR_GATHER_DEADLINE.

    Raises ``nanlocator.UsageError`` for a wrong call and ``nanlocator.AgreementError``, on every rank
    alike, where ranks differ in versions or options.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    _check_call(chunks, optimizer, level)
    options = resolve_options(
        on_bad=on_bad,
        output_dir=output_dir,
        level="grads",
        rerun=False,
        check_params=check_params,
        gather_deadline=gather_deadline,
        integration="megatron",
        not_covered=_not_covered(chunks),
    )
    return MegatronLocator(chunks, optimizer, options)


class MegatronLocator:
    """An installed locator; made by :func:`install`.

    ``verdicts`` lists the findings so far (verdict.json as dictionaries), ``run_dir`` is where their
    files are, ``dismissed`` counts the loss scaler's routine overflows.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], optimizer: ChainedOptimizer, options: _C.LocatorOptions
    ) -> None:
        self.verdicts: list[dict[str, Any]] = []
        self._chunks = chunks
        self._optimizer = optimizer
        self._optimizers: list[MegatronOptimizer] = optimizer.chained_optimizers
        self._on_bad: str = options.on_bad
        self._check_params: bool = options.check_params

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
        self._steps = 0  # completed
        self._is_open = False  # begin_step has been called for the step that runs now
        self._loss_scale = 0.0  # before prepare_grads updates it

        self._unpatch: list[Callable[[], None]] = []
        self._install_hooks()
        setattr(optimizer, _INSTALLED, self)
        log_once(
            f"watching the gradients of {len(self._named)} parameters (rank 0), "
            f"on_bad={self._on_bad}; files of a finding go to {self.run_dir}"
        )

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
        while self._unpatch:
            self._unpatch.pop()()
        delattr(self._optimizer, _INSTALLED)
        self._connection.close()

    # --- hooks ---------------------------------------------------------------------------------------

    def _install_hooks(self) -> None:
        groups = [group for chunk in self._chunks for group in bucket_groups(chunk)]
        for number, group in enumerate(groups):
            self._patch(group, "start_grad_sync", self._before_collective(number, group))
        for number, chunk in enumerate(self._chunks):
            self._patch(chunk, "finish_grad_sync", self._after_collective(number))
        if self._check_params:
            self._patch(self._chunks[0], "zero_grad_buffer", self._before_forward)
        self._patch(self._optimizer, "prepare_grads", self._around_prepare_grads)
        self._patch(self._optimizer, "get_grad_norm", self._around_get_grad_norm)
        self._patch(self._optimizer, "step", self._around_step)
        self._observe_backward_order()

    def _patch(self, target: Any, method: str, wrap: Callable[..., Any]) -> None:
        """``target.method(*args)`` becomes ``wrap(original, *args)``, on this instance only."""
        original = getattr(target, method)
        wrapper = functools.wraps(original)(functools.partial(wrap, original))
        had_own = method in vars(target)
        setattr(target, method, wrapper)

        def unpatch() -> None:
            if vars(target).get(method) is not wrapper:
                return  # someone wrapped ours since: it stays inside theirs, and passes calls on
            if had_own:
                setattr(target, method, original)
            else:
                delattr(target, method)

        self._unpatch.append(unpatch)

    def _before_collective(self, number: int, group: Any) -> Callable[..., Any]:
        parameters = [p for bucket in group.buckets for p in bucket.params_list]
        ids = [self._ids[p] for p in parameters]

        def start_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The guard of _ParamAndGradBucketGroup.start_grad_sync itself: in the first batch
            # finish_grad_sync calls it again while the collective is in flight.
            if group.is_first_batch and group.grad_reduce_handle is not None:
                return original(*args, **kwargs)
            self._begin_step()
            self._locator.scan("grad_local", number, "main_grad", ids, [p.main_grad for p in parameters])
            with _ConcludeOnError(self, "Megatron raised before the data-parallel collective"):
                result = original(*args, **kwargs)
            if group.ddp_config.check_for_nan_in_grad and get_rerun_state_machine().rerun_requested:
                # Megatron will repeat the pass and then may exit before the optimizer steps.
                self._conclude_alone("Megatron's rerun state machine has asked for a re-run")
            return result

        return start_grad_sync

    def _after_collective(self, number: int) -> Callable[..., Any]:
        parameters = [entry.parameter for entry in self._named if entry.chunk == number]

        def finish_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with _ConcludeOnError(self, "the data-parallel collective failed on this rank"):
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
            self._locator.scan("grad_reduced", number, "main_grad", ids, tensors, offsets)
            return result

        return finish_grad_sync

    def _before_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._begin_step()
        self._scan_parameters("params_before")
        return result

    def _around_prepare_grads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        self._begin_step()
        self._loss_scale = max((s.scale.item() for s in self._dynamic_scalers()), default=0.0)
        found_inf = original(*args, **kwargs)
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
        self._end_observation()
        if found_inf:  # step() returns at once; the host has just waited for found_inf
            self._finish_agreement(is_overflow=True)
        return found_inf

    def _around_get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        norm = original(*args, **kwargs)  # waits for the norm, all scans and the flag before it
        self._locator.set_gradient_norm(float(norm))
        self._finish_agreement(is_overflow=False)
        return norm

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
            if self._check_params:
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
        self._unpatch.append(lambda: [hook.remove() for hook in hooks])

    def _end_observation(self) -> None:
        """After a step in which every gradient became ready the order is known. Where some never does (an
        expert without tokens), a few steps are enough to wait for it."""
        if not self._order_hooks:
            return
        if not self._not_yet_ready or self._steps >= _STEPS_TO_OBSERVE:
            while self._order_hooks:
                self._order_hooks.pop().remove()
        self._not_yet_ready = {entry.parameter for entry in self._named}

    # --- a step --------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if not self._is_open:
            self._locator.begin_step(self._iteration())
            self._is_open = True

    def _iteration(self) -> int:
        """As Megatron's log prints it, counted from 1; in a loop of one's own: calls of step."""
        global_vars = sys.modules.get("megatron.training.global_vars")
        args = getattr(global_vars, "_GLOBAL_ARGS", None)
        current = getattr(args, "curr_iteration", None)
        return (self._steps if current is None else current) + 1

    def _scan_parameters(self, phase: str) -> None:
        tensors = [entry.parameter.detach() for entry in self._named]
        self._locator.scan(phase, 0, "weight", [self._ids[e.parameter] for e in self._named], tensors)

    def _finish_agreement(self, *, is_overflow: bool) -> None:
        with _ConcludeOnError(self, "the ranks could not agree on this step"):
            is_bad = self._locator.finish_agreement()
        if not is_bad:
            return
        if is_overflow and self._is_routine_overflow():
            self._locator.dismiss()
            return
        verdict = json.loads(self._locator.conclude())
        self.verdicts.append(verdict)
        raise_or_continue(verdict, self._on_bad, self._locator.run_dir)

    def _dynamic_scalers(self) -> list[Any]:
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in self._optimizers)
        return [scaler for scaler in scalers if scaler is not None and hasattr(scaler, "min_scale")]

    def _is_routine_overflow(self) -> bool:
        """fp16 with a dynamic loss scale looks for its scale by overflowing; at the smallest scale an
        overflow is no longer the scale's doing. (grad_scaler.py, DynamicGradScaler)"""
        scalers = self._dynamic_scalers()
        return bool(scalers) and self._loss_scale > max(s.min_scale.item() for s in scalers)

    def _conclude_alone(self, reason: str) -> None:
        text = self._locator.conclude_alone(reason)
        if text is None:
            return
        verdict = json.loads(text)
        if not self.verdicts or self.verdicts[-1] != verdict:  # the same again where nothing new was seen
            self.verdicts.append(verdict)


class _ConcludeOnError:
    """An exception on its way through one rank must not take its findings with it: the other ranks
    will not come to the agreement, so this rank's ledger is written now and the error goes on."""

    def __init__(self, locator: MegatronLocator, reason: str) -> None:
        self._locator, self._reason = locator, reason

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            self._locator._conclude_alone(f"{self._reason}: {type(error).__name__}: {error}")


# --- what the call must bring, and what is not covered -----------------------------------------------


def _check_call(chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, level: str) -> None:
    if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
        raise _C.UsageError(
            "nanlocator.megatron.install: torch.distributed and megatron.core.parallel_state must be "
            "initialised first; call it after get_megatron_optimizer"
        )
    if level != "grads":
        raise _C.UsageError(f"level is {level!r}; this version of nanlocator has 'grads'")
    if not isinstance(optimizer, ChainedOptimizer):
        raise _C.UsageError(
            f"nanlocator.megatron.install expects what get_megatron_optimizer returns (a ChainedOptimizer), "
            f"not a {type(optimizer).__name__}; Megatron-FSDP and layer-wise optimizers are not covered"
        )
    for index, chunk in enumerate(chunks):
        if not hasattr(chunk, "bucket_groups"):
            raise _C.UsageError(
                f"model chunk {index} is a {type(chunk).__name__} without gradient buckets; hand over the "
                "chunks wrapped in megatron.core.distributed.DistributedDataParallel"
            )
    if hasattr(optimizer, _INSTALLED):
        raise _C.UsageError(
            "nanlocator is installed on this optimizer already; call locator.remove() first to install "
            "it with other options"
        )


def _not_covered(chunks: list[torch.nn.Module]) -> list[str]:
    """Sentences for run.json about this very configuration."""
    config, ddp = get_model_config(chunks[0]), chunks[0].ddp_config
    found = ["which operator, module and microbatch a value was born in: level grads sees gradients only"]
    if parallel_state.get_tensor_model_parallel_world_size() > 1 or (
        parallel_state.get_pipeline_model_parallel_world_size() > 1
    ):
        found.append(
            "the rank within a data-parallel replica, where a value has crossed tensor-parallel "
            "all-reduces or pipeline transfers before it reached a gradient: candidates are listed"
        )
    if megatron.core.__version__ != _TESTED_MEGATRON:
        found.append(
            f"Megatron-Core {megatron.core.__version__} is not the tested {_TESTED_MEGATRON}: "
            "hooks may sit in the wrong place"
        )
    if ddp.overlap_param_gather:
        found.append("with overlap_param_gather, parameters are checked before they are gathered")
    if getattr(ddp, "num_distributed_optimizer_instances", 1) > 1:
        found.append("collectives between distributed-optimizer instances")
    if parallel_state.get_context_parallel_world_size() > 1:
        found.append("the rank within a context-parallel group")
    if getattr(config, "fp8", None):
        found.append("fp8 weights and scales")
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") != "none":
        found.append("values inside CUDA graphs")
    return found
