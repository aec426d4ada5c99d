"""Steps of tools/gpu: faults of kernels and streams that a GPU alone has; training that does not change."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from outcomes import Case, host_waits, outcomes_of
from torch import nn

import nanlocator

SECONDS = 60  # in which the cases of a step may begin
WIDTH, ROWS = 64, 64
Compute = Callable[[torch.Tensor], torch.Tensor]


# ---- what a verdict says, and what it should --------------------


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of the origins: of each name in ``names`` one of the values, which an operator begins with and a line
    holds."""

    operator: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    module: str | None = "fault"
    line: str = ""
    action: str = ""
    not_action: str = ""

    def wrong_in(self, origin: dict[str, Any]) -> list[str]:
        wrong = []
        if self.operator and not (origin["operator"] or "").startswith(self.operator):
            wrong.append(f"operator {origin['operator']}, not {' or '.join(self.operator)}")
        if self.cause and origin["cause"] not in self.cause:
            wrong.append(f"cause {origin['cause']}, not {' or '.join(self.cause)}")
        if self.module is not None and (origin["module"] or "") != self.module:
            wrong.append(f"module {origin['module']}, not {self.module}")
        text = (origin.get("code") or {}).get("text") or ""
        if self.line not in text:
            wrong.append(f"line {text!r}, not that of {self.line!r}")
        if self.action and origin["action_kind"] != self.action:
            wrong.append(f"action {origin['action_kind']}, not {self.action}")
        if self.not_action and origin["action_kind"] == self.not_action:
            wrong.append(f"action {self.not_action}")
        return wrong


def described(verdict: dict[str, Any] | None) -> dict[str, Any]:
    if verdict is None:
        return {"verdict": None}
    keys = (
        "operator",
        "module",
        "cause",
        "detail",
        "phase",
        "parameter",
        "confidence",
        "owner",
        "action_kind",
    )
    origins = []
    for origin in verdict["origins"]:
        code = origin.get("code") or {}
        facts = [_fact(fact) for fact in origin["facts"]]
        line = f"{code.get('line')}: {code.get('text')}"
        origins.append({key: origin.get(key) for key in keys} | {"code": line, "facts": facts})
    return {"origins": origins, "rerun": verdict["rerun"], "notes": verdict["notes"]}


def _fact(fact: dict[str, Any]) -> dict[str, Any]:
    lines = {key: (fact.get(key) or {}).get("text") for key in ("code", "transfer_code") if fact.get(key)}
    return {"kind": fact["kind"], "operator": fact.get("operator")} | lines


def judged(verdict: dict[str, Any] | None, expected: Expected | None) -> tuple[dict[str, Any], list[str]]:
    """``expected`` None: a healthy program."""
    found = described(verdict)
    if verdict is None:
        return found, [] if expected is None else ["no verdict"]
    if expected is None:
        return found, ["a verdict, though nothing is bad"]
    first, *others = verdict["origins"]
    wrong = expected.wrong_in(first)
    wrong += [f"another origin: {other['operator']}, {other['cause']}" for other in others]
    return found, wrong


# ---- kernel-faults: one fault each in a small model, under nanlocator.watch --------------------


