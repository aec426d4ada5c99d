"""One fault each in kernels of many kinds, in a small model under `nanlocator.watch`."""

import contextlib
import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_expected import Expected, check
from gpu_machine import DEVICE
from torch import nn

import nanlocator

WIDTH, ROWS = 64, 64
Compute = Callable[[torch.Tensor], torch.Tensor]
UNDEFINED = ("operator_undefined",)
OVERFLOW = ("operator_overflow",)
UNDEFINED_OR_OVERFLOW = UNDEFINED + OVERFLOW


class Fault(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


class Planted(nn.Module):
    """The fault between two layers, in their dtype; active in steps with `is_bad`."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.fault, self.last = nn.Linear(WIDTH, WIDTH), Fault(compute), nn.Linear(WIDTH, WIDTH)
        self.is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.fault(x) if self.is_bad else x)


@dataclasses.dataclass(frozen=True)
class Plant:
    """A program that is bad in its last step, after `spoil` has been called on its model."""

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
    may_be_finite: bool = False  # this kernel may give a finite result

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
        """Whether any value is bad without nanlocator."""
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
        watch = nanlocator.watch(called, optimizer)
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


# ---- kernels that no observer sees --------------------

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
    """Doubles the source, but writes NaN into one element; the dispatcher does not see it."""
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


def unseen_kernels() -> dict[str, Plant]:
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


# ---- optimizers with their own kernels, and compiled models --------------------


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
    """Healthy while the gate is zero: code and compiled code are the same in a bad step."""

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


PLANTS = {
    **ordinary_faults(), **reduced_precision(), **attention_faults(DEVICE), **scattered(),
    **unseen_kernels(), **optimizers(DEVICE), **compiled_faults(DEVICE),
}  # fmt: skip


def case(name: str, plant: Plant) -> Any:
    marks = [pytest.mark.compiles, pytest.mark.slow] if plant.compiled is not None else []
    return pytest.param(plant, id=name, marks=marks)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("plant", [case(name, plant) for name, plant in PLANTS.items()])
def test_the_fault_of_a_kernel_is_named(plant, device):
    # A single step without an optimizer does not see faults of a bad state or a compiled model.
    is_seen_alone = plant.spoil_state is Plant.spoil_state and plant.compiled is None
    is_bad = not is_seen_alone or plant.is_bad_without(device)
    assert is_bad or plant.may_be_finite, "the planted fault makes no gradient bad"
    check(plant.verdict(device), plant.expected if is_bad else None)
