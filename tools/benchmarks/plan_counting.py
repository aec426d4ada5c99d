"""The work of nanlocator in one healthy step of one rank: counted on the meta device, or measured.

    python plan_counting.py NAME RANK             counted: one process simulates that rank
    torchrun ... plan_counting.py NAME --measured the small configurations, on real ranks over gloo

Both build Megatron-Core's own model, gradient buckets, distributed optimizer and schedule, install nanlocator
and take two steps. On the meta device tensors have shapes and no memory, collectives return at once, and a
stand-in for the engine counts the calls of nanlocator's hooks. With --measured, the engine counts its own
work (nanlocator/tensor/scan_work.hpp). Prints JSON.
"""

import argparse
import collections
import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plan_configurations
from megatron_training import Training  # first: it redirects CUDA
from plan_configurations import Configuration

# isort: split
import cpu_platform
import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as megatron_optimizer
from torch._C._distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import nanlocator.megatron
from nanlocator import _C
from nanlocator.exchange import boundaries
from nanlocator.exchange.collectives import COLLECTIVES
from nanlocator.megatron import locator, microbatches

PACKAGE = os.path.dirname(nanlocator.__file__)


# ---- the meta device -------------------------------------------------------------------------------------


class DoneWork:
    """The Work of a collective that moves nothing."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def stay_on_meta() -> None:
    """Reduces everything that Megatron-Core allocates, and every collective that it starts, to shapes."""
    meta = torch.device("meta")
    torch.set_default_device(meta)
    torch.cuda.current_device = lambda: meta
    # torch.full: the numbers of tokens per expert, whose values are needed.
    for name in set(cpu_platform._FACTORIES) - {"full"}:
        factory = getattr(torch, name)

        def allocate(*args: Any, factory: Any = factory, **kwargs: Any) -> torch.Tensor:
            return factory(*args, **{**kwargs, "device": meta})

        setattr(torch, name, allocate)

    names = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    original_type = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *args: original_type(tensor, *args) if args else names[tensor.dtype]

    set_item = torch.Tensor.__setitem__

    def set_item_of_shape(tensor: torch.Tensor, index: Any, value: Any) -> None:
        if not (torch.is_tensor(index) and index.dtype == torch.bool):  # their number is unknown
            set_item(tensor, index, value)

    torch.Tensor.__setitem__ = set_item_of_shape
    for name in [*COLLECTIVES, "send", "recv", "barrier"]:
        setattr(ProcessGroup, name, lambda group, *args, **kwargs: DoneWork())
    for name in ("_start_coalescing", "_end_coalescing"):
        setattr(ProcessGroup, name, lambda group, *args, **kwargs: DoneWork())
    ProcessGroup._get_backend = lambda group, device: SimpleNamespace(supports_coalescing=False)
    dist.all_gather_object = lambda objects, mine, group=None: objects.__setitem__(
        slice(None), [mine] * len(objects)
    )
    # These read values: the norm and the update. nanlocator's hooks are around both.
    megatron_optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: 1.0
    megatron_optimizer.clip_grad_by_total_norm_fp32 = lambda *args, **kwargs: None
    torch.optim.AdamW.step = lambda *args, **kwargs: None


# ---- counting instead of the engine ------------------------------------------------------------------------


class Counts:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.by_place: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.engine_calls = self.python_calls = self.plans = self.waits = 0
        self.is_counting_calls = False

    def scan(self, place: str, tensors: list[torch.Tensor]) -> None:
        """One launch."""
        self.by_place[place].update(
            launches=1, tensors=len(tensors), bytes=sum(tensor.nbytes for tensor in tensors)
        )

    def scan_each(self, place: str, value: Any) -> None:
        """One launch for each tensor that can hold a NaN (deferred_scans.cpp, scan_afresh)."""
        for tensor in _tensors_in(value):
            if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
                self.scan(place, [tensor])


COUNTS = Counts()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


class CountingWatch:
    """Replaces _C.BoundaryWatch (boundary_watch.cpp) and counts what it would scan."""

    def __init__(self, threads: int) -> None:
        self._groups: list[str] = []
        self._crossings: list[str] = []

    def add_group(self, name: str, members: list[int]) -> int:
        self._groups.append(name)
        return len(self._groups) - 1

    def begin_collective(self, group: int, op: str, sent: Any) -> int:
        COUNTS.engine_calls += 1
        name = f"{self._groups[group]} {op.removeprefix('c10d::').strip('_')}"
        COUNTS.scan_each(f"{name} sent", sent)
        self._crossings.append(name)
        return len(self._crossings) - 1

    def begin_send(self, group: int, peer: int, sent: Any) -> int:
        COUNTS.engine_calls += 1
        COUNTS.scan_each(f"{self._groups[group]} send", sent)
        self._crossings.append(f"{self._groups[group]} send")
        return len(self._crossings) - 1

    def begin_receive(self, group: int, peer: int) -> int:
        COUNTS.engine_calls += 1
        self._crossings.append(f"{self._groups[group]} recv")
        return len(self._crossings) - 1

    def finish(self, crossing: int, received: Any) -> None:
        COUNTS.engine_calls += 1
        COUNTS.scan_each(f"{self._crossings[crossing]} received", received)

    def __getattr__(self, name: str) -> Any:
        """enter, leave, and calls of the schedule: nothing is scanned."""

        def call(*args: Any) -> None:
            COUNTS.engine_calls += 1

        return call


class CountingDriver:
    """Replaces nanlocator.engine.driver.Driver and counts the calls of a healthy step into the engine."""

    is_closed = is_rerunning = is_judged = skips_update = False
    is_agreeing = True
    run_dir = ""

    def __init__(self, *args: Any) -> None:
        self._plans: dict[tuple[str, int], tuple] = {}
        self.locator = SimpleNamespace(
            now_in=_engine_call, gradient_is_ready=_engine_call, add_not_covered=lambda notes: None
        )
        self._scanning = contextlib.ExitStack()

    def follow_boundaries(self, boundaries: Any) -> None:
        self._boundaries = boundaries

    def begin_pass(self, *args: Any) -> None:
        COUNTS.engine_calls += 1
        self._scanning.enter_context(self._boundaries.watching())

    def scan(
        self,
        phase: str,
        number: int,
        role: str,
        ids: list[int],
        tensors: list[torch.Tensor],
        offsets: list[int] | None = None,
    ) -> None:
        COUNTS.engine_calls += 1
        self._scan(phase, number, tensors)

    def _scan(self, phase: str, number: int, tensors: list[torch.Tensor]) -> None:
        COUNTS.scan(phase, tensors)

    def end_pass(self, losses: list[Any]) -> Any:
        """StepDriver::end_pass: the losses, the flag's launch, and the wait for it."""
        self._scanning.close()
        COUNTS.engine_calls += 1
        COUNTS.waits += 1
        if losses:  # at new addresses
            COUNTS.plans += 1
            self._scan("loss", 0, [loss.tensor for loss in losses])
        return _C.Decision.PROCEED

    def finish_agreement(self, overflow: Any) -> Any:
        COUNTS.engine_calls += 1
        COUNTS.waits += 1
        return _C.Decision.PROCEED

    @contextlib.contextmanager
    def abandoning(self) -> Any:
        yield

    @contextlib.contextmanager
    def concluding(self, reason: str) -> Any:
        yield

    def __getattr__(self, name: str) -> Any:
        return _engine_call


