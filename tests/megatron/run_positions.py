"""Runs scenarios with nanlocator, and counts crossings beside it with a plain wrapper of ProcessGroup.

    export PYTHONPATH=$PYTHONPATH:examples/megatron_gpt OMP_NUM_THREADS=1
    python tests/megatron/run_positions.py scenarios.json --output DIR

Like run_scenarios.py, but a scenario's `faults` are {"direction", "rank", "layer", "microbatch",
"iteration"}: 0/0 in each execution of that place. Each rank{N}.json also has `passes`, one per execution of
the schedule:

    places      [module or "backward of" module, microbatch, crossings counted here, nanlocator's position]
    bad_inputs  [operator, crossings before] of each all-reduce and send with a NaN in its input
    born        crossings counted where the fault computes
"""

from __future__ import annotations

import functools
import pathlib
import sys

import run_scenarios
import scenarios
import torch
import torch.distributed as dist
from gpt_training import Trainer
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from scenarios import Scenario
from torch._C._distributed_c10d import ProcessGroup

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_COLLECTIVES = ("allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base")
_COLLECTIVES_OF_NEWER_TORCH = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
_MESSAGES = ("send", "recv")


class Counter:
    """What this rank has issued in its tensor- and pipeline-parallel groups, by hand."""

    def __init__(self) -> None:
        self.count = 0
        self.passes: list[dict] = []
        for name in (*_COLLECTIVES, *_COLLECTIVES_OF_NEWER_TORCH, *_MESSAGES):
            if hasattr(ProcessGroup, name):
                setattr(ProcessGroup, name, self._counted(name, getattr(ProcessGroup, name)))
        for name in _SCHEDULES:
            setattr(schedules, name, self._pass(getattr(schedules, name)))

    def _counted(self, name, inner):
        @functools.wraps(inner)
        def method(group, *arguments, **keywords):
            if not self.passes or not self._is_counted(group, name):
                return inner(group, *arguments, **keywords)
            if name in ("allreduce", "send") and any(_is_bad(tensor) for tensor in arguments[0]):
                self.passes[-1]["bad_inputs"].append([name, self.count])
            work = inner(group, *arguments, **keywords)
            self.count += 1
            return work

        return method

    @staticmethod
    def _is_counted(group, name) -> bool:
        if group.size() < 2:  # the loss of a whole vocabulary is reduced over its one rank
            return False
        is_pipeline = group is parallel_state.get_pipeline_model_parallel_group()
        # With two stages Megatron-Core sends one direction through the group of all ranks.
        is_message = name in _MESSAGES and group is dist.group.WORLD
        return is_pipeline or is_message or group is parallel_state.get_tensor_model_parallel_group()

    def _pass(self, schedule):
        @functools.wraps(schedule)
        def forward_backward(**arguments):
            self.count = 0
            self.passes.append({"places": [], "bad_inputs": [], "born": []})
            return schedule(**arguments)

        return forward_backward

    def watch(self, trainer: Trainer) -> None:
        for chunk in trainer.model_chunks:
            for name, module in chunk.named_modules():
                module.register_forward_hook(functools.partial(self._after_forward, trainer, name))

    def _after_forward(self, trainer: Trainer, name: str, _, __, output) -> None:
        self._note(trainer, name)
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(lambda _: self._note(trainer, f"backward of {name}"))

    def _note(self, trainer: Trainer, place: str) -> None:
        from nanlocator import _C

        self.passes[-1]["places"].append([place, trainer.microbatch, self.count, _C.current_position()])


def _is_bad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.detach().isfinite().all())


def plant(trainer: Trainer, counter: Counter, fault: dict) -> None:
    """Before the second layer of the MLP computes, or in backward after it has."""

    def zero_over_zero(tensor):
        counter.passes[-1]["born"].append(counter.count)
        return tensor * 0 / torch.zeros_like(tensor)

    def before(_, arguments):
        if (trainer.iteration, trainer.microbatch) != (fault["iteration"], fault["microbatch"]):
            return arguments
        hidden = arguments[0]
        if fault["direction"] == "forward":
            return (zero_over_zero(hidden), *arguments[1:])
        hidden.register_hook(zero_over_zero)
        return arguments

    trainer.layer(fault["layer"]).get_submodule("mlp.linear_fc2").register_forward_pre_hook(before)


def run_rank(scenario: Scenario, directory: pathlib.Path) -> dict:
    counter = Counter()
    faults, scenario.faults = scenario.faults, []

    def attach(_, trainer: Trainer) -> None:
        counter.watch(trainer)
        for fault in faults:
            if fault["rank"] == dist.get_rank():
                plant(trainer, counter, fault)

    scenarios.attach = attach
    result = run_of_scenarios(scenario, directory) | {"passes": counter.passes}
    scenarios.write_json(directory / f"rank{dist.get_rank()}.json", result)
    return result


if __name__ == "__main__":
    run_of_scenarios = run_scenarios.run_rank
    run_scenarios.run_rank = run_rank
    sys.exit(run_scenarios.main())
