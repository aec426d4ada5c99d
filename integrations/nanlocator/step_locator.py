"""StepLocator: one bad step of a plain PyTorch loop, from its gradients to its verdict.

``LocatingOptimizer`` and the Trainer callback of ``nanlocator.transformers`` are made of it: they know when
forward and backward begin and end, and when the optimizer steps.
"""

import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from nanlocator import _C
from nanlocator.module_calls import KeptModuleCalls
from nanlocator.modules import ModuleHooks, WatchedModules, local_part, tensor_attributes
from nanlocator.rerun import GeneratorStates, ObjectState, ScalerState, Stateful, losses_of
from nanlocator.session import (
    RankConnection,
    device_description,
    dtype_name,
    is_distributed,
    raise_or_continue,
    warn_of_other_bits,
)

_GRADIENTS, _PARAMETERS = 0, 1  # scan groups


class StepLocator:
    """What a training loop has to call, in each step, on every rank:

        _begin_closure(closure)     before forward, where forward and backward can be executed again
        _judge(loss, loss_views)    after backward: scans, agrees, repeats and concludes
        _end_step()                 after the optimizer's update

    Without a closure ``_scan_gradients`` and ``_agree`` take the place of the first two.

    Args:
        optimizer: its ``param_groups`` are looked at, in their order.
        model: names the parameters, and has the modules and buffers.
        options: from ``resolve_options``.
        grad_scaler: put back before a repeat.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        options: _C.LocatorOptions,
        grad_scaler: "torch.amp.GradScaler | None",
    ) -> None:
        if options.level == "boundaries":
            raise _C.UsageError(
                "level 'boundaries' watches what Megatron-Core's ranks hand to each other; here use 'grads', "
                "'modules' or 'operators'"
            )
        self.inner = optimizer
        self._grad_scaler = grad_scaler
        self._model_names = {p: n for n, p in model.named_parameters()}
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
        self._module_calls = KeptModuleCalls()  # around the origins of the bad step
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

    # --- a step ----------------------------------------------------------------------------------------

    def _begin_closure(self, closure: Callable[[], Any]) -> None:
        """``closure`` executes forward and backward again; it returns the loss, or several."""
        self._closure = closure
        self._had_gradient = {p for p in self._parameters if p.grad is not None}
        if self._watched is not None:
            self._watched.begin_step()
        self._rerun.save()

    def _judge(self, loss: Any, loss_views: "list[_C.LossView]") -> Any:
        """``loss`` is what the closure's first pass has returned. Returns what to go on with: that of the
        clean repeat where the step has been recovered."""
        self._is_open = False  # LBFGS evaluates many times a step; each has its own finding
        self._scan_gradients()
        self._locator.scan_losses(loss_views)
        is_bad = self._agree()
        if self._repeated_loss is not None:  # recovered
            loss, self._repeated_loss = self._repeated_loss, None
        elif not is_bad and self._rerun_policy == "always":
            warn_of_other_bits(self._iteration, self._rerun.compare())
            self._repeated_loss = None
        return loss

    def _end_step(self) -> None:
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
        tensors = [local_part(parameter) for parameter in self._parameters]
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
        """True, on all ranks alike, where a loss scaler has made the gradients too large and will leave the
        step out itself."""
        raise NotImplementedError

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
            this()._module_calls.begin(modules).during(this()._model, this()._closure)

        self._rerun.set_step(
            run=run,
            gradients=lambda: this()._gradients(),
            clear_gradients=lambda: this()._clear_gradients(),
            parameters=[
                (info.name, local_part(parameter))
                for info, parameter in zip(self._locator.parameters, self._parameters, strict=True)
            ],
            buffers=[(n.removeprefix("module."), local_part(b)) for n, b in self._model.named_buffers()],
            attributes=lambda: [(n.removeprefix("module."), t) for n, t in tensor_attributes(this()._model)],
            run_and_keep_module_calls=run_and_keep_module_calls,
            module_call=self._module_calls.of,
        )

    def _gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        with_gradient = [
            (i, local_part(p.grad)) for i, p in enumerate(self._parameters) if p.grad is not None
        ]
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
        self._module_calls.forget()
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

    def _take_parameters_again(self) -> None:
        """The optimizer has other parameters now."""
        self._parameters = _unique_parameters(self.inner)
        self._locator.set_map(self._make_map())
        self._set_step()


def _unique_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """The concatenated groups in order; position = parameter id."""
    return list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
