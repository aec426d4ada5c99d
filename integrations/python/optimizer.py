"""LocatingOptimizer: wraps any torch.optim.Optimizer and finds bad gradients before it steps."""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.session import (
    RankConnection,
    device_description,
    dtype_name,
    is_distributed,
    raise_or_continue,
    resolve_options,
)

_GRADIENTS, _PARAMETERS = 0, 1  # scan groups


class LocatingOptimizer(Optimizer):
    """Looks for NaN and Inf in the gradients before ``optimizer`` uses them, and says where they are.

    It is a ``torch.optim.Optimizer`` that shares ``param_groups`` and ``state`` with the wrapped one, so
    learning-rate schedulers, GradScaler, checkpoints and hooks work on either. What it computes is what
    the wrapped optimizer computes, bit for bit.

    Args:
        optimizer: the optimizer to wrap; ``inner`` gives it back.
        model: its ``named_parameters()`` name the parameters.
        on_bad: ``"stop"`` raises :class:`NonFiniteGradientError` on every rank before a weight moves;
            ``"report"`` writes the verdict and goes on.
        output_dir: where findings go; nothing but the parameter map is written while all is well.
        check_params: scan the parameters before and after each step, too.
        grad_scaler: the ``GradScaler`` of this optimizer, if there is one. Its routine overflows are
            then no findings, until the scale has fallen below 1.
        gather_deadline: seconds to wait for ranks that do not answer when a finding is gathered.

    With torch.distributed initialised, every rank must build it, and call ``clip_grad_norm`` and ``step``
    equally often. Gradients are seen after DistributedDataParallel has reduced them. Options left at None
    are read from NANLOCATOR_ON_BAD, NANLOCATOR_OUTPUT_DIR, NANLOCATOR_CHECK_PARAMS and
    NANLOCATOR_GATHER_DEADLINE.

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
        check_params: bool | None = None,
        grad_scaler: "torch.amp.GradScaler | None" = None,
        gather_deadline: float | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would make groups and state of its own.
        if not isinstance(optimizer, Optimizer):
            raise _C.UsageError(
                f"LocatingOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if isinstance(optimizer, LocatingOptimizer):
            raise _C.UsageError("this optimizer is a LocatingOptimizer already; wrap it once")
        self.inner = optimizer
        self._grad_scaler = grad_scaler
        self._model_names = {p: n for n, p in model.named_parameters()}
        options = resolve_options(
            on_bad=on_bad,
            output_dir=output_dir,
            check_params=check_params,
            gather_deadline=gather_deadline,
            integration="pytorch",
            not_covered=["gradients before DistributedDataParallel reduces them"] if is_distributed() else [],
        )
        self._on_bad: str = options.on_bad
        self._check_params: bool = options.check_params
        self._connection = RankConnection() if is_distributed() else None
        self._phase = "grad_reduced" if self._connection else "grad_local"
        self._parameters = _unique_parameters(optimizer)
        self._locator = _C.GradientLocator(
            self._make_map(), options, self._connection.communicator if self._connection else None
        )
        self._iteration = 1
        self._is_looked_at = False
        self._is_open = False  # begin_step has been called for this iteration
        self.verdicts: list[dict[str, Any]] = []

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
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step. Gradients that ``clip_grad_norm`` has not looked at in this step
        are scanned first; those that a closure computes, after each of its calls."""
        if closure is None:
            if not self._is_looked_at:
                self._scan_gradients()
                self._agree()
            result = self.inner.step()
        else:

            def watched_closure() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._is_open = False  # LBFGS evaluates many times a step; each has its own finding
                self._scan_gradients()
                self._agree()
                return loss

            result = self.inner.step(watched_closure)
        if self._check_params:
            self._begin_step()
            self._scan_parameters("params_after")
            self._agree()
        self._iteration += 1
        self._is_open = self._is_looked_at = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        self._is_looked_at = False

    def _begin_step(self) -> None:
        if self._is_open:
            return
        self._locator.begin_step(self._iteration)
        self._is_open = True
        if self._check_params:
            self._scan_parameters("params_before")

    def _scan_gradients(self) -> None:
        self._begin_step()
        ids, gradients = [], []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                ids.append(index)
                gradients.append(_local(parameter.grad))
        self._locator.scan(self._phase, _GRADIENTS, "grad", ids, gradients)
        self._is_looked_at = True

    def _scan_parameters(self, phase: str) -> None:
        tensors = [_local(parameter.detach()) for parameter in self._parameters]
        self._locator.scan(phase, _PARAMETERS, "weight", list(range(len(tensors))), tensors)

    def _agree(self) -> None:
        self._locator.start_agreement()
        if not self._locator.finish_agreement():
            return
        if self._is_routine_overflow():
            self._locator.dismiss()
            self._is_open = False
            return
        verdict = json.loads(self._locator.conclude())
        self.verdicts.append(verdict)
        self._is_open = self._is_looked_at = False
        raise_or_continue(verdict, self._on_bad)
        self._is_looked_at = True

    def _is_routine_overflow(self) -> bool:
        """The scaler has found Inf in these gradients, will skip the step and lower its scale. Once the
        scale is below 1 the gradients are not too large because of it."""
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return False
        state = self._grad_scaler._per_optimizer_states[id(self)]
        has_overflowed = any(found.item() for found in state["found_inf_per_device"].values())
        return has_overflowed and self._grad_scaler.get_scale() >= 1.0

    # --- names ---------------------------------------------------------------------------------------

    def _all_parameters(self) -> Iterable[torch.nn.Parameter]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def _make_map(self) -> _C.ParameterMap:
        rank, world = 0, 1
        if self._connection:
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        coordinates = _C.data_parallel_coordinates(rank, world)
        if self._parameters:
            coordinates.device = device_description(self._parameters[0].device)
        fallback = {
            p: f"group{g}.{i}"
            for g, group in enumerate(self.inner.param_groups)
            for i, p in enumerate(group["params"])
        }
        infos = []
        for index, parameter in enumerate(self._parameters):
            info = _C.ParameterInfo()
            info.id = index
            info.raw_name = self._model_names.get(parameter, fallback[parameter])
            info.name = info.raw_name.removeprefix("module.")
            info.shape = list(parameter.shape)
            info.dtype = dtype_name(parameter.dtype)
            infos.append(info)
        return _C.ParameterMap(coordinates, infos)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        if hasattr(self, "_locator"):
            self._parameters = _unique_parameters(self.inner)
            self._locator.set_map(self._make_map())

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


def _unique_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """The concatenated groups in order; position = parameter id."""
    return list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
