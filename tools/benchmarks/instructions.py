"""Instructions of a healthy step with and without nanlocator, per integration: overhead.py --instructions.

Callgrind counts them on a simulated processor (up to AVX2), so other load on the machine does not matter and
a difference of 0.1 % is significant. Each integration runs in its own process, once for each compared build;
Megatron-Core has a second rank, which runs outside callgrind.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import overhead_pytorch

INTEGRATIONS = ("pytorch", "watch", "transformers", "megatron")
WARM_STEPS, COUNTED_STEPS = 4, 2
VOCABULARY = overhead_pytorch.VOCABULARY
ROOT = Path(__file__).resolve().parents[2]
REQUESTS = ROOT / "build" / "release" / "lib" / "libcallgrind_requests.so"


def main(arguments: argparse.Namespace) -> None:
    if not shutil.which("valgrind") or not REQUESTS.exists():
        sys.exit("--instructions needs valgrind: apt-get install valgrind, then cmake --build build/release")
    builds = {"this build": os.environ["PYTHONPATH"]}
    if arguments.against:
        if not (Path(arguments.against) / "nanlocator" / "_C.so").exists():
            sys.exit(
                f"--against {arguments.against}: holds no nanlocator/_C.so; give the build's python folder"
            )
        builds["other build"] = arguments.against
    chosen = [arguments.integration] if arguments.integration else list(INTEGRATIONS)
    counts = {i: {build: count(i, path, arguments) for build, path in builds.items()} for i in chosen}
    if arguments.json:
        print(json.dumps(counts, indent=1))
        return
    heading = "millions of instructions a step"
    print(f"{heading:32} {'no tool':>9} {'nanlocator':>11} {'difference':>11} {'ratio':>8}")
    for integration, of_builds in counts.items():
        for build, (bare, located) in of_builds.items():
            name = f"{integration}, {build}"
            millions = f"{bare / 1e6:9.2f} {located / 1e6:11.2f} {(located - bare) / 1e6:11.2f}"
            print(f"{name:32} {millions} {located / bare:8.4f}")


def count(integration: str, python_path: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Instructions of a step without nanlocator and with the build in ``python_path``."""
    print(f"counting {integration} with {python_path} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory, socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            "PYTHONPATH": python_path,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        job = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "WORLD_SIZE": "2",
        }
        port.close()
        sizes = [
            f"--{name}={getattr(arguments, name)}" for name in ("hidden", "sequence", "batch", "precision")
        ]
        command = [sys.executable, __file__, "--integration", integration, "--directory", directory, *sizes]
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        callgrind.append(f"--callgrind-out-file={directory}/counts")
        ranks = [[*callgrind, *command]] + ([command] if integration == "megatron" else [])
        logs = [Path(directory) / f"rank{rank}.log" for rank in range(len(ranks))]
        running = [
            subprocess.Popen(
                rank_command,
                env={**environment, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                if len(ranks) > 1
                else environment,
                stdout=logs[rank].open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, rank_command in enumerate(ranks)
        ]
        codes = [process.wait() for process in running]
        for code, log in zip(codes, logs, strict=True):
            if code:
                sys.exit(f"{integration} failed:\n{log.read_text()[-4000:]}")
        bare, located = json.loads((Path(directory) / "result.json").read_text())
    return bare, located


# ---- in the process that is counted -----------------------------------------------------------------------


class Counter:
    """Counts on rank 0; does nothing on other ranks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._requests = ctypes.CDLL(str(REQUESTS)) if os.environ.get("RANK", "0") == "0" else None
        self._dumps = 0

    def start(self) -> None:
        gc.collect()
        gc.disable()  # its timing depends on all earlier allocations
        if self._requests:
            self._requests.start_counting()

    def stop(self) -> float:
        """Instructions of a step since `start`."""
        gc.enable()
        if not self._requests:
            return 0.0
        self._requests.stop_counting()
        self._dumps += 1
        dump = (self._directory / f"counts.{self._dumps}").read_text()
        return int(re.search(r"^totals: (\d+)", dump, re.MULTILINE)[1]) / COUNTED_STEPS

    def of(self, step: Callable[[], object]) -> float:
        for _ in range(WARM_STEPS):
            step()
        self.start()
        for _ in range(COUNTED_STEPS):
            step()
        return self.stop()


class _PlainLoop:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        self.model = overhead_pytorch.gpt2(arguments.hidden, arguments.sequence)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(0, VOCABULARY, (arguments.batch, arguments.sequence))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._tokens, labels=self._tokens).loss.backward()
        self.optimizer.step()


def pytorch(counter: Counter, arguments: argparse.Namespace) -> list[float]:
    import nanlocator

    loop = _PlainLoop(arguments)
    bare = counter.of(loop.step)
    loop.optimizer = nanlocator.LocatingOptimizer(loop.optimizer, loop.model, output_dir=arguments.directory)
    return [bare, counter.of(loop.step)]


def watch(counter: Counter, arguments: argparse.Namespace) -> list[float]:
    import nanlocator

    loop = _PlainLoop(arguments)
    bare = counter.of(loop.step)
    nanlocator.watch(loop.model, loop.optimizer, output_dir=arguments.directory)
    return [bare, counter.of(loop.step)]


def transformers(counter: Counter, arguments: argparse.Namespace) -> list[float]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nanlocator.transformers import NanLocatorCallback

    class CountSteps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == WARM_STEPS:
                counter.start()
            elif state.global_step == WARM_STEPS + COUNTED_STEPS:
                self.count = counter.stop()

    steps = WARM_STEPS + COUNTED_STEPS + 1
    rows = torch.randint(0, VOCABULARY, (steps * arguments.batch, arguments.sequence))
    data = [{"input_ids": row, "labels": row} for row in rows]
    counts = []
    for callbacks in ([], [NanLocatorCallback()]):
        counting = CountSteps()
        Trainer(
            overhead_pytorch.gpt2(arguments.hidden, arguments.sequence),
            TrainingArguments(
                arguments.directory,
                per_device_train_batch_size=arguments.batch,
                max_steps=steps,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
            ),
            train_dataset=data,
            callbacks=[counting, *callbacks],
        ).train()
        counts.append(counting.count)
    return counts


def megatron(counter: Counter, arguments: argparse.Namespace) -> list[float]:
    sys.path.insert(0, str(ROOT / "examples" / "megatron_gpt"))
    import overhead
    import torch.distributed as dist
    from gpt_training import Trainer, TrainingConfig
    from scenarios import prepare_process

    import nanlocator.megatron

    prepare_process()
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))  # the ranks differ in speed
    trainer = Trainer(
        TrainingConfig(
            tp=2, hidden=arguments.hidden, sequence=arguments.sequence, precision=arguments.precision
        )
    )
    bare = counter.of(lambda: overhead.megatron_step(trainer))
    dist.barrier()
    locator = nanlocator.megatron.install(
        trainer.model_chunks, trainer.optimizer, output_dir=Path(arguments.directory) / "run"
    )
    located = counter.of(lambda: overhead.megatron_step(trainer))
    locator.remove()
    dist.barrier()
    return [bare, located]


def work() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--integration", choices=INTEGRATIONS)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--precision")
    for size in ("hidden", "sequence", "batch"):
        parser.add_argument(f"--{size}", type=int)
    arguments = parser.parse_args()
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    runs = {"pytorch": pytorch, "watch": watch, "transformers": transformers, "megatron": megatron}
    counts = runs[arguments.integration](Counter(arguments.directory), arguments)
    if os.environ.get("RANK", "0") == "0":
        (arguments.directory / "result.json").write_text(json.dumps(counts))
    sys.stdout.flush()
    os._exit(0)  # the interpreter's end takes callgrind minutes


if __name__ == "__main__":
    work()
