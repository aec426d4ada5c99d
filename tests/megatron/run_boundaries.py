"""Runs scenarios with `boundaries` alone, without a locator.

    export PYTHONPATH=$PYTHONPATH:examples/megatron_gpt OMP_NUM_THREADS=1
    python tests/megatron/run_boundaries.py scenarios.json --output DIR

Like run_scenarios.py, but a scenario's `nanlocator` is not read, its `faults` are the plants below, and each
rank{N}.json also has `crossings` and `coverage` (one list per iteration) and `is_restored`.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys

import gpt_training
import run_scenarios
import torch
import torch.distributed as dist
from gpt_training import Trainer, TrainingConfig
from megatron.core import parallel_state
from scenarios import Scenario, write_json
from torch._C._distributed_c10d import Backend, ProcessGroup, Work

# ---- plants: one NaN on one rank, in one microbatch of one iteration; or another way to send --------------


def nan_in_module_input(trainer: Trainer, fault: dict) -> None:
    """The input of a row-parallel layer, so that its matrix product puts a bad value into the all-reduce."""

    def before(_, arguments):
        if _is_now(trainer, fault):
            trainer.planted.append(fault)
            bad = arguments[0].clone()
            bad.view(-1)[5] = math.nan
            return (bad, *arguments[1:])

    _module(trainer, fault).register_forward_pre_hook(before)


def nan_in_gradient_of_output(trainer: Trainer, fault: dict) -> None:
    """The gradient that enters a column-parallel layer's backward, which all-reduces its result."""

    def poison(gradient):
        trainer.planted.append(fault)
        gradient = gradient.clone()
        gradient.view(-1)[5] = math.nan
        return gradient

    def after(_, __, output):
        if _is_now(trainer, fault):
            output[0].register_hook(poison)

    _module(trainer, fault).register_forward_hook(after)


def collectives_of_its_own(trainer: Trainer, fault: dict) -> None:
    """Every rank sums a NaN outside of training, asynchronously: in the given iteration it polls until the
    sum is complete, in the next one it never does."""

    def before(*_):
        if trainer.microbatch != fault["microbatch"] or trainer.iteration < fault["iteration"]:
            return
        group = parallel_state.get_tensor_model_parallel_group()
        work = dist.all_reduce(torch.tensor([math.nan]), group=group, async_op=True)
        if trainer.iteration == fault["iteration"]:
            while not work.is_completed():
                pass
            work.wait()
        trainer.planted.append({"is_work": isinstance(work, Work), "has_its_methods": work.is_success()})

    _module(trainer, fault).register_forward_pre_hook(before)


class _CorruptsOnArrival:
    """A receive whose memory is damaged between arrival and wait."""

    def __init__(self, work, corrupt) -> None:
        self._work, self._corrupt = work, corrupt

    def wait(self, *arguments):
        result = self._work.wait(*arguments)
        self._corrupt()
        return result


def corrupted_receive(trainer: Trainer, fault: dict) -> None:
    """`number`: index among the messages that this rank receives in the iteration."""
    inner = ProcessGroup.recv
    received = {"iteration": 0, "count": 0}

    def recv(group, tensors, source, tag):
        work = inner(group, tensors, source, tag)
        if received["iteration"] != trainer.iteration:
            received.update(iteration=trainer.iteration, count=0)
        received["count"] += 1
        if trainer.iteration != fault["iteration"] or received["count"] - 1 != fault["number"]:
            return work

        def corrupt():
            trainer.planted.append(fault)
            tensors[0].data.view(-1)[5] = math.nan

        return _CorruptsOnArrival(work, corrupt)

    ProcessGroup.recv = recv


class _Together:
    """A single Work for all messages of a batch, as in NCCL."""

    def __init__(self, works) -> None:
        self._works = works

    def wait(self, *arguments):
        return all([work.wait(*arguments) for work in self._works])


class _NotStarted:
    def wait(self, *_):
        raise RuntimeError("a message of a batch cannot be waited for by itself")


