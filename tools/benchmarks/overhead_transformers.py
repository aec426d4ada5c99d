"""Time of a healthy GPT-2 training step under each DebugUnderflowOverflow relative to one without.

    tools/bench transformers [--hidden 256] [--sequence 128] [--batch 4] [--clock cpu] [--rounds 30] [--json]

All variants take turns in one process with one CPU thread, on the same model: no tool, nanlocator's class
(detection; and with frames of backward), transformers' class (detection). Attention is eager and gets no
padding mask, because transformers' class raises on the bool mask of sdpa. A step is zero_grad,
forward, backward and optimizer.step; the figures are medians over rounds of this round's variant over this
round's bare step, with a 95 % interval.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import turns
from overhead_pytorch import LAYERS, NO_TOOL, VOCABULARY, gpt2
from transformers.debug_utils import DebugUnderflowOverflow as TransformersDebugger

from nanlocator.transformers import DebugUnderflowOverflow


@contextlib.contextmanager
def transformers_debugger(model: torch.nn.Module) -> Iterator[None]:
    """Removes its hooks, which it cannot do itself."""
    before = {module: set(module._forward_hooks) for module in model.modules()}
    TransformersDebugger(model)
    try:
        yield
    finally:
        for module, hooks in before.items():
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = gpt2(arguments.hidden, arguments.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (arguments.batch, arguments.sequence))
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time

    def step() -> float:
        start = clock()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return clock() - start

    variants: dict[str, Callable[[], Any]] = {
        NO_TOOL: contextlib.nullcontext,
        "nanlocator": lambda: DebugUnderflowOverflow(model),
        "nanlocator, backward": lambda: DebugUnderflowOverflow(model, backward=True),
        "transformers": lambda: transformers_debugger(model),
    }

    def run(variant: str) -> float:
        with variants[variant]():
            step()  # fills caches
            return statistics.median(step() for _ in range(arguments.steps))

    times = turns.take_turns(variants, run, arguments.rounds)
    parameters = sum(p.numel() for p in model.parameters())
    heading = (
        f"GPT-2 hidden {arguments.hidden}, {LAYERS} layers, sequence {arguments.sequence}, batch "
        f"{arguments.batch}, fp32, {parameters / 1e6:.1f} M parameters, one CPU thread; {arguments.rounds} "
        f"rounds of {arguments.steps} steps, {arguments.clock} time"
    )
    turns.print_result(heading, [times], NO_TOOL, as_json=arguments.json, parameters=parameters, threads=1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="tools/bench transformers",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: CPU time, which other work on the machine disturbs less",
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of each variant in a round")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
