"""A scenario: one training run with or without nanlocator and faults, and each rank's report of it.

`run_rank` is the whole life of one rank after its process group exists. Except after SIGKILL, it always ends
by writing `rank{N}.json` into the scenario's directory, even after an exception:

    scenario, coordinates, error (null or {type, text, verdict, report: its text}), records (one per
    finished step), iteration (the last one begun), fingerprints, non_finite_parameters,
    parameters ({name: shape}), planted (what the faults did here), seconds ({set_up, train}); with
    nanlocator also verdicts, dismissed and run_dir, as the locator gives them

Rank 0 also appends each finished step to `progress.jsonl`. Floats are Python's: NaN and Infinity occur.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from faults import attach, make_fault
from gpt_training import StepRecord, Trainer, TrainingConfig
from preparations import prepare

PROCESS_GROUP_TIMEOUT = timedelta(seconds=60)


@dataclasses.dataclass
class Scenario:
    name: str
    ranks: int
    steps: int
    training: dict = dataclasses.field(default_factory=dict)  # fields of TrainingConfig
    nanlocator: dict | None = None  # keyword arguments of nanlocator.megatron.install; None: not installed
    faults: list[dict] = dataclasses.field(default_factory=list)  # {"name": ..., fields of the fault}
    undo_faults: bool = False  # restore weights and optimizer after each iteration with a fault
    # {"name": a function of preparations.py, its keyword arguments}: called on each rank before it builds
    preparations: list[dict] = dataclasses.field(default_factory=list)
    timeout: float = 120.0  # seconds, for all ranks together


def prepare_process() -> None:
    """Before torch.distributed starts: stack dumps on SIGUSR1, one thread, the loopback device."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)  # several ranks share few cores; sums do not depend on the machine
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def run_rank(scenario: Scenario, directory: pathlib.Path) -> dict:
    """Trains on this rank and writes its result. torch.distributed must be initialised. Does not raise."""
    result: dict = {"scenario": scenario.name, "rank": dist.get_rank(), "error": None}
    seconds = result["seconds"] = {}
    trainer = locator = None
    started = time.perf_counter()
    try:
        prepare(scenario.preparations)
        trainer = Trainer(TrainingConfig(**scenario.training))
        if scenario.nanlocator is not None:
            import nanlocator.megatron

            options = {"output_dir": str(directory / "nanlocator_run"), **scenario.nanlocator}
            trainer.run_directory = pathlib.Path(options["output_dir"])
            locator = nanlocator.megatron.install(trainer.model_chunks, trainer.optimizer, **options)
        # After nanlocator: a fault must be there before nanlocator scans.
        attach([make_fault(**fault) for fault in scenario.faults], trainer)
        seconds["set_up"] = time.perf_counter() - started
        started = time.perf_counter()
        undo = {fault["iteration"] for fault in scenario.faults} if scenario.undo_faults else ()
        trainer.train(scenario.steps, on_step=_progress_writer(directory), undo=undo)
        trainer.finish()
        seconds["train"] = time.perf_counter() - started
    except Exception as error:
        traceback.print_exc()
        kind = type(error)
        result["error"] = {
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "text": str(error),
            "verdict": getattr(error, "verdict", None),
        }
        if result["error"]["verdict"] is not None:
            from nanlocator import _C

            text = json.dumps(result["error"]["verdict"])
            result["error"]["report"] = _C.format_verdict(text, str(locator.run_dir) if locator else "")
    if trainer is not None:
        result |= {
            "coordinates": trainer.coordinates,
            "iteration": trainer.iteration,
            "records": [dataclasses.asdict(record) for record in trainer.records],
            "fingerprints": trainer.fingerprints(),
            "non_finite_parameters": trainer.non_finite_parameters(),
            "parameters": {name: list(p.shape) for name, p in trainer.parameters.items()},
            "planted": trainer.planted,
        }
    if locator is not None:
        result["verdicts"] = list(locator.verdicts)
        result["dismissed"] = locator.dismissed
        result["run_dir"] = str(locator.run_dir)
        locator.remove()
    write_json(directory / f"rank{dist.get_rank()}.json", result)
    return result


def write_json(path: pathlib.Path, content) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, default=str))
    partial.replace(path)


def _progress_writer(directory: pathlib.Path):
    if dist.get_rank() != 0:
        return None

    def write(record: StepRecord) -> None:
        with open(directory / "progress.jsonl", "a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")

    return write
