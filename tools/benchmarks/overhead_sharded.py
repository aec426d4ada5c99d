"""Time of a healthy sharded or pipelined step with nanlocator relative to one without; see overhead.py."""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns
from overhead_pytorch import LAYERS, VOCABULARY, gpt2

INTEGRATIONS = ("fsdp2", "zero2", "pipelining")
NO_TOOL, WITH_TOOL = "no tool", "nanlocator"
MICROBATCHES = 4
DEEPSPEED = Path(__file__).resolve().parents[2] / ".setup" / "deepspeed"


class Training:
    """``step`` trains once; ``watched`` is a context in which nanlocator scans."""

    def __init__(self, step: Callable[[], None], watched: Callable[[], Any], parameters: int) -> None:
        self.step, self.watched, self.parameters = step, watched, parameters


def fsdp2(arguments: argparse.Namespace) -> Training:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = gpt2(arguments.hidden, arguments.sequence)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = _tokens(arguments)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(step, lambda: _watched(model, optimizer, arguments), _elements(model))


def zero2(arguments: argparse.Namespace) -> Training:
    if not (DEEPSPEED / "deepspeed").is_dir():
        sys.exit(f"DeepSpeed is not in {DEEPSPEED}: tools/setup without arguments fetches it")
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    sys.path.append(str(DEEPSPEED))
    import deepspeed
    import torch

    import nanlocator.deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it compiles this
    model = gpt2(arguments.hidden, arguments.sequence)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": arguments.batch,
            "zero_optimization": {"stage": 2},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        },
    )
    tokens = _tokens(arguments)

    def step() -> None:
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()

    @contextlib.contextmanager
    def watched() -> Any:
        locator = nanlocator.deepspeed.install(engine, output_dir=Path(arguments.directory) / "run")
        try:
            yield
        finally:
            locator.remove()

    return Training(step, watched, _elements(model))


def pipelining(arguments: argparse.Namespace) -> Training:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = gpt2(arguments.hidden, arguments.sequence)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks = whole.transformer.h[rank * LAYERS // ranks : (rank + 1) * LAYERS // ranks]

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = whole.transformer.wte if rank == 0 else None
            self.blocks = blocks
            self.head = torch.nn.Linear(arguments.hidden, VOCABULARY) if rank == ranks - 1 else None

        def forward(self, hidden: Any) -> Any:
            if self.embedding is not None:
                hidden = self.embedding(hidden)
            for block in self.blocks:
                output = block(hidden)
                hidden = output[0] if isinstance(output, tuple) else output
            return self.head(hidden) if self.head is not None else hidden

    def loss_of(logits: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    model = Stage()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = Schedule1F1B(
        PipelineStage(model, rank, ranks, torch.device("cpu")), MICROBATCHES, loss_fn=loss_of
    )
    tokens = _tokens(arguments)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([tokens] if rank == 0 else []), **({"target": tokens} if rank == ranks - 1 else {}))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(step, lambda: _watched(model, optimizer, arguments), _elements(model))


def _tokens(arguments: argparse.Namespace) -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (arguments.batch, arguments.sequence))


def _elements(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def _watched(model: Any, optimizer: Any, arguments: argparse.Namespace) -> Any:
    import nanlocator

    watch = nanlocator.watch(model, optimizer, output_dir=Path(arguments.directory) / "run")
    try:
        yield
    finally:
        watch.remove()


def work(arguments: argparse.Namespace) -> None:
    """One rank, started by torchrun."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = {"fsdp2": fsdp2, "zero2": zero2, "pipelining": pipelining}[arguments.integration](arguments)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time

    def step() -> float:
        dist.barrier()
        start = clock()
        training.step()
        dist.barrier()
        return clock() - start

    def run(variant: str) -> float:
        with training.watched() if variant == WITH_TOOL else contextlib.nullcontext():
            step()  # makes plans, fills caches
            return statistics.median(step() for _ in range(arguments.steps))

    times = turns.take_turns((NO_TOOL, WITH_TOOL), run, arguments.rounds)
    if dist.get_rank() == 0:
        heading = (
            f"{arguments.integration}: GPT-2 hidden {arguments.hidden}, {LAYERS} layers, sequence "
            f"{arguments.sequence}, batch {arguments.batch} a rank, fp32, "
            f"{training.parameters / 1e6:.1f} M parameters, {dist.get_world_size()} gloo ranks"
        )
        result = {"heading": heading, "parameters": training.parameters, "seconds": times}
        (Path(arguments.directory) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
