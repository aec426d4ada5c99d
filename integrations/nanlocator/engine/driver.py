"""Driver: the engine's StepDriver for adapters that are written in Python.

The engine owns the step: agreement, re-run, policy, cleanup of a step that ends early. An ``Adapter``
describes a framework, and a ``Pass`` executes one forward and backward again. Neither holds state of the
step, and neither refers to the driver, which keeps them alive.
"""

import contextlib
import dataclasses
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nanlocator import _C
from nanlocator.calls.kernel_calls import KeptKernelCalls, KernelCallRecord
from nanlocator.calls.kernels import KernelCalls
from nanlocator.calls.module_calls import KeptModuleCalls
from nanlocator.calls.modules import ModelInputs, ModuleHooks, ModuleObserver, local_part
from nanlocator.engine.blocked_rerun import not_blocked
from nanlocator.engine.checkpoint_files import CheckpointFiles
from nanlocator.engine.connection import RankConnection
from nanlocator.engine.endings import abort_collectives, first_line, is_failure_of_peers, raise_for
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.on_failure import OnFailure
from nanlocator.engine.this_rank import log, log_verdict
from nanlocator.engine.tracebacks import CleanTracebacks
from nanlocator.engine.verdict import Verdict
from nanlocator.exchange import stream_sanitizer
from nanlocator.exchange.boundaries import Boundaries
from nanlocator.exchange.transfers import SerialisedTransfers, ShownTransfers
from nanlocator.hooks.patches import weakly
from nanlocator.state.buffers import Buffers
from nanlocator.state.communication_hooks import HookStates
from nanlocator.state.cuda_graphs import OwnReplays, ReplayedGraphs, without_graphs
from nanlocator.state.generators import ProgramGenerators
from nanlocator.state.module_attributes import ModuleAttributes
from nanlocator.state.rerun import Fp8Scales
from nanlocator.state.written_files import WrittenFiles

Views = tuple[list[int], list[torch.Tensor]]  # parameter ids, tensors
Named = list[tuple[str, torch.Tensor]]
OptimizerTensors = list[
    tuple[int, str, torch.Tensor, int]
]  # id, name, tensor, its first element in the parameter
LossScale = tuple[float, bool, bool]  # scale, falls on overflow, is in the gradients
TraceHooks = ModuleHooks | KernelCalls | ShownTransfers