def coalesced_messages(_trainer: Trainer, _fault: dict) -> None:
    """Batched messages as in NCCL: none starts before _end_coalescing, which returns the only Work."""
    send, recv = ProcessGroup.send, ProcessGroup.recv
    batches: dict[int, list] = {}

    def start(group, device):
        batches[id(group)] = []

    def end(group, device):
        return _Together([message() for message in batches.pop(id(group))])

    def deferred(inner):
        def message(group, *arguments):
            if id(group) not in batches:
                return inner(group, *arguments)
            batches[id(group)].append(lambda: inner(group, *arguments))
            return _NotStarted()

        return message

    ProcessGroup.send, ProcessGroup.recv = deferred(send), deferred(recv)
    ProcessGroup._start_coalescing, ProcessGroup._end_coalescing = start, end
    Backend.supports_coalescing = property(lambda backend: True)


def _is_now(trainer: Trainer, fault: dict) -> bool:
    return (trainer.iteration, trainer.microbatch) == (fault["iteration"], fault["microbatch"])


def _module(trainer: Trainer, fault: dict) -> torch.nn.Module:
    return trainer.layer(fault["layer"]).get_submodule(fault["module"])


PLANTS = {
    plant.__name__: plant
    for plant in (
        nan_in_module_input,
        nan_in_gradient_of_output,
        collectives_of_its_own,
        corrupted_receive,
        coalesced_messages,
    )
}

# ---- one rank ------------------------------------------------------------------------------------------


class WatchedSchedule:
    """Replaces the schedule's function of each step."""

    def __init__(self, trainer: Trainer, schedule) -> None:
        from nanlocator.hooks.patches import Patches
        from nanlocator.megatron.boundaries import boundaries_of
        from nanlocator.megatron.microbatches import Microbatches

        self.crossings: list[list[dict]] = []
        self.coverage: list[list[dict]] = []
        self._trainer = trainer
        self._schedule = schedule
        self._patches = Patches("nanlocator.megatron.locator")
        self._boundaries = boundaries_of(trainer.model_chunks)
        self._microbatches = Microbatches(trainer.model_chunks, self._patches)
        self._microbatches.listeners.append(self._boundaries)

    def __call__(self, **arguments):
        self._boundaries.begin_step()
        self._microbatches.begin_pass()
        with self._boundaries.watching():
            result = self._schedule(**arguments)
        self._microbatches.end_pass()
        sightings, coverage = self._boundaries.collect(self._trainer.iteration)
        self.crossings.append([_fields_of_sighting(s) for s in sightings])
        self.coverage.append([_fields_of_coverage(c) for c in coverage])
        return result

    def remove(self) -> None:
        self._boundaries.remove()
        self._patches.remove()


def _fields_of_sighting(sighting) -> dict:
    from nanlocator import _C

    crossing = _C.crossing_of(sighting)
    names = ("iteration", "microbatch", "chunk", "phase", "module", "op", "role", "dtype", "shape")
    return {name: getattr(sighting, name) for name in names} | {
        "group": crossing.group,
        "members": crossing.members,
        "peer": crossing.peer,
        "sequence": crossing.sequence,
    }


def _fields_of_coverage(coverage) -> dict:
    return {name: getattr(coverage, name) for name in ("group", "members", "peer", "role", "count")}


def run_rank(scenario: Scenario, directory: pathlib.Path) -> dict:
    result = {"scenario": scenario.name, "rank": dist.get_rank(), "error": None}
    trainer = Trainer(TrainingConfig(**scenario.training))
    methods = _methods_of_process_group()
    watched = WatchedSchedule(trainer, gpt_training.get_forward_backward_func())
    gpt_training.get_forward_backward_func = lambda: watched
    for fault in scenario.faults:
        if fault["rank"] in (None, dist.get_rank()):  # None: every rank
            PLANTS[fault["plant"]](trainer, fault)
    trainer.train(scenario.steps)
    trainer.finish()
    watched.remove()
    result |= {
        "crossings": watched.crossings,
        "coverage": watched.coverage,
        "coordinates": trainer.coordinates,
        "records": [dataclasses.asdict(record) for record in trainer.records],
        "fingerprints": trainer.fingerprints(),
        "planted": trainer.planted,
        "is_restored": bool(scenario.faults) or _methods_of_process_group() == methods,
    }
    write_json(directory / f"rank{dist.get_rank()}.json", result)
    return result


def _methods_of_process_group() -> dict:
    """The class's own attributes: getattr would bind or unwrap them."""
    return dict(vars(ProcessGroup))


if __name__ == "__main__":
    run_scenarios.run_rank = run_rank
    sys.exit(run_scenarios.main())
