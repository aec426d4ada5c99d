"""``NanLocatorCallback``: finds where a NaN or Inf was born in a step of transformers' ``Trainer``.

One step, in the order of transformers 5.17 (trainer.py, ``_run_epoch``):

    training_step, once per microbatch     kept, with its arguments
      ... the last one, in which accelerate synchronises: gradients and losses are scanned, all ranks agree;
          a bad step is executed again through ``training_step`` and judged here
    _clip_grad_norm                        unscales and clips: too late to scan
    on_pre_optimizer_step
    optimizer.step                         left out under ``on_bad="skip"``

A callback never gets its Trainer, and ``on_train_end`` is not called when ``train`` raises. So
``Trainer.train`` is wrapped once per process: it passes the Trainer to this callback if the Trainer has one,
and removes the hooks however ``train`` ends. The hooks replace methods of that one Trainer and of its
optimizer, so they also work for subclasses with their own ``training_step`` or ``compute_loss``.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack  # torch brings it; typing has it from Python 3.11 on

from nanlocator import _C
from nanlocator.engine.options import Options, check_names, resolve_options
from nanlocator.engine.verdict import Verdict
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.loops.loaded_batches import LoadedBatches
from nanlocator.loops.optimizer import LocatingOptimizer
from nanlocator.loops.plain import PlainAdapter, plain_driver, scale_in_gradients
from nanlocator.state.rerun import ObjectState, Stateful
from nanlocator.transformers.microbatches import TrainerPass

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"NanLocatorCallback needs transformers' Trainer, which cannot be imported ({error}): "
        "pip install transformers accelerate"
    ) from error


class NanLocatorCallback(TrainerCallback):
    """Finds NaN and Inf in the gradients and losses of a ``Trainer`` before they are clipped, and reports
    where they were born.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[NanLocatorCallback()])
        trainer.train()

    A bad step is executed again on every rank, with every operator traced: the same microbatches through
    ``training_step``, from the same random numbers and buffers. Each ``train()`` is a separate run.

    Args:
        options: see :class:`nanlocator.engine.options.Options`. The defaults are level ``"modules"`` and, as
            ``output_dir``, ``nanlocator_run`` in the Trainer's. Under ``on_bad="skip"`` the learning-rate
            schedule advances; an error is raised out of ``train``.

    Attributes:
        verdicts: findings of all calls of ``train``, oldest first.
        run_dir: folder of the latest ``train``; None before the first.
        dismissed: overflows of the latest ``train`` with which fp16's loss scaler looks for its scale.

    A healthy run computes the same bits with and without it. Cost: that of LocatingOptimizer at the same
    level. The microbatches of the step are kept until it ends.

    Raises:
        nanlocator.UsageError: from ``train``, for options that cannot work and for Trainers whose gradients
            cannot be scanned (DeepSpeed, FSDP, DataParallel, optimizers that step in backward).
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        check_names(options, "transformers")
        self._options = options
        self.verdicts: list[Verdict] = []
        self._states: dict[str, Stateful] = {}
        self._trainer: Trainer | None = None  # while it trains
        self._resumed: str | bool | None = None  # where it was told to resume; True: from the last one
        self._steps: _TrainerSteps | None = None
        _follow_trainers()

    @property
    def run_dir(self) -> str | None:
        return self._steps.driver.run_dir if self._steps is not None else None

    @property
    def dismissed(self) -> int:
        return self._steps.driver.locator.dismissed if self._steps is not None else 0

    def register_state(self, name: str, owner: Stateful) -> None:
        """Registers an object with ``state_dict`` and ``load_state_dict`` that ``training_step`` changes,
        such as a metric or a buffer of samples. It is restored before a step is executed again. Call it
        before ``train``."""
        self._states[name] = owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            raise _C.UsageError(
                "NanLocatorCallback follows transformers.Trainer.train, but this trainer's own train() does "
                "not call it: use nanlocator.LocatingOptimizer in its loop"
            )
        _check(self._trainer)
        self._end()
        options = resolve_options(
            self._options,
            "transformers",
            output_dir=os.path.join(args.output_dir, "nanlocator_run"),
            checkpoint_dir=args.output_dir,
        )
        self._steps = _TrainerSteps(self._trainer, options, self.verdicts)
        for name, owner in self._states.items():
            self._steps.driver.add_state(name, ObjectState(owner))
        if self._resumed and state.global_step > 0:
            last = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            _C.note_loaded_checkpoint(os.path.abspath(last if self._resumed is True else self._resumed))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is not None:
            self._steps.driver.forget_observations()  # a forward outside of training steps

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._steps is not None:
            self._steps.driver.close()
            self._steps.remove()

    @contextlib.contextmanager
    def _following(self, trainer: Trainer, resumed: str | bool | None) -> Iterator[None]:
        """``resumed``: the checkpoint from which ``train`` was told to resume; True: the last one."""
        if self._trainer is not None:
            raise _C.UsageError(
                "this NanLocatorCallback already follows a running train(): give each Trainer its own"
            )
        self._trainer, self._resumed = trainer, resumed
        try:
            yield
        finally:
            self._trainer = None
            # If `train` raises, the connection stays: at exit it sends the reason to the other ranks.
            if self._steps is not None:
                self._steps.remove()