class Adapter:
    """Describes a framework to the engine. nanlocator/step/framework.hpp is the contract; the engine calls
    these members by name, on the training thread unless a method's docstring names another."""

    gradient_phase = "grad_local"  # phase of `gradients` when a pass has ended
    why_no_pass = ""  # the reason if the driver did not see a step's forward and backward
    can_trace_later_steps = True  # ... whether a later step is traced instead
    loss_scale: Callable[[], LossScale | None] | None = None  # None: no loss scaler
    models: Iterable[torch.nn.Module]  # the roots; their submodules belong to them
    parameters: Named

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.verdicts: list[Verdict] = []
        self.boundaries: Boundaries | None = None  # at level boundaries, once they are watched
        self._module_calls = KeptModuleCalls()  # around the origins of a bad step
        self._kernel_calls = KeptKernelCalls()  # the origins of a bad step
        self._eager = contextlib.ExitStack()
        self._serialised: tuple[SerialisedTransfers, _C.SerialisedOperators] | None = None

    # --- each framework implements these --------------------------------------------------------------

    def parameter_map(self) -> _C.ParameterMap:
        raise NotImplementedError

    def gradients(self) -> Views:
        raise NotImplementedError

    def weights(self) -> Views:
        raise NotImplementedError

    def optimizer_state(self, ids: list[int]) -> OptimizerTensors:
        """Returns the optimizer's tensors for these parameters (moments, its own copy of the weight)."""
        return []

    def skips_bad_updates(self) -> bool:
        """Whether the framework itself leaves out an update with bad gradients; the same on all ranks."""
        return False

    def parameters_now(self) -> Named:
        """Returns ``parameters``, including any that the framework has replaced."""
        return self.parameters

    def model_tensors(self) -> tuple[Named, Named]:
        """Returns the current parameters, and the buffers including tensors that modules hold as plain
        attributes."""
        raise NotImplementedError

    def module_hooks(self, watch: ModuleObserver | None) -> list[ModuleHooks]:
        """Installs hooks that name the running modules and show their calls to ``watch``."""
        raise NotImplementedError

    # --- the same for each framework ------------------------------------------------------------------

    def buffers_now(self) -> Named:
        return self.buffers.now()

    def keep_calls(self, modules: list[str], kernels: list[tuple[str, int]], run: Callable[[], None]) -> None:
        """``kernels`` has names and the number of the call in a pass. Crossings are watched, too: members
        compare the results of the same collective."""
        self._kernel_calls.want(kernels)
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_graphs(self.models))
            if self.boundaries is not None:
                stack.enter_context(self.boundaries.watching())
            for hooks in self.module_hooks(self._module_calls.begin(modules)):
                stack.enter_context(hooks)
            stack.enter_context(self._kernel_calls.keeping())
            run()

    def kernel_call(self, name: str, number: int) -> KernelCallRecord | None:
        return self._kernel_calls.of(name, number)

    def module_call(self, name: str) -> _C.ModuleCall | None:
        return self._module_calls.of(name)

    def has_compiled_parts(self) -> bool:
        """Whether torch.compile has compiled anything in this process."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        # Frames with fullgraph=True are counted only by their graphs.
        return dynamo is not None and (
            dynamo.counters["frames"]["ok"] > 0 or dynamo.counters["stats"]["unique_graphs"] > 0
        )

    def set_eager(self, is_eager: bool) -> None:
        self._eager.close()
        if is_eager:
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def set_serialised(self, is_serialised: bool) -> None:
        if self._serialised is not None:
            self._serialised[0].remove()
        self._serialised = (SerialisedTransfers(), _C.SerialisedOperators()) if is_serialised else None

    def has_streams(self) -> bool:
        return stream_sanitizer.is_available()

    def sanitise_streams(self, run: Callable[[], None]) -> list[stream_sanitizer.StreamAccess]:
        with stream_sanitizer.sanitised_streams() as accesses:
            run()
        names = {}
        for name, parameter in self.parameters:
            for tensor in (parameter, parameter.grad, getattr(parameter, "main_grad", None)):
                if isinstance(tensor, torch.Tensor):
                    names[tensor.data_ptr()] = name
        return [dataclasses.replace(each, parameter=names.get(each.address, "")) for each in accesses]

    def abort_collectives(self) -> None:
        """Runs on its own thread, and may never return."""
        abort_collectives()

    def on_verdict(self, text: str) -> None:
        self._module_calls.forget()
        self._kernel_calls.want([])
        self.verdicts.append(Verdict(json.loads(text)))
        log_verdict(self.verdicts[-1])

    def trace_hooks(self, watch: ModuleObserver | None = None) -> list[TraceHooks]:
        """Hooks that give module names and show calls that the dispatcher does not see."""
        return [*self.module_hooks(watch or ModelInputs()), KernelCalls(), ShownTransfers()]

    @contextlib.contextmanager
    def naming_modules(self, watch: ModuleObserver | None = None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_graphs(self.models))
            if self.boundaries is not None:
                stack.enter_context(self.boundaries.counting())
            for hooks in self.trace_hooks(watch):
                stack.enter_context(hooks)
            yield


class Pass:
    """Forward and backward of one step, which the engine can execute again.

    Attributes:
        begun: when the first pass did, by time.monotonic(); 0 if that is not known.
    """

    begun = 0.0
    _took: float | None = None  # seconds, the first pass

    def run_again(self) -> Named:
        """Executes them from the same data; returns the losses."""
        raise NotImplementedError

    def run_unblocked(self) -> Named:
        """``run_again``, which fails if it waits for something that does not come a second time."""
        if self._took is None:
            self._took = time.monotonic() - self.begun if self.begun else 0.0
        with not_blocked(self._took):
            return self.run_again()

    def clear_gradients(self) -> None:
        """Restores the gradients from before the first pass: none, or zero."""
        raise NotImplementedError

    def changed_data(self) -> list[str]:
        """Sentences about data that the pass has overwritten: a re-run sees the changed values."""
        return []

    def leaves_out_reduction(self) -> bool:
        """Whether the program reduced gradients by collectives of its own, which a re-run leaves out."""
        return False

    def unseen_reads(self) -> str:
        """What code that a re-run calls may read and nobody has compared with the first pass, as a clause;
        "" if there is nothing. Asked after a re-run."""
        return ""

    def repeats_compiled_code(self) -> bool:
        """Whether a re-run calls code that torch.compile has made, also where it is to run eagerly."""
        return False

    def obstacle(self) -> str | None:
        """Why the pass cannot be executed again, as a clause. "": it can. None: it always can, on all ranks
        alike."""
        return None

    def microbatches(self) -> list[tuple[int, int | None, list[str]]]:
        """For each microbatch that the pass has drawn: number, chunk, a line per tensor."""
        return []


class SkippedUpdate(Exception):
    """Raised out of a framework's own step to leave out its update."""


class StepState(Protocol):
    """State that a re-run restores; ``restore`` raises a RuntimeError that names what it cannot restore."""

    def save(self) -> None: ...

    def restore(self) -> None: ...


