"""Training of GPT-2 has the same bits at every level, and waits for the device equally often."""

import contextlib
import functools
import gc
import hashlib
import math
from typing import Any

import pytest
import torch
from gpu_machine import host_waits
from torch import nn

import nanlocator

LEVELS = ("grads", "modules", "operators")
WAYS = [("none", "again"), *((way, level) for way in ("watch", "LocatingOptimizer") for level in LEVELS)]


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


def gpt2(device: str) -> nn.Module:
    import transformers

    width = 256 if device == "cuda" else 32
    config = transformers.GPT2Config(n_embd=width, n_layer=2, n_head=4, n_positions=64, vocab_size=512)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(device).train()


def trained(device: str, autocast: torch.dtype | None, way: str, level: str) -> dict[str, Any]:
    """Ten steps: the bits of losses and weights, the peak, and the number of waits in the eighth step."""
    gc.collect()
    model = gpt2(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    watch, optimizer = None, inner
    if way == "watch":
        watch = nanlocator.watch(model, inner, level=level)
    elif way == "LocatingOptimizer":
        optimizer = watch = nanlocator.LocatingOptimizer(inner, model, level=level)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def forward_backward(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    def step(tokens: torch.Tensor) -> None:
        if way == "LocatingOptimizer":
            loss = optimizer.step(lambda: forward_backward(tokens))
        else:
            loss = forward_backward(tokens)
            optimizer.step()
        losses.append(loss.detach().clone())

    waits = None
    for number in range(10):
        tokens = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(number))
        tokens = tokens.to(device)
        torch.manual_seed(100 + number)
        if number == 7:
            waits = host_waits(device, functools.partial(step, tokens))
        else:
            step(tokens)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    if watch is not None:
        watch.remove()
    digest = hashlib.sha256()
    for tensor in (*losses, *model.state_dict().values()):
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    values = [loss.item() for loss in losses]
    return {"bits": digest.hexdigest()[:16], "losses": values, "peak": peak, "host_waits": waits}


@pytest.fixture(scope="module", params=[None, torch.bfloat16], ids=["fp32", "bf16"])
def alone(request, device):
    """The autocast dtype, and training without nanlocator."""
    trained(device, request.param, "none", "")  # creates workspaces and caches
    return request.param, trained(device, request.param, "none", "")


@pytest.mark.in_turn(3)
@pytest.mark.slow
@pytest.mark.parametrize(("way", "level"), WAYS)
def test_losses_and_weights_have_the_same_bits(alone, way, level, device, record_property):
    autocast, expected = alone
    found = trained(device, autocast, way, level)
    if found["peak"]:
        record_property("peak_ratio", round(found["peak"] / expected["peak"], 4))
    record_property("host_waits", {"with": found["host_waits"], "without": expected["host_waits"]})
    assert all(map(math.isfinite, found["losses"]))
    assert found["losses"] == expected["losses"] and found["bits"] == expected["bits"]
