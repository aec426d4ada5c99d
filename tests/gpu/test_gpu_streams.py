"""GPU streams that do not wait for each other, and some that do."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_expected import Expected, check
from test_gpu_kernels import ROWS, UNDEFINED, WIDTH, kernel
from torch import nn

import nanlocator

LONG = 200_000_000  # cycles: about 0.1 s


class Streams(nn.Module):
    """Two layers, with a side stream's or the host's work on a buffer between them."""

    def __init__(self, program: Callable[["Streams", torch.Tensor], torch.Tensor], device: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.program = program
        self.waits = True
        self.side = torch.cuda.Stream()
        self.good = torch.ones(ROWS, WIDTH, device=device)
        self.host = torch.ones(ROWS, WIDTH).pin_memory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.program(self, self.first(x)))


def read_too_early(model: Streams, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.full_like(x, math.nan, requires_grad=False)
    model.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(model.side):
        torch.cuda._sleep(LONG)
        buffer.copy_(model.good)
    buffer.record_stream(model.side)
    if model.waits:
        torch.cuda.current_stream().wait_stream(model.side)
    return x * buffer


def written_too_early(model: Streams, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.ones_like(x, requires_grad=False)
    model.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(model.side):
        torch.cuda._sleep(LONG)
        twice = buffer * 2
    buffer.record_stream(model.side)
    if model.waits:
        torch.cuda.current_stream().wait_stream(model.side)
    buffer.fill_(math.nan)
    torch.cuda.current_stream().wait_stream(model.side)
    return x * twice


def overwritten_on_the_host(model: Streams, x: torch.Tensor) -> torch.Tensor:
    model.host.fill_(1.0)
    torch.cuda._sleep(LONG)
    buffer = torch.empty_like(x, requires_grad=False)
    buffer.copy_(model.host, non_blocking=True)
    if model.waits:
        torch.cuda.current_stream().synchronize()
    model.host.fill_(math.nan)
    return x * buffer


def freed_too_early(model: Streams, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.ones_like(x, requires_grad=False)
    model.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(model.side):
        torch.cuda._sleep(LONG)
        twice = buffer * 2
    if model.waits:
        buffer.record_stream(model.side)
    del buffer
    others = [torch.full_like(x, math.nan, requires_grad=False) for _ in range(4)]  # one has its memory
    torch.cuda.current_stream().wait_stream(model.side)
    del others
    return x * twice


def waiting_and_undefined(model: Streams, x: torch.Tensor) -> torch.Tensor:
    waits, model.waits = model.waits, True
    x = read_too_early(model, x)
    model.waits = waits
    return x if waits else torch.log(-x.abs() - 1)


def always_waiting(model: Streams, x: torch.Tensor) -> torch.Tensor:
    waits, model.waits = model.waits, True
    x = read_too_early(model, x)
    model.waits = waits
    return x


@dataclasses.dataclass(frozen=True)
class Race:
    program: Callable[[Streams, torch.Tensor], torch.Tensor]
    expected: Expected | None
    lines: tuple[str, str] | None = None  # the operator's line, and the line it does not wait for
    way: str = "closure"
    spoils_once: bool = False

    def verdict(self, device: str) -> dict[str, Any] | None:
        torch.manual_seed(0)
        model = Streams(self.program, device).to(device)
        batch = torch.randn(ROWS, WIDTH, device=device)
        spoiled = [False]
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        with self.followed(model, inner) as optimizer:

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                if self.spoils_once and not model.waits and not spoiled[0]:
                    spoiled[0] = True
                    spoil_off_the_dispatcher(model.first.bias.grad)
                return loss

            def step() -> None:
                if self.way == "closure":
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()

            step()
            step()
            model.waits = False
            torch.cuda.synchronize()
            try:
                step()
            except nanlocator.NonFiniteGradientError as error:
                return error.verdict
        return None

    @contextlib.contextmanager
    def followed(self, model: nn.Module, inner: torch.optim.Optimizer) -> Iterator[Any]:
        if self.way == "closure":
            optimizer = nanlocator.LocatingOptimizer(inner, model)
            try:
                yield optimizer
            finally:
                optimizer.remove()
        else:
            watch = nanlocator.watch(model, inner)
            try:
                yield inner
            finally:
                watch.remove()

    def check_lines(self, verdict: dict[str, Any] | None) -> None:
        """The reported lines about streams: the operator's, and the one it does not wait for."""
        reported = []
        for origin in verdict["origins"] if verdict else []:
            for fact in origin["facts"]:
                if fact["kind"].endswith("beside_stream"):
                    reported.append(
                        tuple((fact.get(key) or {}).get("text", "") for key in ("code", "transfer_code"))
                    )
        if self.lines is None:
            assert not reported
        else:
            pairs = [zip(self.lines, lines, strict=True) for lines in reported]
            assert any(all(a in b for a, b in pair) for pair in pairs), reported


def spoil_off_the_dispatcher(tensor: torch.Tensor) -> None:
    ones = torch.ones_like(tensor)
    torch.cuda.synchronize()
    kernel()(grid=(1, 1, 1), block=(256, 1, 1), args=[ones, tensor, tensor.numel()])
    torch.cuda.synchronize()


RACE = Expected((), ("race",), module=None)
ORDERED = Expected((), ("race",), module=None, action="wait_for_stream")
READ = ("return x * buffer", "buffer.copy_(model.good)")
WRITTEN = ("buffer.fill_(math.nan)", "twice = buffer * 2")
RACES = {
    "read before a side stream has written": Race(read_too_early, ORDERED, READ),
    "the same under watch": Race(read_too_early, ORDERED, READ, way="watch"),
    "written before a side stream has read": Race(written_too_early, ORDERED, WRITTEN),
    "a pinned buffer that the host overwrites": Race(overwritten_on_the_host, RACE),
    "freed before a side stream has read": Race(freed_too_early, RACE),
    "streams that wait, and a log": Race(
        waiting_and_undefined, Expected(("aten::log",), UNDEFINED, module=None)
    ),
    "streams that wait, and a gradient spoiled once": Race(
        always_waiting,
        Expected((), ("not_reproduced",), module=None, not_action="wait_for_stream"),
        spoils_once=True,
    ),
    "streams that wait": Race(always_waiting, None),
    "streams that wait, under watch": Race(always_waiting, None, way="watch"),
}


@pytest.mark.needs_gpu
@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_streams_that_do_not_wait_are_named_and_others_are_not(race, device):
    verdict = race.verdict(device)
    check(verdict, race.expected)
    race.check_lines(verdict)