if TYPE_CHECKING:
    _EngineDriver = _C.StepDriver  # type of the object behind Driver.__getattr__
else:
    _EngineDriver = object


class Driver(_EngineDriver):
    """Owns one ``_C.StepDriver`` with its hooks and its connection. Turns ``stop`` into an error."""

    number_made = 0  # in this process; `attach` reads it to see whether a script scans by itself

    def __init__(
        self,
        adapter: Adapter,
        options: _C.LocatorOptions,
        connection: RankConnection | None,
        *,
        follows_checkpoints: bool = True,
    ) -> None:
        Driver.number_made += 1
        self.adapter = adapter
        self.connection = connection
        self._engine = _C.StepDriver(adapter, options, connection.communicator if connection else None)
        self._locator = self._engine.locator  # one object, because `weakly` refers to it
        self._generators = ProgramGenerators()
        self.add_state("the generators of Python and numpy", self._generators)
        self.add_state("TransformerEngine's fp8 scales", Fp8Scales())
        own_replays = OwnReplays(weakly(self.locator.add_standing_note))
        self._hook_states = HookStates(adapter.models)
        self.add_state("what communication hooks keep", self._hook_states)
        self.add_state("CUDA graphs", ReplayedGraphs(adapter.models, own_replays))
        self.add_state("the models' buffers", adapter.buffers)
        self._checkpoint_files: list[CheckpointFiles] = []
        if follows_checkpoints:
            updates, names = weakly(self._updates), weakly(self._names_of_parameters)
            self._checkpoint_files.append(CheckpointFiles(updates, lambda: names() or ()))
        self._attributes = ModuleAttributes(adapter.models)
        self.add_state("the modules' attributes", self._attributes)
        self._files = WrittenFiles()
        self.add_state("files that the step writes", self._files)
        self._scanning = contextlib.ExitStack()  # watches crossings during a pass
        self._step_pass: Callable[[], Pass | None] = lambda: None
        self._watch_hooks: list[ModuleHooks | OwnReplays | CleanTracebacks] = [own_replays, CleanTracebacks()]
        self._trace_hooks: list[TraceHooks] = []
        # A driver that is dropped without `remove` leaves no hook behind.
        weakref.finalize(self, _remove_all, self._watch_hooks, self._trace_hooks, self._checkpoint_files)
        if options.level == "modules":
            watch = _C.ModuleWatch(torch.get_num_threads())
            self._engine.watch(watch)
            self._watch_hooks += adapter.module_hooks(watch)
        self._follow_trace()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Delegates to the engine."""
            if name == "_engine":  # not made yet
                raise AttributeError(name)
            return getattr(self._engine, name)

    @property
    def locator(self) -> _C.GradientLocator:
        return self._locator

    # Each step asks so often that delegation would be dear.

    @property
    def is_in_pass(self) -> bool:
        return self._engine.is_in_pass

    @property
    def has_ended_pass(self) -> bool:
        return self._engine.has_ended_pass

    @property
    def run_dir(self) -> str:
        return self.locator.run_dir

    def _updates(self) -> int:
        return self._engine.updates

    def _names_of_parameters(self) -> set[str]:
        return {name for name, _ in self.adapter.parameters}

    @property
    def boundaries(self) -> Boundaries | None:
        return self.adapter.boundaries

    def follow_boundaries(self, boundaries: Boundaries) -> None:
        """Scans crossings at these boundaries in each pass from now on, until ``remove``."""
        self.adapter.boundaries = boundaries
        self._engine.watch(boundaries.watch)
        self.locator.add_not_covered(boundaries.lost)

    def compare_names(self) -> None:
        """For a step whose calls are executed again without the loop around them: what their code names is
        compared with what it was."""
        self._attributes.compares_names = True

    def own_code(self) -> list[str]:
        """Names of the program's functions that a step calls, each once."""
        return self._attributes.own_code()

    def take_parameters_again(self) -> None:
        self._engine.take_parameters_again()
        self._attributes.follow()

    def remove(self) -> None:
        """Removes the hooks of every level but ``grads``; gradients are still scanned."""
        self._engine.stop_observing()
        self._scanning.close()
        if self.adapter.boundaries is not None:
            self.adapter.boundaries.remove()
        _remove_all(self._watch_hooks, self._trace_hooks)

    def stop_following(self) -> None:
        """Stops all scans. The connection stays, to report at exit why this rank ends."""
        self._engine.close()
        self.remove()
        _remove_all(self._checkpoint_files)

    def close(self) -> None:
        """Collective."""
        self.stop_following()
        if self.connection is not None:
            self.connection.close()

    # --- a step --------------------------------------------------------------------------------------

    def abandoning(self) -> OnFailure:
        """If this block ends with an exception, abandons the step."""
        return OnFailure(self.abandon)

    def abandon(self) -> None:
        self._scanning.close()
        self._engine.abandon()

    @contextlib.contextmanager
    def concluding(self, reason: str) -> Iterator[None]:
        """If this rank raises in the block, writes its ledger before the error propagates: the other ranks
        will not reach the agreement, and the findings would be lost."""
        try:
            yield
        except (SkippedUpdate, NonFiniteGradientError):
            raise
        except Exception as error:
            if not self._engine.is_rerunning:  # the engine reports a re-run's errors
                self._engine.conclude_alone(f"{reason}: {first_line(error)}", is_failure_of_peers(error))
            raise

    @property
    def step_pass(self) -> Any:
        """The argument of ``begin_pass`` while the engine is in that pass; else None."""
        return self._step_pass() if self._engine.is_in_pass else None

    def begin_pass(self, step_pass: Pass, iteration: int | None = None) -> None:
        self._step_pass = weakref.ref(step_pass)  # the engine keeps it
        step_pass.begun = time.monotonic()
        self._engine.begin_pass(step_pass, iteration)
        if self.boundaries is not None:
            self._scanning.enter_context(self.boundaries.watching())

    def allow_going_on(self) -> None:
        """Lets the program use its gradients' norm before bad ones are judged (``may_go_on``)."""
        self._engine.allow_going_on()

    def may_go_on(self, losses: Sequence[_C.LossView]) -> bool:
        self._scanning.close()
        return self._engine.may_go_on(losses)

    def end_pass(self, losses: Sequence[_C.LossView]) -> _C.Decision:
        self._scanning.close()
        return self._act_on(self._engine.end_pass, losses)

    def agree(self) -> _C.Decision:
        return self._act_on(self._engine.agree)

    def finish_agreement(self, overflow: LossScale | None = None) -> _C.Decision:
        return self._act_on(self._engine.finish_agreement, overflow)

    def set_gradient_norm(self, norm: float) -> _C.Decision:
        return self._act_on(self._engine.set_gradient_norm, norm)

    def scan_and_agree(self) -> _C.Decision:
        return self._act_on(self._engine.scan_and_agree)

    def end_step(self) -> _C.Decision:
        return self._act_on(self._engine.end_step)

    def _act_on(self, decide: Callable[..., _C.Decision], *args: Any) -> _C.Decision:
        try:
            decision = decide(*args)
        except KeyboardInterrupt:
            if self._engine.is_judged:
                log(
                    f"interrupted while step {self._engine.updates + 1}, which has NaN or Inf, was "
                    f"explained; what is known so far: nanlocator report {self.run_dir}"
                )
            raise
        finally:
            if self._generators.were_restored:
                for state in (self._generators, self._attributes, self._hook_states, self._files):
                    state.leave()
        self._follow_trace()
        if decision == _C.Decision.SKIP:
            self.adapter.buffers.put_back_bad()
        if decision == _C.Decision.STOP:
            raise_for(self.adapter.verdicts[-1], self.run_dir)
        return decision

    def _follow_trace(self) -> None:
        """Gives the trace module names while it exists."""
        if self._engine.is_tracing == bool(self._trace_hooks):
            return
        if self._trace_hooks:
            _remove_all(self._trace_hooks)
        else:
            self._trace_hooks += self.adapter.trace_hooks()