def _engine_call(*args: Any) -> None:
    COUNTS.engine_calls += 1


def count_instead_of_scanning() -> None:
    locator.Driver = CountingDriver
    locator.RankConnection = lambda _: None
    boundaries._C = SimpleNamespace(BoundaryWatch=CountingWatch, ModulePath=_C.ModulePath)
    microbatches._C = SimpleNamespace(
        LossView=lambda tensor, *place: SimpleNamespace(tensor=tensor), set_current_microbatch=_engine_call
    )


@contextlib.contextmanager
def counting_python_calls() -> Any:
    """Counts calls in nanlocator's package on this thread, which also runs the backward of meta tensors."""

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            COUNTS.python_calls += 1

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


# ---- one rank --------------------------------------------------------------------------------------------


def count(c: Configuration, rank: int) -> dict[str, Any]:
    """Counts the second step: in the first, Megatron does not know the order of buckets yet."""
    dist.init_process_group("fake", rank=rank, world_size=c.ranks, store=FakeStore())
    stay_on_meta()
    count_instead_of_scanning()
    training = Training(c)
    nanlocator.megatron.install(training.chunks, training.optimizer)
    training.step()
    COUNTS.reset()
    with counting_python_calls():
        training.step()
    total: collections.Counter = collections.Counter()
    for counter in COUNTS.by_place.values():
        total.update(counter)
    return {
        "configuration": c.name,
        "rank": rank,
        "parameters": sum(p.numel() for chunk in training.chunks for p in chunk.parameters()),
        "gradients": sum(1 for chunk in training.chunks for _ in chunk.parameters()),
        **total,
        "plans": COUNTS.plans,
        "waits": COUNTS.waits,
        "engine_calls": COUNTS.engine_calls,
        "python_calls": COUNTS.python_calls,
        "by_place": COUNTS.by_place,
    }


def measure(c: Configuration, folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training = Training(c)
    installed = nanlocator.megatron.install(training.chunks, training.optimizer, output_dir=folder / "run")
    training.step()
    before = _C.scan_work()
    training.step()
    after = _C.scan_work()
    installed.remove()
    return {"rank": dist.get_rank(), **{name: after[name] - before[name] for name in after}}


def configuration_of(name: str) -> Configuration:
    small = (
        plan_configurations.SMALL,
        plan_configurations.SMALL_PIPELINE,
        plan_configurations.SMALL_EXPERTS,
    )
    return next(c for c in (*plan_configurations.CONFIGURATIONS, *small) if c.name == name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("rank", type=int, nargs="?", default=0)
    parser.add_argument(
        "--measured", type=Path, metavar="FOLDER", help="where each rank writes its measurements"
    )
    arguments = parser.parse_args()
    c = configuration_of(arguments.name)
    if arguments.measured:
        result = measure(c, arguments.measured)
        (arguments.measured / f"{result['rank']}.json").write_text(json.dumps(result))
        dist.destroy_process_group()
    else:
        print(json.dumps(count(c, arguments.rank)))
        sys.stdout.flush()
        os._exit(0)  # groups without a network cannot be destroyed


if __name__ == "__main__":
    main()
