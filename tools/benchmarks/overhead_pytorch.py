"""Time of a healthy step of a plain PyTorch GPT with each tool relative to one without; see overhead.py."""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import turns

NO_TOOL = "no tool"
VOCABULARY = 1024  # an embedding of 50257 rows would dominate such a small step and hide the tools
LAYERS = 4


def gpt2(hidden: int, sequence: int) -> Any:
    import transformers

    config = transformers.GPT2Config(
        n_embd=hidden,
        n_layer=LAYERS,
        n_head=4,
        n_positions=sequence,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",  # DebugUnderflowOverflow raises on the boolean mask that sdpa gets
    )
    return transformers.GPT2LMHeadModel(config).train()


@contextlib.contextmanager
def located(inner: Any, model: Any, level: str) -> Iterator[Any]:
    """The optimizer inside a LocatingOptimizer, whose files are removed with the block."""
    import nanlocator

    with tempfile.TemporaryDirectory() as directory:
        optimizer = nanlocator.LocatingOptimizer(inner, model, level=level, output_dir=directory)
        try:
            yield optimizer
        finally:
            optimizer.remove()


@contextlib.contextmanager
def watched(inner: Any, model: Any) -> Iterator[Any]:
    """The optimizer itself, under nanlocator.watch."""
    import nanlocator

    with tempfile.TemporaryDirectory() as directory:
        watch = nanlocator.watch(model, inner, output_dir=directory)
        try:
            yield inner
        finally:
            watch.remove()


def work(arguments: argparse.Namespace) -> None:
    """One start of the process."""
    import torch
    from transformers.debug_utils import DebugUnderflowOverflow

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = gpt2(arguments.hidden, arguments.sequence)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (arguments.batch, arguments.sequence))

    def step(optimizer: torch.optim.Optimizer) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        if arguments.loss_outside:
            logits = model(tokens).logits
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            ).backward()
        else:
            model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def debugged() -> Iterator[torch.optim.Optimizer]:
        hooks = {module: set(module._forward_hooks) for module in model.modules()}
        DebugUnderflowOverflow(model)
        try:
            yield inner
        finally:  # it cannot remove its hooks
            for module, before in hooks.items():
                for key in set(module._forward_hooks) - before:
                    del module._forward_hooks[key]

    @contextlib.contextmanager
    def anomaly_mode() -> Iterator[torch.optim.Optimizer]:
        with warnings.catch_warnings(), torch.autograd.detect_anomaly():
            yield inner

    variants: dict[str, Callable[[], Any]] = {
        NO_TOOL: lambda: contextlib.nullcontext(inner),
        "nanlocator.watch": lambda: watched(inner, model),
        "nanlocator, level grads": lambda: located(inner, model, "grads"),
        "nanlocator, level modules": lambda: located(inner, model, "modules"),
        "nanlocator, level operators": lambda: located(inner, model, "operators"),
        "transformers DebugUnderflowOverflow": debugged,
        "torch anomaly mode": anomaly_mode,
    }

    def run(variant: str) -> float:
        with variants[variant]() as optimizer:
            step(optimizer)  # makes plans, fills caches
            return statistics.median(step(optimizer) for _ in range(arguments.steps))

    warnings.filterwarnings("ignore", message="Anomaly Detection")
    times = turns.take_turns(variants, run, arguments.rounds)
    parameters = sum(p.numel() for p in model.parameters())
    where = "outside" if arguments.loss_outside else "inside"
    heading = (
        f"GPT-2 hidden {arguments.hidden}, {LAYERS} layers, sequence {arguments.sequence}, batch "
        f"{arguments.batch}, loss {where}, fp32, {parameters / 1e6:.1f} M parameters, one CPU thread"
    )
    result = {"heading": heading, "parameters": parameters, "seconds": times}
    (Path(arguments.directory) / "result.json").write_text(json.dumps(result))
