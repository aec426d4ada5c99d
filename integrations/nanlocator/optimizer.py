"""LocatingOptimizer: wraps any torch.optim.Optimizer and finds bad gradients before it steps."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.rerun import losses_of
from nanlocator.session import is_distributed, resolve_options
from nanlocator.step_locator import StepLocator


class _SkippedStep(Exception):
    """Out of the wrapped optimizer's step: its update is left out."""


class LocatingOptimizer(StepLocator, Optimizer):
    """Looks for NaN and Inf in the gradients before ``optimizer`` uses them, and says where they are.

    It is a ``torch.optim.Optimizer`` that shares ``param_groups`` and ``state`` with the wrapped one, so
    learning-rate schedulers, GradScaler, checkpoints and hooks work on either. What it computes is what
    the wrapped optimizer computes, bit for bit.

    Args:
        optimizer: the optimizer to wrap; ``inner`` gives it back.
        model: its ``named_parameters()`` name the parameters.
        on_bad: ``"stop"`` raises :class:`NonFiniteGradientError` on every rank before a weight moves;
            ``"report"`` writes the verdict and goes on; ``"skip"`` goes on without the wrapped
            optimizer's step, which returns None then; ``"recover"`` goes on with the gradients and the
            loss of a clean repeat of ``step(closure)``, and stops where there is none.
        output_dir: where findings go; nothing but the parameter map is written while all is well.
        level: what is watched at every step. ``"grads"``: gradients. ``"modules"``: also every module's
            inputs, outputs and their gradients, without waiting. ``"operators"``: every operator, which
            waits for the device between them.
        rerun: ``True`` executes a bad step again where ``step(closure)`` allows it, with every operator
            traced, so that the verdict names the operator and says whether the fault repeats; without a
            closure the next bad step is traced. ``False`` does neither. ``"always"`` executes every step
            twice and warns where the two differ in a bit.
        check_params: scan the parameters before and after each step, too.
        grad_scaler: the ``GradScaler`` of this optimizer, if there is one. Its routine overflows are
            then no findings, until the scale has fallen below 1.
        gather_deadline: seconds to wait for ranks that do not answer when a finding is gathered.

    With torch.distributed initialised, every rank must build it, and call ``clip_grad_norm`` and ``step``
    equally often. Gradients are seen after DistributedDataParallel has reduced them. Options left at None
    are read from NANLOCATOR_ON_BAD, NANLOCATOR_OUTPUT_DIR, NANLOCATOR_LEVEL, NANLOCATOR_RERUN,
    NANLOCATOR_CHECK_PARAMS and NANLOCATOR_GATHER_DEADLINE.

    A closure that is executed again must compute the same loss from the same data. Generators (torch,
    Python, numpy), the model's buffers and the ``grad_scaler`` are put back before; what else it moves
    can be named with ``register_state``. ``remove`` takes the hooks of levels modules and operators off.

    Cost: one read of the gradients per step, and a wait of the host for a four-byte flag (with
    ``clip_grad_norm`` for the norm, too).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        *,
        on_bad: str | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        level: str | None = None,
        rerun: bool | str | None = None,
        check_params: bool | None = None,
        grad_scaler: "torch.amp.GradScaler | None" = None,
        gather_deadline: float | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise _C.UsageError(
                f"LocatingOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if isinstance(optimizer, LocatingOptimizer):
            raise _C.UsageError("this optimizer is a LocatingOptimizer already; wrap it once")
        options = resolve_options(
            on_bad=on_bad,
            output_dir=output_dir,
            level=level,
            rerun=rerun,
            check_params=check_params,
            gather_deadline=gather_deadline,
            integration="pytorch",
            not_covered=["gradients before DistributedDataParallel reduces them"] if is_distributed() else [],
        )
        # Optimizer.__init__ is not called: it would make groups and state of its own.
        StepLocator.__init__(self, optimizer, model, options, grad_scaler)

    # --- finding -------------------------------------------------------------------------------------

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, *, foreach: bool | None = None
    ) -> torch.Tensor:
        """Looks at the gradients, then clips them as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns torch's total norm. Raises NonFiniteGradientError (``on_bad="stop"``) before anything is
        clipped; also for a norm that overflows though every gradient is finite.
        """
        self._scan_gradients()
        parameters = [p for p in self._all_parameters() if p.grad is not None]
        # The two halves of clip_grad_norm_ (torch/nn/utils/clip_grad.py), with the verdict between them.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type, foreach=foreach)
        self._locator.set_gradient_norm(float(norm))
        self._agree()
        if self._skips_step:
            return norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step. Gradients that ``clip_grad_norm`` has not looked at in this step
        are scanned first; those that a closure computes, after each of its calls."""
        try:
            result = self._update() if closure is None else self.inner.step(lambda: self._evaluate(closure))
        except _SkippedStep:
            result = None
        self._end_step()
        return result

    def _update(self) -> Any:
        if not self._is_looked_at:
            self._scan_gradients()
            self._agree()
        if self._skips_step:
            return None
        self._rerun.begin_update()
        try:
            return self.inner.step()
        finally:
            self._rerun.end_update()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._begin_closure(closure)
        try:
            with torch.enable_grad():
                loss = closure()
            loss = self._judge(loss, [_C.LossView(tensor) for _, tensor in losses_of(loss)])
            if self._skips_step:
                raise _SkippedStep
        finally:
            self._closure = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        self._is_looked_at = False

    def _is_routine_overflow(self) -> bool:
        """The scaler has found Inf in these gradients, will skip the step and lower its scale. Once the
        scale is below 1 the gradients are not too large because of it."""
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return False
        state = self._grad_scaler._per_optimizer_states[id(self)]
        has_overflowed = any(found.item() for found in state["found_inf_per_device"].values())
        return has_overflowed and self._grad_scaler.get_scale() >= 1.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        if hasattr(self, "_locator"):
            self._take_parameters_again()

    # --- the wrapped optimizer's own -----------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # Only for what this class lacks: defaults, register_step_pre_hook's tables, fused flags, ...
        if name == "inner":
            raise AttributeError(name)
        if name == "_step_supports_amp_scaling":
            # GradScaler must unscale and judge before step(): gradients are looked at unscaled.
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"LocatingOptimizer({self.inner!r})"
