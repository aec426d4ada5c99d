"""What `nanlocator.watch` adds to a step where the host is the limit: processor time of tiny models of four
sizes, with and without it, in alternating blocks of one process; see overhead.py."""

import argparse
import contextlib
import json
import statistics
import time
from typing import Any

import overhead_pytorch
import turns

LAYERS = (1, 4, 16, 64)  # each a Linear(16, 16) and a Tanh
NO_TOOL, WATCHED = "no tool", "watch"


def main(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    rows = [measure(layers, arguments.rounds, arguments.steps) for layers in LAYERS]
    constant, per_parameter = fitted(
        [row["parameters"] for row in rows], [row["watch"] - row["bare"] for row in rows]
    )
    if arguments.json:
        print(
            json.dumps(
                {"rows": rows, "ms": constant * 1e3, "us_per_parameter": per_parameter * 1e6}, indent=1
            )
        )
        return
    print(
        f"SGD, one CPU thread; median of {arguments.rounds} blocks of {arguments.steps} steps, processor time"
    )
    print(f"{'parameters':>10} {'no tool':>11} {'watch':>11} {'difference':>11} {'ratio':>7}")
    for row in rows:
        bare, watched = row["bare"] * 1e3, row["watch"] * 1e3
        print(
            f"{row['parameters']:>10} {bare:>8.3f} ms {watched:>8.3f} ms {watched - bare:>8.3f} ms "
            f"{watched / bare:>7.2f}"
        )
    print(f"about {constant * 1e3:.2f} ms and {per_parameter * 1e6:.1f} us per parameter")


def measure(layers: int, rounds: int, steps: int) -> dict[str, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(16, 16), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = torch.randn(4, 16)

    def block() -> float:
        begin = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        return (time.process_time() - begin) / steps

    def run(variant: str) -> float:
        watching: Any = contextlib.nullcontext()
        if variant == WATCHED:
            watching = overhead_pytorch.watched(optimizer, model)
        with watching:
            block()  # makes plans, fills caches
            return block()

    times = turns.take_turns((NO_TOOL, WATCHED), run, rounds)
    return {
        "parameters": sum(1 for _ in model.parameters()),
        "bare": statistics.median(times[NO_TOOL]),
        "watch": statistics.median(times[WATCHED]),
    }


def fitted(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Seconds in all and seconds per parameter, by least squares of the relative error."""
    weights = [1 / each**2 for each in seconds]
    total = sum(weights)
    x = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    y = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    slope = sum(w * (s - x) * (t - y) for w, s, t in zip(weights, sizes, seconds, strict=True)) / sum(
        w * (s - x) ** 2 for w, s in zip(weights, sizes, strict=True)
    )
    return y - slope * x, slope
