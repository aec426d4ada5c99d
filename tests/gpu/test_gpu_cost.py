"""The cost of a healthy step on the device, and of a single scan: figures, which docs/benchmarks.md
judges."""

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_machine import DEVICE, ROOT, synchronize

from nanlocator import _C

sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
import turns
from overhead_pytorch import located, watched

pytestmark = pytest.mark.timed
NO_TOOL = "no tool"
GPT2 = {
    "350 M, batch 8 x 1024": {"layers": 24, "hidden": 1024, "batch": 8, "sequence": 1024, "rounds": 3},
    "85 M, batch 1 x 128": {"layers": 12, "hidden": 768, "batch": 1, "sequence": 128, "rounds": 5},
}
TINY = {"tiny": {"layers": 1, "hidden": 32, "batch": 1, "sequence": 16, "rounds": 1}}
SIZES = {"cuda": (2**12, 2**20, 2**24, 2**28, 2**31), "cpu": (2**12, 2**20)}


@pytest.mark.slow
@pytest.mark.parametrize("name", GPT2 if DEVICE == "cuda" else TINY)
def test_a_step_of_gpt2_in_bf16_at_each_level(name, device, record_property):
    """One size keeps the GPU busy all the time, in the other it waits for the host."""
    for key, figures in overhead(device, **(GPT2 | TINY)[name]).items():
        record_property(key, figures)


def overhead(device, layers, hidden, batch, sequence, rounds):
    import transformers

    vocabulary = 32000
    config = transformers.GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=max(hidden // 64, 1),
        n_positions=sequence,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).to(device, torch.bfloat16).train()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(0, vocabulary, (batch, sequence), device=device)
    steps = 3

    def run(variant: str) -> float:
        gc.collect()  # frees the previous variant's memory
        with variants[variant]() as optimizer:

            def step() -> None:
                optimizer.zero_grad()
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()

            step()  # creates the plans
            step()
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            return (time.perf_counter() - started) / steps

    variants: dict[str, Callable[[], Any]] = {
        NO_TOOL: lambda: contextlib.nullcontext(inner),
        "watch": lambda: watched(inner, model),
        "grads": lambda: located(inner, model, "grads"),
        "modules": lambda: located(inner, model, "modules"),
        "operators": lambda: located(inner, model, "operators"),
    }
    times = turns.take_turns(variants, run, rounds)
    ratios = {
        name: round(turns.ratio(seconds, times[NO_TOOL])["median"], 4) for name, seconds in times.items()
    }
    milliseconds = {name: [round(each * 1e3, 1) for each in seconds] for name, seconds in times.items()}
    return {"ratios": ratios, "milliseconds": milliseconds}


@pytest.mark.parametrize("size", SIZES[DEVICE])
def test_a_scan_of_one_tensor_outside_of_a_plan(size, device, record_property):
    tensor = torch.randn(size // 2, device=device).to(torch.bfloat16)
    scans = _C.TensorScans()
    scans.enqueue(tensor)
    scans.read()
    count = 200 if size < 2**26 else 20
    host, on_device = _times(device, lambda: scans.enqueue(tensor), count)
    scans.read()
    _, of_torch = _times(device, lambda: torch.isfinite(tensor).all(), count)
    record_property("host_us", round(host, 2))
    record_property("device_us", round(on_device, 2))
    record_property("GB/s", round(size / on_device / 1e3, 1))
    record_property("isfinite_device_us", round(of_torch, 2))


def _times(device: str, call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Microseconds of a call: the host's until it returns, and the device's (on the CPU both are equal)."""
    call()
    synchronize(device)
    if device == "cuda":
        torch.cuda._sleep(20_000_000)  # some 10 ms, so that the device never waits for the host
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    started = time.perf_counter()
    for _ in range(count):
        call()
    host = (time.perf_counter() - started) / count * 1e6
    if device != "cuda":
        return host, host
    end.record()
    torch.cuda.synchronize()
    return host, begin.elapsed_time(end) / count * 1e3
