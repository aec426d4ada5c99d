"""LocatingOptimizer: wraps any torch.optim.Optimizer and finds bad gradients before it steps."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from typing_extensions import Unpack  # torch brings it; typing has it from Python 3.11 on

from nanlocator import _C
from nanlocator.engine.driver import Named, SkippedUpdate
from nanlocator.engine.locator import Locator
from nanlocator.engine.options import Options, resolve_options
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.loops.ownership import keep_from_deepspeed, refuse_owned
from nanlocator.loops.plain import (
    PlainAdapter,
    PlainDriver,
    PlainPass,
    held_parameters,
    overflow_seen,
    plain_driver,
)
from nanlocator.sharding import fsdp1
from nanlocator.sharding.pipelining import follow_steps, stages_of
from nanlocator.state.closures import iterators_of
from nanlocator.state.rerun import Stateful, losses_of


class LocatingOptimizer(Locator, Optimizer):
    """Looks for NaN and Inf in the gradients before ``optimizer`` uses them, and says where they are.

    It is a ``torch.optim.Optimizer`` that shares ``param_groups`` and ``state`` with the wrapped one, so
    learning-rate schedulers, GradScaler, checkpoints and hooks work on either. Its results equal the wrapped
    optimizer's bit for bit.

    Args:
        optimizer: the optimizer to wrap; ``inner`` returns it.
        model: its ``named_parameters()`` name the parameters.
        grad_scaler: the ``GradScaler`` of this optimizer, if there is one. Its routine overflows are
            not findings then, until the scale has fallen below 1.
        options: see :class:`nanlocator.engine.options.Options`. ``step`` returns None if a policy leaves
            the update out. A re-run needs ``step(closure)``; without it the next bad step is traced.

    With torch.distributed initialised, every rank must construct it, and call ``clip_grad_norm`` and ``step``
    equally often. Without a closure, gradients are seen only after DistributedDataParallel has reduced them.

    A re-run of the closure must compute the same loss from the same data. Generators (torch, Python, numpy),
    the model's buffers and the ``grad_scaler`` are restored first; register any other state that it changes
    with ``register_state``. ``remove`` removes the hooks of levels modules and operators.

    Cost: one read of the gradients per step, and a wait of the host for a four-byte flag (with
    ``clip_grad_norm`` for the norm, too).
    """

    _driver: PlainDriver

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        *,
        grad_scaler: GradScaler | None = None,
        **options: Unpack[Options],
    ) -> None:
        refuse_owned([model], [optimizer])
        if not isinstance(optimizer, Optimizer):
            raise _C.UsageError(
                f"LocatingOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if isinstance(optimizer, LocatingOptimizer):
            raise _C.UsageError("this optimizer is already a LocatingOptimizer; wrap it only once")
        resolved = resolve_options(options, "optimizer")
        # Optimizer.__init__ is not called: it would make its own groups and state.
        self.inner = optimizer
        keep_from_deepspeed(self)
        self._adapter = PlainAdapter([optimizer], {"": model})
        overflow = functools.partial(overflow_seen, optimizer_id=id(self))
        self._driver = plain_driver(self._adapter, resolved, grad_scaler, overflow)

    # --- finding -------------------------------------------------------------------------------------

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, *, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scans the gradients, then clips them as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns torch's total norm. Raises NonFiniteGradientError (``on_bad="stop"``) before anything is
        clipped, also for a norm that overflows though every gradient is finite. Inside a closure it clips,
        and the gradients from before the clip are judged when the closure has returned.
        """
        with self._driver.abandoning():
            self._driver.scan_gradients()
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            # The two halves of clip_grad_norm_ (torch/nn/utils/clip_grad.py), with the verdict between them.
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type, foreach=foreach)
            self._driver.set_gradient_norm(float(norm))
            if self._driver.agree() != _C.Decision.SKIP:
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step. First scans the gradients that ``clip_grad_norm`` has not scanned in
        this step; with a closure, after each of its calls."""
        with self._driver.abandoning():
            try:
                if closure is None:
                    result = self._update()
                else:
                    result = self.inner.step(lambda: self._evaluate(closure))
            except SkippedUpdate:
                result = None
            self._driver.end_step()
        return result

    def _update(self) -> Any:
        if self._driver.scan_and_agree() == _C.Decision.SKIP:
            return None
        self._driver.begin_update()
        return self.inner.step()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        evaluation = _Evaluation(self._adapter, self._driver, closure)
        self._driver.begin_pass(evaluation)
        loss = evaluation.run()
        decision = self._driver.end_pass([_C.LossView(tensor) for _, tensor in losses_of(loss)])
        if decision == _C.Decision.SKIP:
            raise SkippedUpdate
        return evaluation.latest if decision == _C.Decision.RECOVERED else loss

    def register_state(self, name: str, owner: Stateful) -> None:
        super().register_state(name, owner)
        self._adapter.has_own_state = True

    def remove(self) -> None:
        """Removes all hooks; the gradients are still scanned."""
        self._driver.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        self._driver.forget_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        if "_driver" in vars(self):
            self._driver.take_parameters_again()

    # --- delegated to the wrapped optimizer ---------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # Only for attributes that this class lacks: defaults, tables of register_step_pre_hook, fused flags.
        if name == "inner":
            raise AttributeError(name)
        if name == "_step_supports_amp_scaling":
            # GradScaler must unscale and judge before step(): gradients are scanned unscaled.
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"LocatingOptimizer({self.inner!r})"


class _Evaluation(PlainPass):
    """One call of a closure."""

    def __init__(self, adapter: PlainAdapter, driver: PlainDriver, closure: Callable[[], Any]) -> None:
        super().__init__(adapter)
        self._driver = driver
        self._closure = closure
        self.latest: Any = None  # its latest result

    def run(self) -> Any:
        with torch.enable_grad(), self._before_clips(), self._following_pipeline():
            self.latest = self._closure()
        return self.latest

    def run_again(self) -> Named:
        with self._adapter.naming_modules():
            return losses_of(self.run())

    def changed_data(self) -> list[str]:
        if self._adapter.has_own_state:  # the program has registered the state that its closure changes
            return []
        return [f"the closure draws from the iterator '{name}'" for name in iterators_of(self._closure)]

    @contextlib.contextmanager
    def _following_pipeline(self) -> Iterator[None]:
        def step(original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
            held = held_parameters(stage.submod for stage in stages_of(schedule))
            pipeline = None
            if not held.isdisjoint(self._adapter.tensors):
                pipeline = self._driver.pipeline_of(schedule)
            if pipeline is None:
                return original(schedule, *args, **kwargs)
            is_first = not self._driver.is_rerunning
            with pipeline.watching() if is_first else contextlib.nullcontext():
                return pipeline.run(original, args, kwargs)

        with Patches(__name__) as patches:
            follow_steps(patches, step)
            yield

    @contextlib.contextmanager
    def _before_clips(self) -> Iterator[None]:
        """If one gradient is NaN, ``torch.nn.utils.clip_grad_norm_`` makes all of them NaN, so this scans
        them first."""

        def clip(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if not set(self._adapter.tensors).isdisjoint(parameters):
                self._driver.scan_gradients()
            original(parameters, *args, **kwargs)

        def clip_module(original: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not set(self._adapter.tensors).isdisjoint(fsdp1.sharded_parameters(module)):
                self._driver.scan_gradients()
            return original(module, *args, **kwargs)

        with Patches(__name__) as patches:
            patches.wrap(points.CLIP, clip)
            if fsdp1.wrapper_class() is not None:
                patches.wrap(points.FSDP1_CLIP, clip_module)
            yield
