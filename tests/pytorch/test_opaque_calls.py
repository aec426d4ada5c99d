"""Births before, after and inside calls that the dispatcher does not see; fakes of TransformerEngine's."""

import math

import pytest
import torch
from opaque_engine import Attention, LayerNorm, Linear
from torch import nn
from torch.utils.checkpoint import checkpoint
from traced_models import declare

from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks

pytestmark = pytest.mark.host  # its kernels run on the CPU

WIDTH = 4
OPAQUE = {"linear": lambda: Linear(WIDTH, WIDTH), "norm": lambda: LayerNorm(WIDTH), "attention": Attention}
CHAINS = [1, 2, 3, 6]


class Planted(nn.Module):
    """Has a weight, so that a birth in backward also reaches a gradient of its own module."""

    def __init__(self, compute) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.compute(x * self.weight)


class Chain(nn.Module):
    def __init__(
        self, before: list[nn.Module], guilty: nn.Module, after: list[nn.Module], is_residual: bool
    ) -> None:
        super().__init__()
        self.before, self.guilty = nn.ModuleList(before), guilty
        self.after, self.head = nn.ModuleList(after), nn.Linear(WIDTH, 1)
        self.is_residual = is_residual

    def forward(self, x):
        for module in (*self.before, self.guilty, *self.after):
            x = x + module(x) if self.is_residual else module(x)
        return self.head(x).sum()


def chain(length_before: int, compute, length_after: int, kinds=tuple(OPAQUE), is_residual=False) -> Chain:
    def opaque(count: int) -> list[nn.Module]:
        return [OPAQUE[kinds[i % len(kinds)]]() for i in range(count)]

    return Chain(opaque(length_before), Planted(compute), opaque(length_after), is_residual)


def births_of(model: nn.Module, *, fused: bool = False, microbatches: int = 1, after_backward=None):
    """The births that no earlier birth explains."""
    with _C.OperatorTrace() as trace:
        declare(trace, model)
        buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
        begin = 0
        for name, parameter in model.named_parameters():
            if fused:  # like Megatron's buffer, one for all
                parameter.main_grad = buffer[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()
                trace.declare(parameter.main_grad, "gradient", name)
        trace.begin_pass()
        buffer.zero_()
        losses = []
        with ModuleHooks(model):
            for number in range(microbatches):
                losses.append(model(torch.randn(3, WIDTH) + number))
                losses[-1].backward()
                for parameter in model.parameters() if fused else ():
                    if (
                        not getattr(parameter, "grad_added_to_main_grad", False)
                        and parameter.grad is not None
                    ):
                        parameter.main_grad.add_(parameter.grad)
                    parameter.grad = None
        if after_backward is not None:
            after_backward(buffer)
        gradients = [(n, p.main_grad if fused else p.grad) for n, p in model.named_parameters()]
        explanation = trace.explain([(f"loss {i}", loss) for i, loss in enumerate(losses)], gradients)
    assert explanation.notes == []
    return [traced.birth for traced in explanation.births if traced.birth.parent is None]


def undefined(x):
    return torch.log(x - x - 1)


def infinite(x):
    return torch.log(x - x)


def derivative(x):
    return x + torch.sqrt(x - x) * 0


def only(births):
    (birth,) = births
    return (birth.kind, birth.sighting.phase, birth.sighting.module, birth.sighting.op.split(".")[0])


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("after", CHAINS)
@pytest.mark.parametrize("before", [0, 1, 6])
@pytest.mark.parametrize("plant", [undefined, infinite])
def test_a_birth_in_forward_is_named_through_opaque_modules(plant, before, after, is_residual):
    births = births_of(chain(before, plant, after, is_residual=is_residual))
    kind = "nan" if plant is undefined else "inf"
    assert only(births) == (kind, "forward", "guilty", "aten::log")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("before", CHAINS)
@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_birth_in_backward_is_named_through_opaque_modules(before, after, fused):
    births = births_of(chain(before, derivative, after), fused=fused, microbatches=2)
    assert births
    assert {only([birth]) for birth in births} == {("nan", "backward", "guilty", "aten::div")}


@pytest.mark.parametrize("after", CHAINS)
def test_a_birth_inside_an_opaque_module_is_that_modules(after):
    model = chain(2, lambda x: x * 0 + 1, after, kinds=("linear",))
    with torch.no_grad():
        model.after[0].weight.fill_(3e38)  # finite, and too large for the kernel's sums
    assert only(births_of(model))[:3] == ("opaque", "forward", "after.0")


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_weight_of_an_opaque_module_is_named(fused):
    model = chain(1, lambda x: x, 3, kinds=("linear",))
    with torch.no_grad():
        model.after[1].weight[2, 1] = float("nan")
    (birth,) = births_of(model, fused=fused)
    assert (birth.kind, birth.sighting.parameter) == ("weight", "after.1.weight")


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_fused_weight_gradient_that_overflows_is_opaque_and_no_memory(microbatches):
    class Scaled(torch.autograd.Function):  # finite gradients, whose product with the input overflows
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1e30

    model = chain(1, lambda x: Scaled.apply(x), 0, kinds=("linear",))
    model.before.insert(0, Planted(lambda x: x * 1e15))
    with torch.no_grad():
        model.before[1].weight.mul_(1e-20)
    births = births_of(model, fused=True, microbatches=microbatches)
    assert {(b.kind, b.sighting.phase, b.sighting.module, b.sighting.parameter) for b in births} == {
        ("opaque", "backward", "before.1", "before.1.weight")
    }


def test_without_fusion_a_gradient_that_changes_after_backward_is_memory():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).sum()

    def corrupt(buffer):
        buffer.numpy()[3] = float("nan")

    (birth,) = births_of(Total(), fused=True, after_backward=corrupt)
    assert (birth.kind, birth.sighting.parameter) == ("memory", "inner.0.weight")


