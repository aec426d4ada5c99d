"""LocatingOptimizer: wraps any torch.optim.Optimizer and finds bad gradients before it steps."""

import json
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.module_calls import ModuleCalls
from nanlocator.modules import ModuleHooks, WatchedModules
from nanlocator.rerun import GeneratorStates, ObjectState, ScalerState, Stateful, losses_of
from nanlocator.session import (
    RankConnection,
    device_description,
    dtype_name,
    is_distributed,
    raise_or_continue,
    resolve_options,
    warn_of_other_bits,
)

_GRADIENTS, _PARAMETERS = 0, 1  # scan groups


class _SkippedStep(Exception):
    """Out of the wrapped optimizer's step: its update is left out."""


class LocatingOptimizer(Optimizer):
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
            level=level,
            rerun=rerun,
            check_params=check_params,
            gather_deadline=gather_deadline,
            integration="pytorch",
            not_covered=["gradients before DistributedDataParallel reduces them"] if is_distributed() else [],
        )
        if options.level == "boundaries":
            raise _C.UsageError(
                "level 'boundaries' watches what Megatron-Core's ranks hand to each other; with "
                "LocatingOptimizer use 'grads', 'modules' or 'operators'"
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
        self._rerun_policy: str = options.rerun
        self._model = model
        self._closure: Callable[[], Any] | None = None  # of the step that is running
        self._had_gradient: set[torch.nn.Parameter] = set()  # when it was called
        self._repeated_loss: Any = None  # of the closure's latest repeat
        self._skips_step = False
        self._module_calls: ModuleCalls | None = None  # around the origins of the bad step
        self._rerun = _C.StepRerun(self._locator)
        self._set_step()
        self._add_state("the generators of Python and numpy", GeneratorStates())
        if grad_scaler is not None:
            self._add_state("the loss scaler", ScalerState(grad_scaler))
        self._level: str = options.level
        self._watched: WatchedModules | None = None
        if self._level == "modules":
            self._watched = WatchedModules(model)
            weakref.finalize(self, self._watched.remove)
        self._hooks: ModuleHooks | None = None
        if self._level == "operators":
            self._rerun.trace_from_now_on()
            if not self._rerun.is_tracing:
                raise _C.UsageError(
                    "level 'operators' is on for another optimizer of this process; one trace at a time: "
                    "call its remove() first"
                )
            self._follow_trace()

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
        if self._check_params and not self._skips_step:
            self._begin_step()
            self._scan_parameters("params_after")
            self._agree(self._parameters)
        self._iteration += 1
        self._is_open = self._is_looked_at = self._skips_step = False
        self._rerun.begin_pass()
        self._follow_trace()
        if self._watched is not None:
            self._watched.begin_step()
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
            self._is_open = False  # LBFGS evaluates many times a step; each has its own finding
            self._scan_gradients()
            self._locator.scan_losses([_C.LossView(tensor) for _, tensor in losses_of(loss)])
            is_bad = self._agree()
            if self._skips_step:
                raise _SkippedStep
            if self._repeated_loss is not None:  # recovered
                loss, self._repeated_loss = self._repeated_loss, None
            elif not is_bad and self._rerun_policy == "always":
                warn_of_other_bits(self._iteration, self._rerun.compare())
                self._repeated_loss = None
        finally:
            self._closure = None
        return loss

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
        self._locator.scan(self._phase, _GRADIENTS, "grad", *self._gradients())
        self._is_looked_at = True

    def _scan_parameters(self, phase: str) -> None:
        tensors = [_local(parameter.detach()) for parameter in self._parameters]
        self._locator.scan(phase, _PARAMETERS, "weight", list(range(len(tensors))), tensors)

    def _agree(self, results: list[torch.Tensor] | None = None) -> bool:
        """Concludes where any rank has found something bad; True then. ``results``: the tensors that were
        looked at, where they are not the gradients."""
        self._locator.start_agreement()
        if not self._locator.finish_agreement():
            return False
        if self._is_routine_overflow():
            self._locator.dismiss()
            self._is_open = False
            return False
        is_recovered = self._find_births(results) and self._on_bad == "recover"
        if not is_recovered:
            self._repeated_loss = None
        self._skips_step = self._on_bad == "skip" and results is None
        verdict = json.loads(self._locator.conclude())
        self.verdicts.append(verdict)
        self._is_open = self._is_looked_at = False
        stops = self._on_bad == "stop" or (self._on_bad == "recover" and not is_recovered)
        raise_or_continue(verdict, "stop" if stops else "report", self._locator.run_dir)
        self._is_looked_at = True
        return True

    def _is_routine_overflow(self) -> bool:
        """The scaler has found Inf in these gradients, will skip the step and lower its scale. Once the
        scale is below 1 the gradients are not too large because of it."""
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return False
        state = self._grad_scaler._per_optimizer_states[id(self)]
        has_overflowed = any(found.item() for found in state["found_inf_per_device"].values())
        return has_overflowed and self._grad_scaler.get_scale() >= 1.0

    # --- the repeat of a bad step --------------------------------------------------------------------

    def register_state(self, name: str, owner: Stateful) -> None:
        """Something with ``state_dict`` and ``load_state_dict`` that the closure moves, such as the sampler
        that it draws its batch from: saved before each closure, put back before it is executed again.
        What cannot be put back is named in the verdict."""
        self._add_state(name, ObjectState(owner))

    def remove(self) -> None:
        """Takes the hooks of levels ``modules`` and ``operators`` off; the gradients are still looked at."""
        if self._watched is not None:
            self._watched.remove()
            self._watched = None
        self._rerun.stop_tracing()
        self._follow_trace()

    def _add_state(self, name: str, state: Any) -> None:
        self._rerun.add_state(name, state.save, state.restore)

    def _set_step(self) -> None:
        # The engine holds these functions, and this object the engine: they must not hold this object.
        this = weakref.ref(self)

        def run() -> list[tuple[str, torch.Tensor]]:
            with ModuleHooks(this()._model):
                this()._repeated_loss = this()._closure()
            return losses_of(this()._repeated_loss)

        def run_and_keep_module_calls(modules: list[str]) -> None:
            this()._module_calls = calls = ModuleCalls(set(modules))
            calls.during(this()._model, this()._closure)

        def module_call(name: str) -> "_C.ModuleCall | None":
            calls = this()._module_calls
            return calls.of(name) if calls is not None else None

        self._rerun.set_step(
            run=run,
            gradients=lambda: this()._gradients(),
            clear_gradients=lambda: this()._clear_gradients(),
            parameters=[(i.name, p) for i, p in zip(self._locator.parameters, self._parameters, strict=True)],
            buffers=[(n.removeprefix("module."), _local(b)) for n, b in self._model.named_buffers()],
            run_and_keep_module_calls=run_and_keep_module_calls,
            module_call=module_call,
        )

    def _begin_closure(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self._had_gradient = {p for p in self._parameters if p.grad is not None}
        if self._watched is not None:
            self._watched.begin_step()
        self._rerun.save()

    def _gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        with_gradient = [(i, _local(p.grad)) for i, p in enumerate(self._parameters) if p.grad is not None]
        return [i for i, _ in with_gradient], [gradient for _, gradient in with_gradient]

    def _clear_gradients(self) -> None:
        """As the closure found them, as far as that is known: none, or zero."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                had = parameter in self._had_gradient
                parameter.grad = torch.zeros_like(parameter.grad) if had else None

    def _find_births(self, results: list[torch.Tensor] | None) -> bool:
        """True where the step was repeated and came out clean, on all ranks."""
        if self._watched is not None:
            self._locator.set_births(self._watched.collect(self._iteration)[1])
        views = self._gradients() if results is None else (list(range(len(results))), results)
        is_clean_now = self._rerun.find_births(self._closure is not None and results is None, views)
        self._module_calls = None
        self._follow_trace()
        return is_clean_now

    def _follow_trace(self) -> None:
        """Module names for the trace, as long as there is one."""
        if self._rerun.is_tracing and self._hooks is None:
            self._hooks = ModuleHooks(self._model)
            weakref.finalize(self, self._hooks.remove)
        elif not self._rerun.is_tracing and self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

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
            self._set_step()

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