@functools.cache
def _follow_trainers() -> None:
    def followed(train: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, NanLocatorCallback)]
        if len(callbacks) > 1:
            raise _C.UsageError("this Trainer has more than one NanLocatorCallback: keep one")
        resumed = args[0] if args else kwargs.get("resume_from_checkpoint")
        with callbacks[0]._following(self, resumed) if callbacks else contextlib.nullcontext():
            return train(self, *args, **kwargs)

    Patches(__name__).wrap(points.TRAIN, followed)


def _check(trainer: Trainer) -> None:
    kind = trainer.accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        raise _C.UsageError(
            "NanLocatorCallback cannot see what DeepSpeed does with gradients: remove it, and start the "
            "script with NANLOCATOR=1 or python -m nanlocator, which installs nanlocator.deepspeed"
        )
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise _C.UsageError(
            f"NanLocatorCallback scans parameter.grad, which {kind} keeps elsewhere or in shards; it "
            "works only with one process and with DistributedDataParallel"
        )
    if trainer.args.n_gpu > 1:
        raise _C.UsageError(
            "NanLocatorCallback does not support DataParallel, which copies the model in every forward: "
            "start the script with torchrun to get DistributedDataParallel"
        )
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in name or "layerwise" in name:
        raise _C.UsageError(
            f"optim={name!r} updates weights during backward, so a bad step can be neither stopped nor "
            "re-run; use another optimizer to look for the NaN"
        )


class _TrainerSteps:
    """The hooks of one call of ``train``."""

    def __init__(self, trainer: Trainer, options: _C.LocatorOptions, verdicts: list[Verdict]) -> None:
        self._trainer = trainer
        self._scaler = getattr(trainer.accelerator, "scaler", None)
        assert trainer.model is not None and trainer.optimizer is not None  # since `train` has begun
        self._adapter = PlainAdapter([_innermost(trainer.optimizer)], {"": trainer.model})
        self._adapter.verdicts = verdicts
        self.driver = plain_driver(self._adapter, options, self._scaler, scale_in_gradients)
        self._batches = LoadedBatches()
        self._patches = Patches(__name__)
        self._patches.wrap(points.TRAINING_STEP, self._around_training_step, of=trainer)
        self._patches.wrap(points.OPTIMIZER_STEP, self._around_update, of=trainer.optimizer)
        self.driver.locator.add_not_covered(self._patches.lost)

    def remove(self) -> None:
        self.driver.stop_following()
        self._patches.remove()

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
            step_pass = self.driver.step_pass
            if step_pass is None:
                step_pass = TrainerPass(self._adapter, self._trainer, self._batches)
                self.driver.begin_pass(step_pass, self._trainer.state.global_step + 1)
            microbatch = step_pass.run(step, model, inputs, args, kwargs)
            loss = step_pass.losses[-1]
            if microbatch.is_last and self.driver.end_pass(step_pass.loss_views()) == _C.Decision.RECOVERED:
                step_pass.log_latest_losses()
                loss = step_pass.losses[-1]
            return loss

    def _around_update(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.driver.is_closed:
            return step(*args, **kwargs)
        result = None
        with self.driver.abandoning():
            if not self.driver.skips_update:
                self.driver.begin_update()
                result = step(*args, **kwargs)
            elif self._scaler is not None and self._scaler.is_enabled():
                self._scaler.update()  # as after every unscale_
            self.driver.end_step()
        return result


def _innermost(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, LocatingOptimizer):
        raise _C.UsageError(
            "this Trainer's optimizer is a LocatingOptimizer: pass the optimizer inside it (.inner), because "
            "NanLocatorCallback does the scans"
        )
    return optimizer
