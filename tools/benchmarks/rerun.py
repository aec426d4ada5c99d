"""Cost of the re-run of a bad step: its time and its peak memory, relative to a step's.

    tools/bench rerun [--layers 8 --width 256 --rows 1024 --vocabulary 8192] [--rounds 5] [--json]

Each fault is planted in a step of a plain PyTorch model on the CPU, one thread:

    first layer   NaN from the first layer on: every tensor after it is bad, forward and backward
    in place      born in an in-place write to the largest tensor of the step, the logits

The re-run is everything after the first pass of a bad step: the traced pass, the pass that keeps module
calls, and their evaluation (explanation, replays, bundles, verdict). Time: CPU time, median over the rounds.
Memory: the peak of Torch's allocator, parameters and gradients included, and the resident size of the
process; "kept" is the size of copies and weights in the bundle.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanlocator import LocatingOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from allocated import LIBRARY, Allocated

FAULTS = ("first layer", "in place")
PARTS = ("traced pass", "module calls", "the rest")


class Layers(nn.Module):
    """An embedding, residual layers, logits and their cross-entropy, as Megatron-Core computes: in place."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        width = arguments.width
        self.embedding = nn.Embedding(arguments.vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(arguments.layers)
        )
        self.head = nn.Linear(width, arguments.vocabulary, bias=False)
        self.log_of = ""  # where a logarithm is taken: of positive numbers,
        self.is_bad = False  # or of negative ones

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == 0 and self.log_of == "first layer":
                x = torch.log(x.abs() + (-1000 if self.is_bad else 1))
        logits = self.head(x)
        logits = logits.sub_(logits.detach().amax(-1, keepdim=True))
        if self.log_of == "in place":
            logits = logits.sub_(1 if self.is_bad else -1000).log_()
        return (logits.exp().sum(-1).log() - logits.gather(-1, labels[:, None])[:, 0]).mean()


class Resident:
    """The peak of the process's resident memory (proc(5): clear_refs, VmHWM)."""

    def restart_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])


def measure(arguments: argparse.Namespace, fault: str, allocated: Allocated) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Layers(arguments)
    model.log_of = fault
    tokens, labels = torch.randint(0, arguments.vocabulary, (2, arguments.rows))
    resident = Resident()
    rounds: list[dict[str, Any]] = []
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    ends: list[float] = []  # of the passes
    peaks: list[int] = []

    def note_peak() -> None:
        peaks.append(allocated.peak())
        allocated.restart_peak()

    def step(optimizer: LocatingOptimizer, is_bad: bool) -> dict[str, Any]:
        def closure() -> torch.Tensor:
            note_peak()
            optimizer.zero_grad()
            loss = model(tokens, labels)
            loss.backward()
            ends.append(time.process_time())
            note_peak()
            return loss

        model.is_bad = is_bad
        ends.clear()
        peaks.clear()
        resident.restart_peak()
        allocated.restart_peak()
        start = time.process_time()
        optimizer.step(closure)
        end = time.process_time()
        return {
            "seconds": end - start,
            "passes": [b - a for a, b in zip([start, *ends], [*ends, end], strict=True)],
            "peaks": [*peaks, allocated.peak()],  # alternately before and in a pass; after the last
            "resident": resident.peak(),
        }

    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            optimizer = LocatingOptimizer(inner, model, output_dir=folder, on_bad="skip")
            step(optimizer, False)  # makes plans, fills caches
            healthy = [step(optimizer, False) for _ in range(3)]
            rounds.append({"healthy": healthy, "bad": step(optimizer, True)})
            (verdict,) = optimizer.verdicts
            optimizer.remove()
            kept = sum(file.stat().st_size for file in Path(folder).rglob("tensors.safetensors"))
    (origin,) = verdict["origins"]
    healthy_seconds = [statistics.median(each["seconds"] for each in r["healthy"]) for r in rounds]
    ratios = [(r["bad"]["seconds"] - h) / h for r, h in zip(rounds, healthy_seconds, strict=True)]
    parts = {
        part: statistics.median(
            pick(r["bad"]["passes"]) / h for r, h in zip(rounds, healthy_seconds, strict=True)
        )
        for part, pick in zip(PARTS, (lambda p: p[1], lambda p: sum(p[2:-1]), lambda p: p[-1]), strict=True)
    }

    def peak_over_step(of: Callable[[dict[str, Any]], int]) -> float:
        return max(of(r["bad"]) for r in rounds) / max(of(each) for r in rounds for each in r["healthy"])

    return {
        "fault": fault,
        "operator": origin["operator"],
        "module": origin["module"],
        "notes": verdict["notes"],
        "step_seconds": statistics.median(healthy_seconds),
        "time_over_step": statistics.median(ratios),
        "parts": parts,
        "step_peak": max(max(each["peaks"]) for r in rounds for each in r["healthy"]),
        "peak_over_step": peak_over_step(lambda s: max(s["peaks"])),
        "peaks": rounds[-1]["bad"]["peaks"],
        "kept": kept,
        "resident_over_step": peak_over_step(lambda s: s["resident"]),
    }


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'fault':12} {'step':>9} {'re-run':>8}", *(f"{part:>13}" for part in PARTS), end="")
    print(f" {'step peak':>11} {'re-run':>8} {'kept':>8} {'resident':>9}  named")
    for r in results:
        print(f"{r['fault']:12} {r['step_seconds'] * 1e3:6.0f} ms {r['time_over_step']:6.2f} x", end="")
        print("".join(f" {r['parts'][part]:11.2f} x" for part in PARTS), end="")
        print(f" {r['step_peak'] / 2**20:7.0f} MiB {r['peak_over_step']:6.3f} x", end="")
        print(f" {r['kept'] / 2**20:4.0f} MiB", end="")
        print(f" {r['resident_over_step']:7.3f} x  {r['operator']} in {r['module'] or 'no module'}")
        for note in r["notes"]:
            print(f"    note: {note}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/bench rerun"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--rounds", type=int, default=5, help="bad steps, each with three healthy ones before it"
    )
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not LIBRARY.exists():
        parser.error(f"{LIBRARY.name} is not built: run tools/setup")
    allocated = Allocated()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = [measure(arguments, fault, allocated) for fault in arguments.fault or FAULTS]
    if arguments.json:
        print(json.dumps({"options": vars(arguments), "results": results}, indent=1))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
