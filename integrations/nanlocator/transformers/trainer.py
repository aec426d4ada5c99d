"""``NanLocatorCallback``: finds where a NaN or Inf was born in a step of transformers' ``Trainer``.

One step, in the order of transformers 5.17 (trainer.py, ``_run_epoch``):

    training_step, once per microbatch     kept, with its arguments
      ... the last one, in which accelerate synchronises: gradients and losses are scanned, all ranks agree;
          a bad step is executed again through ``training_step`` and judged here
    _clip_grad_norm                        unscales and clips: too late to look
    on_pre_optimizer_step
    optimizer.step                         left out under ``on_bad="skip"``

A callback never gets its Trainer, and ``on_train_end`` is not called when ``train`` raises. So
``Trainer.train`` is wrapped once per process: for Trainers that have this callback it says which one it is,
and takes the hooks off however it ends; for others it does nothing. The hooks replace methods of that one
Trainer and of its optimizer, so subclasses with a ``training_step`` or ``compute_loss`` of their own are
followed as they are.
"""

import contextlib
import copy
import functools
import os
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.driver import LossScale, Named
from nanlocator.optimizer import LocatingOptimizer
from nanlocator.patches import Patches
from nanlocator.plain import PlainAdapter, PlainPass, plain_driver
from nanlocator.rerun import ObjectState, Stateful, losses_of
from nanlocator.session import is_distributed, resolve_options

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"NanLocatorCallback works with transformers' Trainer, which cannot be imported ({error}): "
        "pip install transformers accelerate"
    ) from error


class NanLocatorCallback(TrainerCallback):
    """Finds NaN and Inf in the gradients and losses of a ``Trainer`` before they are clipped, and says where
    they were born.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[NanLocatorCallback()])
        trainer.train()

    A bad step is executed again on every rank, with every operator traced: the same microbatches through
    ``training_step``, from the same random numbers and buffers. Each ``train()`` is a run of its own.

    Args:
        on_bad: ``"stop"`` (default) raises ``nanlocator.NonFiniteGradientError`` out of ``train`` on every
            rank, before anything is clipped; ``"report"`` writes the verdict and goes on; ``"skip"`` goes on
            without the optimizer's step, while the learning-rate schedule advances; ``"recover"`` goes on
            with the gradients and the loss of a clean re-run, and stops where there is none.
        level: ``"modules"`` (default), ``"grads"`` or ``"operators"``, as of ``LocatingOptimizer``.
        output_dir: where verdict, report.html and bundles go; default ``nanlocator_run`` in the Trainer's
            ``output_dir``.
        rerun: ``True`` (default) executes a bad step again; ``False`` does not; ``"always"`` executes every
            step twice and warns where the two differ in a bit.
        check_params: scan the parameters before and after each step, too.
        gather_deadline: seconds to wait for ranks that do not answer when a finding is gathered.

    Options left at None are read from NANLOCATOR_ON_BAD, NANLOCATOR_LEVEL, NANLOCATOR_OUTPUT_DIR,
    NANLOCATOR_RERUN, NANLOCATOR_CHECK_PARAMS and NANLOCATOR_GATHER_DEADLINE.

    Attributes:
        verdicts: findings of all calls of ``train``, oldest first.
        run_dir: folder of the latest ``train``; None before the first.
        dismissed: overflows of the latest ``train`` with which fp16's loss scaler looks for its scale.

    A healthy run computes the same bits with and without it. Cost: as of LocatingOptimizer, at the same
    level. The microbatches of the step are kept until it ends.

    Raises:
        nanlocator.UsageError: from ``train``, for options that cannot work and for Trainers whose gradients
            cannot be looked at (DeepSpeed, FSDP, DataParallel, optimizers that step in backward).
    """

    def __init__(
        self,
        *,
        on_bad: str | None = None,
        level: str | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        rerun: bool | str | None = None,
        check_params: bool | None = None,
        gather_deadline: float | None = None,
    ) -> None:
        self._arguments = {
            "on_bad": on_bad,
            "level": level,
            "output_dir": output_dir,
            "rerun": rerun,
            "check_params": check_params,
            "gather_deadline": gather_deadline,
        }
        self.verdicts: list[dict[str, Any]] = []
        self._states: dict[str, Stateful] = {}
        self._trainer: Trainer | None = None  # while it trains
        self._steps: _TrainerSteps | None = None
        _follow_trainers()

    @property
    def run_dir(self) -> str | None:
        return self._steps.driver.run_dir if self._steps is not None else None

    @property
    def dismissed(self) -> int:
        return self._steps.driver.locator.dismissed if self._steps is not None else 0

    def register_state(self, name: str, owner: Stateful) -> None:
        """Something with ``state_dict`` and ``load_state_dict`` that ``training_step`` moves, such as a
        metric or a buffer of samples: restored before a step is executed again. Call it before ``train``."""
        self._states[name] = owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            raise _C.UsageError(
                "NanLocatorCallback follows transformers.Trainer.train, and this trainer has a train() of "
                "its own that does not call it: use nanlocator.LocatingOptimizer in its loop"
            )
        _check(self._trainer)
        self._end()
        options = resolve_options(
            **self._arguments,
            integration="transformers",
            not_covered=["gradients before DistributedDataParallel reduces them"] if is_distributed() else [],
            default_level="modules",
            default_output_dir=os.path.join(args.output_dir, "nanlocator_run"),
        )
        self._steps = _TrainerSteps(self._trainer, options, self.verdicts)
        for name, owner in self._states.items():
            self._steps.driver.add_state(name, ObjectState(owner))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is not None:
            self._steps.driver.forget_observations()  # a forward that no training step belongs to

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._steps is not None:
            self._steps.driver.close()
            self._steps.remove()

    @contextlib.contextmanager
    def _following(self, trainer: Trainer) -> Iterator[None]:
        if self._trainer is not None:
            raise _C.UsageError(
                "this NanLocatorCallback follows a train() already: give each Trainer its own"
            )
        self._trainer = trainer
        try:
            yield
        finally:
            self._trainer = None
            # The connection stays where `train` raises: at exit it says why to the other ranks.
            if self._steps is not None:
                self._steps.remove()