def test_healthy_opaque_chains_have_no_births():
    for kinds in (("linear",), ("norm",), ("attention",), tuple(OPAQUE)):
        assert births_of(chain(3, lambda x: x, 3, kinds=kinds), fused=True) == []


def test_memory_that_an_opaque_call_is_to_fill_is_no_input():
    class Filled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, out):
            out.numpy()[:] = x.detach().numpy()
            return out.view_as(out)

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    def compute(x):
        bad = undefined(x)
        out = torch.empty_like(x).detach()
        out.numpy()[:] = float("nan")  # the previous content
        return Filled.apply(bad, out)

    assert only(births_of(chain(1, compute, 1))) == ("nan", "forward", "guilty", "aten::log")


def test_in_the_first_pass_of_a_recomputed_region_kernels_have_no_frame_of_their_own():
    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=True)

    births = births_of(Recomputed(chain(1, undefined, 3)))
    assert only(births) == ("nan", "forward", "inner.guilty", "aten::log")


def test_a_bad_weight_that_a_kernel_reads_without_a_frame_is_named():
    model = chain(0, lambda x: x, 1, kinds=("linear",))
    with torch.no_grad():
        model.after[0].weight[1, 1] = float("nan")
        with _C.OperatorTrace() as trace:
            declare(trace, model)
            trace.begin_pass()
            with ModuleHooks(model):
                loss = model(torch.randn(3, WIDTH))
            (traced,) = trace.explain([("loss", loss)], []).births
    assert (traced.birth.kind, traced.birth.sighting.parameter) == ("weight", "after.0.weight")


class Spoil(torch.autograd.Function):
    """Spoils an element of the given part of a buffer without the dispatcher."""

    @staticmethod
    def forward(ctx, x, part, is_bad):
        if is_bad:
            part.numpy()[1] = math.nan
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


def birth_beside_spoil(use):
    """The only birth of ``use(x, buffer)``."""
    weight = torch.ones(4, requires_grad=True)
    with _C.OperatorTrace() as trace:
        trace.declare(weight, "parameter", "w")
        trace.begin_pass()
        loss = use(weight * 1, torch.zeros(8)).sum()
        loss.backward()
        [traced] = trace.explain([("loss", loss)], [("w", weight.grad)]).births
    return traced.birth


def test_what_a_function_made_bad_is_its_own_where_the_rest_of_the_buffer_is_written_later():
    def use(x, buffer):
        y = Spoil.apply(x, buffer[:4], True)
        buffer[4:].add_(1)
        return y + buffer[:4]

    birth = birth_beside_spoil(use)
    assert (birth.kind, birth.sighting.op) == ("opaque", "Spoil")


def test_what_a_function_never_had_in_hand_is_memory():
    def use(x, buffer):
        y = Spoil.apply(x, buffer[:4], False)
        buffer.numpy()[5] = math.nan
        return y + buffer[4:]

    assert birth_beside_spoil(use).kind == "memory"


def test_what_a_function_had_in_hand_is_no_longer_its_own_once_all_of_it_has_been_written():
    def use(x, buffer):
        y = Spoil.apply(x, buffer[:4], True)
        buffer[:2].fill_(1)
        buffer[2:4].fill_(1)
        buffer.numpy()[3] = math.nan
        return y + buffer[:4]

    assert birth_beside_spoil(use).kind == "memory"
