"""Plain PyTorch on the device: planted faults, a step that fills it, and a captured graph."""

import time
from collections.abc import Callable

import pytest
import torch
from gpu_machine import synchronize
from torch import nn
from unseen_count import UnseenCount

from nanlocator import LocatingOptimizer, NonFiniteGradientError


class Faulty(nn.Module):
    """Two linear layers with a place for a fault between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.fault: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fault is not None:
            x = self.fault(x)
        return self.second(x)


class _RootOfZero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).abs().sqrt() + x


def _spoil_once() -> Callable[[torch.Tensor], torch.Tensor]:
    times = UnseenCount()

    def fault(x: torch.Tensor) -> torch.Tensor:
        if times.one_more() == 1:
            x.data.view(-1)[3] = float("nan")
        return x

    return fault


FAULTS: dict[str, tuple[Callable[[], Callable[[torch.Tensor], torch.Tensor]], str | None]] = {
    "log of a negative number": (lambda: lambda x: torch.log(-x.abs() - 1), "aten::log"),
    "zero over zero": (lambda: lambda x: (x * 0) / (x * 0), "aten::div"),
    "overflow of exp": (lambda: lambda x: torch.exp(x.abs() + 1000), "aten::exp"),
    "derivative of a root at zero": (_RootOfZero, "aten::div"),
    "an element overwritten once": (_spoil_once, None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_located_and_its_bundle_replays(name, device, tmp_path, replays, record_property):
    make, operator = FAULTS[name]
    width = 512 if device == "cuda" else 16
    model = Faulty(width).to(device).train()
    optimizer = LocatingOptimizer(
        torch.optim.AdamW(model.parameters()), model, output_dir=tmp_path, on_bad="stop"
    )
    batch = torch.randn(64, width, device=device)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    model.fault = make()
    started = time.perf_counter()
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    record_property("step_seconds", round(time.perf_counter() - started, 2))
    optimizer.remove()
    verdict = raised.value.verdict
    (origin,) = verdict["origins"]
    if operator is None:
        assert origin["cause"] == "not_reproduced" and verdict["rerun"]["reproduced"] is False
    else:
        assert origin["operator"].startswith(operator) and verdict["rerun"]["reproduced"] is True
        replays.start(tmp_path)


def test_the_bundles_of_these_faults_replay(replays, record_property):
    record_property("replays", replays.check())


class Layers(nn.Module):
    """Residual layers; NaN from the first on if it is bad."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(layers)
        )
        self.is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == 0 and self.is_bad:
                x = torch.log(-x.abs() - 1)
        return x


@pytest.mark.slow
def test_a_bad_step_on_a_full_device_is_executed_again(device, record_property):
    layers, width, rows = (24, 2048, 16384) if device == "cuda" else (4, 128, 256)
    model = Layers(layers, width).to(device)
    batch = torch.randn(rows, width, device=device)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model, on_bad="report")

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    def step():
        """Returns seconds, and the peak of the device's memory."""
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        started = time.perf_counter()
        optimizer.step(closure)
        synchronize(device)
        return time.perf_counter() - started, torch.cuda.max_memory_allocated() if device == "cuda" else None

    step()
    healthy_seconds = sorted(step()[0] for _ in range(5))[2]
    _, healthy_peak = step()
    if device == "cuda":  # the step fills 95 % of its limit
        total = torch.cuda.get_device_properties(0).total_memory
        reserved = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, reserved / 0.95 / total))
    model.is_bad = True
    bad_seconds, bad_peak = step()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    optimizer.remove()
    record_property("healthy_seconds", healthy_seconds)
    record_property("time_over_step", bad_seconds / healthy_seconds)
    if healthy_peak:
        record_property("healthy_peak", healthy_peak)
        record_property("peak_over_step", bad_peak / healthy_peak)
    (verdict,) = optimizer.verdicts
    (origin,) = verdict["origins"]
    record_property("notes", verdict["notes"])
    assert verdict["rerun"]["done"] and origin["operator"] == "aten::log", verdict


@pytest.mark.needs_gpu
def test_a_nan_in_a_captured_graph_is_found_when_it_is_replayed():
    model = Faulty(256).cuda()
    static = torch.randn(32, 256, device="cuda")
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, level="modules")

    def forward_backward():
        model(static).square().mean().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=False)
    with torch.cuda.graph(captured):
        forward_backward()
    optimizer.zero_grad(set_to_none=False)
    captured.replay()
    optimizer.step()  # healthy
    optimizer.zero_grad(set_to_none=False)
    static[0, 0] = float("nan")
    captured.replay()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