@functools.cache
def _follow_trainers() -> None:
    train = Trainer.train

    @functools.wraps(train)
    def followed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, NanLocatorCallback)]
        if len(callbacks) > 1:
            raise _C.UsageError("this Trainer has more than one NanLocatorCallback: keep one")
        with callbacks[0]._following(self) if callbacks else contextlib.nullcontext():
            return train(self, *args, **kwargs)

    Trainer.train = followed


def _check(trainer: Trainer) -> None:
    kind = trainer.accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise _C.UsageError(
            f"NanLocatorCallback looks at parameter.grad, which {kind} keeps elsewhere or in shards; it "
            "works with one process and with DistributedDataParallel"
        )
    if trainer.args.n_gpu > 1:
        raise _C.UsageError(
            "NanLocatorCallback does not follow DataParallel, which copies the model in every forward: start "
            "the script with torchrun, for DistributedDataParallel"
        )
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in name or "layerwise" in name:
        raise _C.UsageError(
            f"optim={name!r} updates weights during backward, so that a bad step can neither be stopped nor "
            "executed again; use another optimizer to look for the NaN"
        )


class _Microbatch:
    """One call of ``training_step``."""

    def __init__(
        self,
        number: int | None,
        trainer: Trainer,
        step: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        inputs: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self.number = number  # None where it is the only one
        self.is_last = trainer.accelerator.sync_gradients
        # DistributedDataParallel's own flag: Trainer calls no_sync by other rules than accelerate's.
        self.is_reduced = getattr(model, "require_backward_grad_sync", True)
        self.model = model
        self._accelerator = trainer.accelerator
        self._step = step
        self._inputs = _containers_copied(inputs)
        self._arguments, self._keywords = arguments, keywords
        self._versions = [(name, tensor, _version(tensor)) for name, tensor in _named_tensors(inputs)]

    def run(self) -> torch.Tensor:
        _C.set_current_microbatch(self.number, None)
        try:
            return self._step(
                self.model, _containers_copied(self._inputs), *self._arguments, **self._keywords
            )
        finally:
            _C.set_current_microbatch(None, None)

    def run_again(self) -> torch.Tensor:
        self._accelerator.gradient_state._set_sync_gradients(self.is_last)
        with contextlib.nullcontext() if self.is_reduced else self._accelerator.no_sync(self.model):
            return self.run()

    def loss_view(self, loss: torch.Tensor) -> "_C.LossView":
        """With the number of labels that the Trainer has counted, of all microbatches and ranks."""
        items = self._keywords.get("num_items_in_batch", next(iter(self._arguments), None))
        is_count = isinstance(items, torch.Tensor) and items.numel() == 1
        return _C.LossView(loss, self.number, None, items if is_count else None)

    def changed(self) -> list[str]:
        """Sentences about inputs that the step has written to."""
        place = "" if self.number is None else f"microbatch {self.number}: "
        return [
            f"{place}'{name}' was written in place by the step"
            for name, tensor, version in self._versions
            if _version(tensor) != version
        ]


class _TrainerPass(PlainPass):
    """The microbatches of one step."""

    def __init__(self, adapter: PlainAdapter, trainer: Trainer) -> None:
        super().__init__(adapter)
        self._trainer = trainer
        self._logged_loss = trainer._tr_loss.clone()  # what the Trainer had summed up before this step
        self._all: list[_Microbatch] = []
        self.losses: list[torch.Tensor] = []  # of the latest execution

    def run(
        self,
        step: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        inputs: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> _Microbatch:
        """The next microbatch, for the first time."""
        is_only = self._trainer.args.gradient_accumulation_steps == 1
        number = None if is_only else len(self._all)
        microbatch = _Microbatch(number, self._trainer, step, model, inputs, arguments, keywords)
        self._all.append(microbatch)
        self.losses.append(microbatch.run())
        return microbatch

    def loss_views(self) -> "list[_C.LossView]":
        return [each.loss_view(loss) for each, loss in zip(self._all, self.losses, strict=True)]

    def run_again(self) -> Named:
        try:
            with self._adapter.naming_modules():
                self.losses = [microbatch.run_again() for microbatch in self._all]
        finally:
            # accelerate's optimizer steps by it, also where a microbatch of the re-run has raised.
            self._trainer.accelerator.gradient_state._set_sync_gradients(True)
        return losses_of(self.losses)

    def changed_data(self) -> list[str]:
        return [text for microbatch in self._all for text in microbatch.changed()]

    def log_latest_losses(self) -> None:
        """In the place of the first execution's; the Trainer adds the last microbatch's itself."""
        self._trainer._tr_loss.copy_(self._logged_loss)
        for loss in self.losses[:-1]:
            self._trainer._tr_loss += loss


class _TrainerSteps:
    """The steps of one call of ``train``: hooks, and one pass at a time."""

    def __init__(
        self, trainer: Trainer, options: "_C.LocatorOptions", verdicts: list[dict[str, Any]]
    ) -> None:
        self._trainer = trainer
        self._scaler = getattr(trainer.accelerator, "scaler", None)
        self._adapter = PlainAdapter(_innermost(trainer.optimizer), trainer.model)
        self._adapter.verdicts = verdicts
        if self._scaler is not None and self._scaler.is_enabled():
            self._adapter.loss_scale = functools.partial(_loss_scale, self._scaler)
        self.driver = plain_driver(self._adapter, options, self._scaler)
        self._pass: _TrainerPass | None = None
        self._patches = Patches()
        self._patches.wrap(trainer, "training_step", self._around_training_step)
        self._patches.wrap(trainer.optimizer, "step", self._around_update)

    def remove(self) -> None:
        self.driver.stop_following()
        self._patches.remove()
        self._pass = None

    def _around_training_step(
        self,
        step: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.driver.is_closed:
            return step(model, inputs, *args, **kwargs)
        with self.driver.abandoning():
            if self._pass is None or not self.driver.is_in_pass:
                self._pass = _TrainerPass(self._adapter, self._trainer)
                self.driver.begin_pass(self._pass, self._trainer.state.global_step + 1)
            microbatch = self._pass.run(step, model, inputs, args, kwargs)
            loss = self._pass.losses[-1]
            if microbatch.is_last and self.driver.end_pass(self._pass.loss_views()) == _C.Decision.RECOVERED:
                self._pass.log_latest_losses()
                loss = self._pass.losses[-1]
            return loss

    def _around_update(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.driver.is_closed:
            return step(*args, **kwargs)
        self._pass, result = None, None
        with self.driver.abandoning():
            if not self.driver.skips_update:
                self.driver.begin_update()
                result = step(*args, **kwargs)
            elif self._scaler is not None and self._scaler.is_enabled():
                self._scaler.update()  # as after every unscale_
            self.driver.end_step()
        return result


def _loss_scale(scaler: "torch.amp.GradScaler") -> LossScale:
    """It has not unscaled these gradients. Dividing by a scale of 1 or more makes no Inf of a finite value;
    below 1 they are not too large because of it."""
    scale = scaler.get_scale()
    return scale, scale >= 1.0, True


def _innermost(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, LocatingOptimizer):
        raise _C.UsageError(
            "this Trainer's optimizer is a LocatingOptimizer: give it the optimizer itself, "
            "NanLocatorCallback does the looking"
        )
    return optimizer


def _containers_copied(value: Any) -> Any:
    """Tensors as they are; the step may take entries out of its inputs."""
    if type(value) in (list, tuple):
        return type(value)(_containers_copied(item) for item in value)
    return copy.copy(value) if isinstance(value, dict | UserDict) else value


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from _named_tensors(item, f"{name}.{key}" if name else str(key))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # nobody counts writes to inference tensors