class Fault(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


class Planted(nn.Module):
    """The fault between two layers, in their dtype; its steps are bad where `is_bad` is."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.fault, self.last = nn.Linear(WIDTH, WIDTH), Fault(compute), nn.Linear(WIDTH, WIDTH)
        self.is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.fault(x) if self.is_bad else x)


@dataclasses.dataclass(frozen=True)
class Plant:
    """A program that is bad in its last step, where `spoil` has been called on its model."""

    compute: Compute
    expected: Expected
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda out: out.float().square().mean()
    make: Callable[[Compute], nn.Module] = Planted
    spoil: Callable[[nn.Module], None] = lambda model: setattr(model, "is_bad", True)
    batch: Callable[[str], torch.Tensor] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    spoil_state: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    compiled: dict[str, Any] | None = None
    scaler: bool = False
    healthy_steps: int = 1
    bad_steps: int = 1
    may_be_finite: bool = False  # what this kernel makes of it is its own affair

    def model(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        return self.make(self.compute).to(device, self.dtype)

    def loss_of(self, model: nn.Module, device: str, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        if self.batch is not None:
            batch = self.batch(device)
        else:
            batch = torch.randn(ROWS, WIDTH).to(device, self.dtype)
        with torch.autocast(device, self.autocast) if self.autocast else contextlib.nullcontext():
            return self.loss(model(batch))

    def is_bad_without(self, device: str) -> bool:
        """Whether anything is bad at all, with nothing of nanlocator there."""
        model = self.model(device)
        self.spoil(model)
        loss = self.loss_of(model, device, 0)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return not all(each.isfinite().all() for each in (loss, *gradients))

    def verdict(self, device: str) -> dict[str, Any] | None:
        model = self.model(device)
        called = torch.compile(model, **self.compiled) if self.compiled is not None else model
        optimizer = self.optimizer(model.parameters())
        scaler = torch.amp.GradScaler(device, init_scale=2.0) if self.scaler else None
        with tempfile.TemporaryDirectory() as folder:
            watch = nanlocator.watch(called, optimizer, output_dir=folder)
            try:
                for step in range(self.healthy_steps + self.bad_steps):
                    if step == self.healthy_steps:
                        self.spoil(model)
                        self.spoil_state(optimizer)
                    if self.compiled is not None:
                        torch.compiler.cudagraph_mark_step_begin()
                    self.step(called, optimizer, scaler, device, step)
            except nanlocator.NonFiniteGradientError as error:
                return error.verdict
            finally:
                watch.remove()
        return watch.verdicts[0] if watch.verdicts else None

    def step(self, model: nn.Module, optimizer: Any, scaler: Any, device: str, number: int) -> None:
        loss = self.loss_of(model, device, number)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    def run(self, device: str) -> tuple[dict[str, Any], list[str]]:
        needs_scan = self.spoil_state is Plant.spoil_state and self.compiled is None
        is_bad = self.is_bad_without(device) if needs_scan else True
        if not is_bad and not self.may_be_finite:
            return {}, ["the planted fault makes no gradient bad"]
        found, wrong = judged(self.verdict(device), self.expected if is_bad else None)
        return found | {"bad_without": is_bad}, wrong


def kernel_faults(device: str) -> dict[str, Any]:
    plants = {
        **ordinary_faults(), **reduced_precision(), **attention_faults(device), **scattered(),
        **unseen_kernels(device), **optimizers(device), **compiled_faults(device),
    }  # fmt: skip
    cases: list[Case] = [(name, functools.partial(plant.run, device)) for name, plant in plants.items()]
    return outcomes_of(cases, SECONDS)


UNDEFINED = ("operator_undefined",)
OVERFLOW = ("operator_overflow",)
UNDEFINED_OR_OVERFLOW = UNDEFINED + OVERFLOW


def log_of_negative(x: torch.Tensor) -> torch.Tensor:
    return torch.log(-x.abs() - 1)


LOG = Expected(("aten::log",), UNDEFINED, line="torch.log(-x.abs() - 1)")


class Embedded(nn.Module):
    def __init__(self, _: Compute) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(tokens))


def spoil_row(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("embedding").weight[3] = math.nan


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        nothing = gradient - gradient
        return gradient * (nothing / nothing)  # 0/0


def ordinary_faults() -> dict[str, Plant]:
    def ignored(out: torch.Tensor) -> torch.Tensor:
        labels = torch.full((len(out),), -100, device=out.device)
        return F.cross_entropy(out, labels)  # 0/0

    def into_buffer(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty_like(x)
        with torch.no_grad():
            torch.log(-x.abs() - 1, out=buffer)
        return x * buffer

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return (-x.abs() - 1).log_()

    def layer_norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x * 0 + 1, (WIDTH,), eps=0.0)

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x * 0, (WIDTH,), eps=0.0)

    def masked_softmax(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[3] = True
        return torch.softmax(x.masked_fill(mask, -math.inf), -1)

    def all_tokens(device: str) -> torch.Tensor:
        return torch.arange(16, device=device)

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return {
        "log of a negative number": Plant(log_of_negative, LOG),
        "log into out=": Plant(into_buffer, Expected(("aten::log",), UNDEFINED, line="out=buffer")),
        "log in place": Plant(in_place, Expected(("aten::log_",), UNDEFINED, line=".log_()")),
        "layer_norm of a constant row, eps 0": Plant(
            layer_norm, Expected(("aten::native_layer_norm",), UNDEFINED_OR_OVERFLOW, line="F.layer_norm")
        ),
        "rms_norm of zeros, eps 0": Plant(
            rms_norm,
            Expected(
                ("aten::_fused_rms_norm", "aten::rsqrt", "aten::mul"),
                UNDEFINED_OR_OVERFLOW,
                line="F.rms_norm",
            ),
        ),
        "softmax of a masked row": Plant(
            masked_softmax, Expected(("aten::_softmax",), UNDEFINED, line="torch.softmax")
        ),
        "every label ignored": Plant(
            same,
            Expected(("aten::nll_loss",), ("empty_loss_mask",), module="", line="F.cross_entropy"),
            loss=ignored,
            healthy_steps=0,
        ),
        "a bad row of an embedding": Plant(
            same,
            Expected((), ("bad_weight",), module="embedding"),
            make=Embedded,
            spoil=spoil_row,
            batch=all_tokens,
        ),
        "a wrong backward of a Function": Plant(
            WrongBackward.apply, Expected(("aten::div",), ("operator_bug", "operator_undefined"), line="0/0")
        ),
    }


def scattered() -> dict[str, Plant]:
    def index(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def added(x: torch.Tensor) -> torch.Tensor:
        bad = torch.log(-x.abs() - 1)
        return torch.zeros_like(x).index_add(0, index(x), bad)

    def scattered_(x: torch.Tensor) -> torch.Tensor:
        bad = torch.log(-x.abs() - 1)
        return x.scatter_add(0, index(x)[:, None].expand_as(x), bad)

    def overflowing(x: torch.Tensor) -> torch.Tensor:
        large = x * 0 + 60000
        return torch.zeros_like(x).index_add(0, index(x), large)

    return {
        "index_add of a NaN": Plant(added, LOG),
        "scatter_add of a NaN": Plant(scattered_, LOG),
        "index_add that overflows in fp16": Plant(
            overflowing,
            Expected(("aten::index_add", "aten::scatter_add"), OVERFLOW, line="index_add"),
            dtype=torch.float16,
        ),
    }


def reduced_precision() -> dict[str, Plant]:
    def large(x: torch.Tensor) -> torch.Tensor:
        return x * 0 + 3000

    def product(x: torch.Tensor) -> torch.Tensor:
        return (x * 0 + 3000) @ (x * 0 + 3000).t()

    def eight_bits(x: torch.Tensor, scale_of: Compute) -> torch.Tensor:
        a = x.detach().to(torch.float8_e4m3fn)
        b = torch.ones(WIDTH, WIDTH, device=x.device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=x.device)
        out = torch._scaled_mm(a, b, scale_a=scale_of(x), scale_b=one, out_dtype=torch.bfloat16)
        return x + out.to(x.dtype)

    def scale_of_zeros(x: torch.Tensor) -> torch.Tensor:
        amax = (x.detach() * 0).abs().max().float()
        return 448 / amax

    def too_large(x: torch.Tensor) -> torch.Tensor:
        return torch.full((), 3e38, device=x.device)

    def nan_scale(x: torch.Tensor) -> torch.Tensor:
        return (x.detach().float().max() * 0 - 1).sqrt()

    def narrowed(x: torch.Tensor) -> torch.Tensor:
        large = (x.detach() * 1000).to(torch.float8_e4m3fn)
        return x + large.to(x.dtype)

    plants = {
        "log under bf16 autocast": Plant(log_of_negative, LOG, autocast=torch.bfloat16),
        "a product that overflows in fp16": Plant(
            product, Expected(("aten::mm", "aten::matmul"), OVERFLOW, line=".t()"), dtype=torch.float16
        ),
        "a product that overflows in fp16 autocast, with a GradScaler": Plant(
            product,
            Expected(("aten::mm", "aten::matmul"), OVERFLOW, line=".t()"),
            autocast=torch.float16,
            scaler=True,
        ),
        "a Linear that overflows in fp16 autocast": Plant(
            large,
            Expected(("aten::addmm", "aten::linear"), OVERFLOW, module="last"),
            autocast=torch.float16,
            spoil=spoil_last,
        ),
    }
    scales = {
        "of an amax of zero": (
            scale_of_zeros,
            Expected(("aten::div", "aten::reciprocal"), UNDEFINED_OR_OVERFLOW, line="448 / amax"),
        ),
        "too large": (  # CPUs without fp8 multiply before
            too_large,
            Expected(("aten::_scaled_mm", "aten::mul"), UNDEFINED_OR_OVERFLOW, line="_scaled_mm("),
        ),
        "NaN": (nan_scale, Expected(("aten::sqrt",), UNDEFINED, line=".sqrt()")),
    }
    for name, (scale_of, expected) in scales.items():
        compute = functools.partial(eight_bits, scale_of=scale_of)
        plants[f"scaled_mm, scale {name}"] = Plant(compute, expected, dtype=torch.bfloat16)
    plants["a cast to float8_e4m3fn that overflows"] = Plant(
        narrowed,
        Expected(("aten::_to_copy", "aten::copy_", "aten::to"), OVERFLOW, line=".to(torch.float8_e4m3fn)"),
        may_be_finite=True,
    )
    return plants


def spoil_last(model: nn.Module) -> None:
    model.is_bad = True
    with torch.no_grad():
        model.get_submodule("last").weight.fill_(1.0)


# ---- attention under each backend --------------------

BACKENDS = {
    "flash": ("FLASH_ATTENTION", ("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention")),
    "efficient": (
        "EFFICIENT_ATTENTION",
        ("aten::_scaled_dot_product_efficient_attention", "aten::_efficient_attention"),
    ),
    "cudnn": ("CUDNN_ATTENTION", ("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention")),
    "math": ("MATH", ("aten::",)),
}


def attention_faults(device: str) -> dict[str, Plant]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2)

    def attend(q: torch.Tensor, x: torch.Tensor, backend: str, mask: torch.Tensor | None) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = F.scaled_dot_product_attention(heads(q), heads(q), heads(x), attn_mask=mask)
        return out.transpose(1, 2).reshape(ROWS, WIDTH)

    def overflow(x: torch.Tensor, backend: str) -> torch.Tensor:
        return attend(x * 1e30, x, backend, None)

    def before(x: torch.Tensor, backend: str) -> torch.Tensor:
        q = torch.log(-x.abs() - 1)
        return attend(q, x, backend, None)

    def masked(x: torch.Tensor, backend: str) -> torch.Tensor:
        mask = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool, device=x.device)
        mask[:, :, 3] = False
        return attend(x, x, backend, mask)

    names = BACKENDS if device == "cuda" else ("flash", "math")
    plants = {}
    for name in names:
        backend, operators = BACKENDS[name]
        own = Expected(operators, UNDEFINED_OR_OVERFLOW, line="F.scaled_dot_product_attention")
        too_large = Expected(operators, OVERFLOW, line="F.scaled_dot_product_attention")
        plants[f"attention, {name}: q and k overflow in bf16"] = Plant(
            functools.partial(overflow, backend=backend), too_large, dtype=torch.bfloat16
        )
        for dtype in (torch.float16, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            plants[f"attention, {name}: NaN before it, {short}"] = Plant(
                functools.partial(before, backend=backend), LOG, dtype=dtype
            )
        if name != "flash" or device == "cpu":
            plants[f"attention, {name}: a masked row"] = Plant(
                functools.partial(masked, backend=backend), own, dtype=torch.bfloat16, may_be_finite=True
            )
    return plants


# ---- kernels that nobody sees --------------------

SPOIL = """
extern "C" __global__ void spoil(const float* from, float* to, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = i == 5 ? __int_as_float(0x7fffffff) : 2 * from[i];
}
"""


@functools.cache
def kernel() -> Any:
    return torch.cuda._compile_kernel(SPOIL, "spoil")


def launch(source: torch.Tensor, target: torch.Tensor) -> None:
    """Twice the source, but for an element, which is NaN; the dispatcher does not see it."""
    if source.device.type == "cuda":
        grid = ((source.numel() + 255) // 256, 1, 1)
        kernel()(grid=grid, block=(256, 1, 1), args=[source, target, source.numel()])
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), 4 * source.numel())
        ctypes.c_float.from_address(target.data_ptr() + 20).value = math.nan


class Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        launch(x.detach().contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class ForeignBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gradient)
        launch(gradient.contiguous(), out)
        return out


def unseen_kernels(device: str) -> dict[str, Plant]:
    def foreign(x: torch.Tensor) -> torch.Tensor:
        return Foreign.apply(x)

    def foreign_backward(x: torch.Tensor) -> torch.Tensor:
        return ForeignBackward.apply(x)

    def outside(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        launch(x.detach().contiguous(), out)
        return x + out

    def after_a_fault(x: torch.Tensor) -> torch.Tensor:
        return Foreign.apply(torch.log(-x.abs() - 1))

    return {
        "an unseen kernel in a Function": Plant(foreign, Expected(("Foreign",), ("unknown",))),
        "an unseen kernel in a Function's backward": Plant(
            foreign_backward, Expected(("ForeignBackward",), ("unknown",))
        ),
        "an unseen kernel outside of a Function": Plant(outside, Expected((), ("memory_corruption",))),
        "a log before an unseen kernel": Plant(after_a_fault, LOG),
    }


# ---- optimizers with kernels of their own, and compiled models --------------------


def optimizers(device: str) -> dict[str, Plant]:
    def spoil_state(optimizer: torch.optim.Optimizer) -> None:
        next(iter(optimizer.state.values()))["exp_avg"].view(-1)[3] = math.nan

    plants = {}
    for kind in ("fused", "foreach"):
        adamw = functools.partial(torch.optim.AdamW, lr=1e-3, capturable=device == "cuda", **{kind: True})
        plants[f"log, AdamW {kind}"] = Plant(log_of_negative, LOG, optimizer=adamw, healthy_steps=3)
        plants[f"a bad state of AdamW {kind}"] = Plant(
            lambda x: x,
            Expected((), ("bad_weight", "optimizer_state"), module="first"),
            optimizer=adamw,
            spoil_state=spoil_state,
            bad_steps=2,
        )
    return plants


class Gated(nn.Module):
    """Healthy while the gate is zero: the code, and so what is compiled, is the same in a bad step."""

    def __init__(self, _: Compute) -> None:
        super().__init__()
        self.gate: torch.Tensor
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x.abs() + 1 - self.gate)


class GatedModel(Planted):
    def __init__(self, compute: Compute) -> None:
        super().__init__(compute)
        self.fault, self.is_bad = Gated(compute), True  # type: ignore[assignment]


def open_gate(model: nn.Module) -> None:
    model.get_submodule("fault").gate.fill_(1000.0)


def compiled_faults(device: str) -> dict[str, Plant]:
    ways: dict[str, dict[str, Any]] = {"default": {}, "fullgraph": {"fullgraph": True}}
    if device == "cuda":
        ways["CUDA graphs"] = {"mode": "reduce-overhead"}
    expected = Expected(("aten::log",), UNDEFINED, line="torch.log(x.abs() + 1 - self.gate)")
    return {
        f"log in a compiled model, {name}": Plant(
            lambda x: x, expected, make=GatedModel, spoil=open_gate, compiled=options, healthy_steps=4
        )
        for name, options in ways.items()
    }


# ---- streams-races: streams of a GPU that do not wait for each other --------------------

LONG = 200_000_000  # cycles: about 0.1 s


class Streams(nn.Module):
    """Two layers; what a side stream or the host does to a buffer stands between them."""

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
    lines: tuple[str, str] | None = None  # of the operator and of what it does not wait for
    way: str = "closure"
    spoils_once: bool = False

    def run(self, device: str) -> tuple[dict[str, Any], list[str]]:
        torch.manual_seed(0)
        model = Streams(self.program, device).to(device)
        batch = torch.randn(ROWS, WIDTH, device=device)
        spoiled = [False]
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        with tempfile.TemporaryDirectory() as folder, self.followed(model, inner, folder) as optimizer:

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

            verdict = None
            step()
            step()
            model.waits = False
            torch.cuda.synchronize()
            try:
                step()
            except nanlocator.NonFiniteGradientError as error:
                verdict = error.verdict
        found, wrong = judged(verdict, self.expected)
        return found, wrong + self.wrong_lines(verdict)

    @contextlib.contextmanager
    def followed(self, model: nn.Module, inner: torch.optim.Optimizer, folder: str) -> Iterator[Any]:
        if self.way == "closure":
            optimizer = nanlocator.LocatingOptimizer(inner, model, output_dir=folder)
            try:
                yield optimizer
            finally:
                optimizer.remove()
        else:
            watch = nanlocator.watch(model, inner, output_dir=folder)
            try:
                yield inner
            finally:
                watch.remove()

    def wrong_lines(self, verdict: dict[str, Any] | None) -> list[str]:
        told = []
        for origin in verdict["origins"] if verdict else []:
            for fact in origin["facts"]:
                if fact["kind"].endswith("beside_stream"):
                    told.append(tuple((fact.get(k) or {}).get("text", "") for k in ("code", "transfer_code")))
        if self.lines is None:
            return [f"streams are told: {told}"] if told else []
        if not any(all(a in b for a, b in zip(self.lines, lines, strict=True)) for lines in told):
            return [f"the lines {self.lines} are not told, but {told}"]
        return []


def spoil_off_the_dispatcher(tensor: torch.Tensor) -> None:
    ones = torch.ones_like(tensor)
    torch.cuda.synchronize()
    kernel()(grid=(1, 1, 1), block=(256, 1, 1), args=[ones, tensor, tensor.numel()])
    torch.cuda.synchronize()


def stream_races(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"skipped": "needs a GPU"}
    race = Expected((), ("race",), module=None)
    ordered = Expected((), ("race",), module=None, action="wait_for_stream")
    read = ("return x * buffer", "buffer.copy_(model.good)")
    written = ("buffer.fill_(math.nan)", "twice = buffer * 2")
    races = {
        "read before a side stream has written": Race(read_too_early, ordered, read),
        "the same under watch": Race(read_too_early, ordered, read, way="watch"),
        "written before a side stream has read": Race(written_too_early, ordered, written),
        "a pinned buffer that the host overwrites": Race(overwritten_on_the_host, race),
        "freed before a side stream has read": Race(freed_too_early, race),
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
    return outcomes_of([(name, functools.partial(each.run, device)) for name, each in races.items()], SECONDS)


# ---- transparency: the same bits, memory and waits of the host --------------------


def gpt2(device: str) -> nn.Module:
    import transformers

    width = 256 if device == "cuda" else 32
    config = transformers.GPT2Config(n_embd=width, n_layer=2, n_head=4, n_positions=64, vocab_size=512)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(device).train()


def trained(device: str, autocast: torch.dtype | None, way: str, level: str) -> dict[str, Any]:
    """Ten steps: the bits of losses and weights, the peak, and how often the eighth step waits."""
    gc.collect()
    model = gpt2(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        watch, optimizer = None, inner
        if way == "watch":
            watch = nanlocator.watch(model, inner, level=level, output_dir=folder)
        elif way == "LocatingOptimizer":
            optimizer = watch = nanlocator.LocatingOptimizer(inner, model, level=level, output_dir=folder)
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


def compared(
    device: str, autocast: torch.dtype | None, way: str, level: str, alone: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    found = trained(device, autocast, way, level)
    wrong = [] if found["bits"] == alone["bits"] else ["other bits of losses and weights"]
    if not all(map(math.isfinite, found["losses"])):
        wrong.append("a loss is not finite")
    found["peak_ratio"] = round(found["peak"] / alone["peak"], 4) if found["peak"] else None
    found["host_waits_without"] = alone["host_waits"]
    found["first_other_loss"] = next(
        (i for i, (a, b) in enumerate(zip(found["losses"], alone["losses"], strict=True)) if a != b), None
    )
    return found, wrong


def transparency(device: str) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    levels = ("grads", "modules", "operators")
    ways = [("none", "again"), *((way, level) for way in ("watch", "LocatingOptimizer") for level in levels)]
    cases: list[Case] = []
    for name, autocast in (("fp32", None), ("bf16", torch.bfloat16)):
        trained(device, autocast, "none", "")  # workspaces and caches are there afterwards
        alone = trained(device, autocast, "none", "")
        for way, level in ways:
            run = functools.partial(compared, device, autocast, way, level, alone)
            cases.append((f"{name}, {way}, {level}", run))
    return outcomes_of(cases, SECONDS)
