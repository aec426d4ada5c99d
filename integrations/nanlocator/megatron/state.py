"""State that a forward-backward of Megatron-Core changes besides gradients, and that its re-run restores.

Sources (Megatron-Core 0.16.1): tensor_parallel/random.py, transformer/moe/moe_utils.py,
transformer/multi_token_prediction.py, optimizer/grad_scaler.py, rerun_state_machine.py. The engine restores
torch's default generators and the model's buffers (expert bias, token counters).
"""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.megatron import versions
from nanlocator.state.rerun import ObjectState


class RngTracker:
    """``CudaRNGStatesTracker``: dropout inside and outside of tensor-parallel regions."""

    def save(self) -> None:
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        # A fork replaces tensors, and the graph-safe tracker changes generators in place.
        self._states = {
            name: state.clone_state() if isinstance(state, torch.Generator) else state
            for name, state in states.items()
        }

    def restore(self) -> None:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        current = tracker.get_states()
        for name, state in self._states.items():
            if isinstance(state, torch.Generator):
                current[name].set_state(state.get_state())
            else:
                current[name] = state
        tracker.set_states(current)  # adopts the dictionary, which has no other user


class LoggingTracker:
    """A dictionary to which layers add their losses: auxiliary losses of routers, multi-token prediction."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def save(self) -> None:
        self._saved = _copied(self._tracker())

    def restore(self) -> None:
        tracker = self._tracker()
        tracker.clear()
        tracker.update(_copied(self._saved))


def router_losses() -> LoggingTracker:
    return LoggingTracker(versions.router_losses)


def multi_token_losses() -> LoggingTracker:
    return LoggingTracker(lambda: MTPLossLoggingHelper.tracker)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # MetricEntry of Megatron-Core 0.18
        return dataclasses.replace(
            value, **{field.name: _copied(getattr(value, field.name)) for field in dataclasses.fields(value)}
        )
    return value  # process groups are kept by reference


# --- Megatron's own rerun state machine -------------------------------------------------------------------

_MACHINE_FIELDS = (
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
    "failed_validation_call",
    "initial_result",
    "suspicious_node",
    "suspicious_device",
)


class RerunMachine:
    """Megatron's rerun state machine; keeps it and our re-run from disturbing each other.

    If it is disabled, its ``validate_result`` raises on the one rank that saw the NaN, in the middle of the
    pass. If it is enabled, it notes the NaN and repeats the pass after forward-backward has returned, then
    may end the job.
    """

    def save(self) -> None:
        machine = get_rerun_state_machine()
        self._fields = {name: getattr(machine, name) for name in _MACHINE_FIELDS}
        self._large_value_counts = dict(machine.large_value_counts)
        self._max_values = dict(machine.max_values)

    def restore(self) -> None:
        pass  # muted in the re-run, it changes no state

    def forget(self) -> None:
        """Drops its notes of a pass whose result is not used, so that it does not ask for a re-run."""
        machine = get_rerun_state_machine()
        for name, value in self._fields.items():
            setattr(machine, name, value)
        machine.large_value_counts = copy.copy(self._large_value_counts)
        machine.max_values = copy.copy(self._max_values)

    @staticmethod
    def is_in_its_own_rerun() -> bool:
        return get_rerun_state_machine().state not in (RerunState.INITIAL_RUN, RerunState.NOT_RUNNING_YET)

    @staticmethod
    @contextmanager
    def errors_held_back() -> Iterator[list[RuntimeError]]:
        """Appends the machine's errors in this block to the yielded list instead of raising them, so that the
        pass continues and all ranks reach the agreement."""
        errors: list[RuntimeError] = []

        def validate_result(original: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
            except RuntimeError as error:
                errors.append(error)

        with Patches(__name__) as patches:
            patches.wrap(points.VALIDATE_RESULT, validate_result, of=get_rerun_state_machine())
            yield errors

    @staticmethod
    @contextmanager
    def muted() -> Iterator[None]:
        with Patches(__name__) as patches:
            patches.wrap(points.VALIDATE_RESULT, lambda *_, **__: None, of=get_rerun_state_machine())
            yield


def states_of(optimizers: "list[MegatronOptimizer]", machine: RerunMachine) -> dict[str, Any]:
    """By name; a verdict uses the name of a state that could not be restored."""
    scalers = [getattr(optimizer, "grad_scaler", None) for optimizer in optimizers]
    return {
        "Megatron's RNG tracker": RngTracker(),
        "the routers' auxiliary losses": router_losses(),
        "the losses of multi-token prediction": multi_token_losses(),
        "Megatron's rerun state machine": machine,
        **{
            f"the loss scale of optimizer {number}": ObjectState(scaler)
            for number, scaler in enumerate(scalers)
            if scaler is not None
        },
    }
