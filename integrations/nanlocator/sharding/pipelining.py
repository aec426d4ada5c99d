"""Pipelines of ``torch.distributed.pipelining``: a schedule's step is a pass over this rank's stages.

A schedule itself calls its stages' modules and autograd for each microbatch, and exchanges their results
between ranks (torch/distributed/pipelining/schedules.py and stage.py; the same names from torch 2.6 to 2.15).
So a re-run executes the whole step again, on all ranks of the pipeline.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanlocator import _C
from nanlocator.exchange.boundaries import Boundaries
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

_SCHEDULES = "torch.distributed.pipelining.schedules"
_OF_SCHEDULE = ("_has_backward", "_internal_losses", "_maybe_compute_loss", "_n_microbatches")
_OF_STAGE = (
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "bwd_cache",
    "forward_one_chunk",
)


def follow_steps(patches: Patches, wrapper: Callable[..., Any]) -> None:
    """Calls ``wrapper(original, schedule, ...)`` in place of every schedule's ``step``, if the program has
    imported schedules (importing them takes seconds)."""
    if _SCHEDULES in sys.modules:
        for point in points.SCHEDULE_STEPS:
            patches.wrap(point, wrapper)


def group_of(modules: Iterable[nn.Module]) -> "dist.ProcessGroup | None":
    """The process group of the pipeline, if one of these modules belongs to an existing stage."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage is None or not dist.is_initialized():
        return None
    ours = {id(module) for module in modules}
    for each in gc.get_objects():
        if issubclass(type(each), stage._PipelineStageBase) and id(getattr(each, "submod", None)) in ours:
            return each.group or dist.group.WORLD
    return None


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def is_known(schedule: Any) -> bool:
    """Whether ``schedule`` has all attributes that are followed here. Most are private; a release of torch
    may rename them."""
    return all(hasattr(schedule, name) for name in _OF_SCHEDULE) and all(
        hasattr(stage, name) for stage in stages_of(schedule) for name in _OF_STAGE
    )


class Pipeline:
    """This rank's part of the pipeline that ``schedule`` drives.

    Attributes:
        modules: the modules of its stages; a microbatch's place is its number and its stage's index here.
        group: the process group of the pipeline's ranks.
        boundaries: watch its messages.
        losses: of the last pass's microbatches, if this rank has the last stage.
    """

    def __init__(self, schedule: Any, boundaries: Boundaries | None = None) -> None:
        """``boundaries``: existing ones, which also watch other groups and outlive this object."""
        self.schedule = schedule
        stages = stages_of(schedule)
        self.modules: list[nn.Module] = [stage.submod for stage in stages]
        self.group: dist.ProcessGroup = stages[0].group or dist.distributed_c10d._get_default_group()
        self.boundaries = boundaries or Boundaries([])
        self.boundaries.add_group("pp", self.group)
        self._owns_boundaries = boundaries is None
        self.losses: list[torch.Tensor] = []
        self._is_watching = False
        self._is_in_pass = False
        self._before_first: Callable[[], None] | None = None
        self._patches = Patches(__name__)
        for chunk, stage in enumerate(stages):
            self._follow(stage, chunk)
        self._patches.wrap(points.SCHEDULE_LOSS, self._compute_loss, of=schedule)

    def remove(self) -> None:
        self._patches.remove()
        if self._owns_boundaries:
            self.boundaries.remove()

    @property
    def number_of_microbatches(self) -> int:
        return self.schedule._n_microbatches

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Scans the crossings of the passes inside the block."""
        self._is_watching = True
        try:
            with self.boundaries.watching():
                yield
        finally:
            self._is_watching = False

    def run(
        self,
        step: Callable[..., Any],
        args: Any,
        kwargs: Any,
        before_first: Callable[[], None] | None = None,
    ) -> Any:
        """Runs a pass; ``step`` is the schedule's own. ``before_first`` is called before the pass's first
        forward; in a schedule's first step, forwards that infer shapes precede it."""
        self.losses.clear()
        self._before_first = before_first
        self._is_in_pass = True
        try:
            with self.boundaries.counting():
                return step(self.schedule, *args, **kwargs)
        finally:
            self._is_in_pass = False
            self._before_first = None
            _C.set_current_microbatch(None, None)

    def _follow(self, stage: Any, chunk: int) -> None:
        listener = self.boundaries

        def forward(original: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_pass:
                return original(microbatch, *args, **kwargs)
            if self._before_first is not None:
                self._before_first()
                self._before_first = None
            if self._is_watching and stage.is_first:
                listener.begin_forward(microbatch, chunk, [])
            with _at(microbatch, chunk):
                output = original(microbatch, *args, **kwargs)
            if self._is_watching:
                listener.end_forward(microbatch, chunk, _C.tensors_in(output))
            return output

        def backward(original: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_pass:
                return original(microbatch, *args, **kwargs)
            if self._is_watching and stage.is_last:
                listener.begin_backward(microbatch, chunk, [])
            with _at(microbatch, chunk):
                result = original(microbatch, *args, **kwargs)
            if self._is_watching:
                listener.end_backward(microbatch, chunk, _C.tensors_in(stage.bwd_cache.get(microbatch, ())))
            return result

        def backward_of_weights(
            original: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._is_in_pass:
                return original(microbatch, *args, **kwargs)
            with _at(microbatch, chunk):
                return original(microbatch, *args, **kwargs)

        def begins(begin: Callable[..., None]) -> Callable[..., Any]:
            """A forward or backward first retrieves its received tensors (from torch 2.15 on, this works only
            once)."""

            def retrieve(original: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any) -> Any:
                received = original(microbatch, *args, **kwargs)
                if self._is_in_pass and self._is_watching:
                    begin(microbatch, chunk, _C.tensors_in(received))
                return received

            return retrieve

        for name, wrapper in (
            ("_retrieve_recv_activations", begins(listener.begin_forward)),
            ("_retrieve_recv_grads", begins(listener.begin_backward)),
            ("forward_one_chunk", forward),
            ("backward_one_chunk", backward),
            ("backward_weight_one_chunk", backward_of_weights),
        ):
            self._patches.wrap(points.STAGE[name], wrapper, of=stage)

    def _compute_loss(
        self,
        original: Callable[..., Any],
        stage: Any,
        output: Any,
        targets: Any,
        microbatch: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._is_in_pass:
            return original(stage, output, targets, microbatch, *args, **kwargs)
        computed = len(self.schedule._internal_losses)
        with _at(microbatch, self.modules.index(stage.submod)):
            result = original(stage, output, targets, microbatch, *args, **kwargs)
        self.losses += [loss.detach() for loss in self.schedule._internal_losses[computed:]]
        return result


@contextlib.contextmanager
def _at(microbatch: int, chunk: int) -> Iterator[None]:
    _C.set_current_microbatch(microbatch, chunk)
    try:
        yield
    finally:
        _C.set_current_microbatch(None, None)