def _remove_all(*lists: list[Any]) -> None:
    for hooks in lists:
        while hooks:
            hooks.pop().remove()


def state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Named:
    """The optimizer's tensors per element of ``parameter``, by key: "exp_avg", "momentum_buffer"."""
    state = optimizer.state.get(parameter, {})
    return [
        (name, local_part(value))
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


# The learning rate and the epsilon of each group of parameters in an optimizer's latest update.
_latest_numbers: "weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]" = (
    weakref.WeakKeyDictionary()
)


def note_numbers(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before an update: a scheduler may change them after it. A hook of ``register_step_pre_hook``."""
    _latest_numbers[optimizer] = [
        {"lr": group.get("lr"), "eps": group.get("eps")} for group in optimizer.param_groups
    ]


def state_numbers(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Named:
    """The learning rate and the epsilon with which the optimizer updated ``parameter`` last, in its dtype: an
    epsilon of 1e-8 is 0 in float16."""
    latest = _latest_numbers.get(optimizer, [])
    groups = [
        latest[i] if i < len(latest) else group
        for i, group in enumerate(optimizer.param_groups)
        if any(each is parameter for each in group["params"])
    ]
    return [
        (name, torch.as_tensor(float(group[name])).to(parameter.dtype))
        for group in groups
        for name in ("lr", "eps")
        if isinstance(group.get(name), (float, int, torch.Tensor))
    ]
