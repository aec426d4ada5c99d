"""Faults of which the verdict accuses something that is innocent, or names nothing.

Truth is planted: each test knows the operator, the tensor or the state that makes its NaN.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import math
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_python
from torch import nn
from torch.distributions import Categorical
from torch.func import functional_call
from watched_steps import verdict_of_steps

import nanlocator


def the_origin(verdict):
    assert verdict is not None, "no verdict"
    found = [(each["cause"], each["operator"], each["module"]) for each in verdict["origins"]]
    assert len(found) == 1, found
    return verdict["origins"][0]


def verdict_of(model, loss_of, steps=2, optimizer=None, **options):
    """The verdict on the first bad step, or None; ``loss_of(step)`` computes the loss."""
    numbers = itertools.count()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    return verdict_of_steps(
        model, lambda: loss_of(next(numbers)), steps=steps, optimizer=optimizer, **options
    )


# ---- float8 payloads that are moved as bytes ---------------------------------------------------------


class LogIfBad(nn.Module):
    is_bad = False

    def forward(self, x):
        return (-x.abs() - 1 if self.is_bad else x.abs() + 1).log()


def in_place(payload):
    return torch.empty_like(payload).copy_(payload)


MOVED_BY = {
    "cat": lambda payload: torch.cat([payload, payload])[: len(payload)],
    "clone": torch.Tensor.clone,
    "copy_": in_place,
    "index_select": lambda payload: payload.index_select(0, torch.arange(len(payload))),
    "bitwise_or": lambda payload: payload.bitwise_or(0),
}


class MovedAsBytes(nn.Module):
    """As all-gathers and buffers of quantised tensors do."""

    def __init__(self, move):
        super().__init__()
        self.move = move

    def forward(self, x):
        payload = x.detach().to(torch.float8_e4m3fn).view(torch.uint8)
        moved = self.move(payload).view(torch.float8_e4m3fn).to(x.dtype)
        return moved + (x.nan_to_num() - x.nan_to_num().detach())


@pytest.mark.host
@pytest.mark.parametrize("name", MOVED_BY)
def test_a_nan_that_is_moved_as_bytes_is_the_operators_that_made_it(name):
    log = LogIfBad()
    model = nn.Sequential(nn.Linear(4, 4), log, MovedAsBytes(MOVED_BY[name]), nn.Linear(4, 1))

    def loss(step):
        log.is_bad = step == 1
        return model(torch.ones(2, 4)).square().mean()

    origin = the_origin(verdict_of(model, loss))
    assert (origin["operator"], origin["module"]) == ("aten::log", "1")


class MadeOfBytes(nn.Module):
    """Writes the code of float8's NaN, as a faulty packing of payloads would."""

    is_bad = False

    def forward(self, x):
        payload = x.detach().to(torch.float8_e4m3fn).view(torch.uint8)
        packed = payload.bitwise_or(0x7F if self.is_bad else 0)
        return x + packed.view(torch.float8_e4m3fn).to(x.dtype)


@pytest.mark.host
def test_bytes_that_an_operator_on_integers_wrote_are_no_data_and_no_kept_tensor():
    made = MadeOfBytes()
    model = nn.Sequential(nn.Linear(4, 4), made, nn.Linear(4, 1))

    def loss(step):
        made.is_bad = step == 1
        return model(torch.ones(2, 4)).square().mean()

    origin = the_origin(verdict_of(model, loss))
    assert (origin["cause"], origin["module"]) == ("unknown", "1")
    assert origin["operator"].startswith("aten::bitwise_or")


# ---- state that a re-run does not restore ------------------------------------------------------------


class OwnGenerator(nn.Module):
    """Draws a noise level of which one is 0, so that the call that draws it divides by zero."""

    LEVELS = (*(1.0,) * 15, 0.0)

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.draw = {"torch": self.by_torch, "numpy": self.by_numpy, "random": self.by_random}[kind]
        self.torch = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.random = random.Random(3)

    def by_torch(self):
        return int(torch.randint(0, 16, (), generator=self.torch, device="cpu"))

    def by_numpy(self):
        return int(self.numpy.integers(16))

    def by_random(self):
        return self.random.randrange(16)

    def forward(self, x):
        return self.linear(x) / self.LEVELS[self.draw()]


def accuses_no_machine(verdict):
    """The step was restored, or the verdict says what was not."""
    assert the_origin(verdict)["cause"] != "not_reproduced"
    assert verdict["rerun"]["reproduced"] or verdict["rerun"]["not_restored"]


@pytest.mark.parametrize("kind", ["torch", "numpy", "random"])
def test_a_generator_of_the_modules_own_accuses_no_machine(kind):
    model = OwnGenerator(kind)
    accuses_no_machine(verdict_of(model, lambda _: model(torch.ones(8, 4)).square().mean(), steps=99))


calls_of_module = 0


def counter(count=[0]):  # noqa: B006
    count[0] += 1
    return count[0]


def counter_of_closure():
    count = 0

    def next_count():
        nonlocal count
        count += 1
        return count

    return next_count


class Counts(nn.Module):
    """Counts its calls somewhere; the third divides by zero."""

    of_class = 0

    def __init__(self, where):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.where = where
        self.settings = types.SimpleNamespace(calls=0)
        type(self).of_class = 0
        counter.__defaults__[0][0] = 0
        self.count = {
            "a namespace": self.in_namespace,
            "a global": self.in_global,
            "a closure": counter_of_closure(),
            "a default": counter,
            "the class": self.in_class,
            "a file": self.in_file,
        }[where]

    def in_namespace(self):
        self.settings.calls += 1
        return self.settings.calls

    def in_global(self):
        global calls_of_module
        calls_of_module += 1
        return calls_of_module

    def in_class(self):
        Counts.of_class += 1
        return Counts.of_class

    def in_file(self):
        file = Path("calls")
        file.write_text(str(int(file.read_text()) + 1 if file.exists() else 1))
        return int(file.read_text())

    def forward(self, x):
        return self.linear(x) / (self.count() != 3)


@pytest.mark.parametrize(
    "where",
    [
        *("a namespace", "a global", "a closure", "a default", "the class", "a file"),
    ],
)
def test_a_count_of_calls_beside_the_module_accuses_no_machine(where, monkeypatch):
    monkeypatch.setitem(globals(), "calls_of_module", 0)
    model = Counts(where)
    verdict = verdict_of(model, lambda _: model(torch.ones(8, 4)).square().mean(), steps=4)
    accuses_no_machine(verdict)
    if where == "a file":
        assert verdict["rerun"]["not_restored"][0] == "files that the step writes: calls"


class LogOfLinear(nn.Module):
    def __init__(self, bias=5.0):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        nn.init.constant_(self.linear.bias, bias)

    def forward(self, x):
        return torch.log(self.linear(x))


def test_weights_that_a_functional_call_puts_in_are_those_of_the_re_run():
    model = LogOfLinear()

    def adapted(step):
        x, weights = torch.rand(8, 4), dict(model.named_parameters())
        inner = (model(x) - 1.0).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        rate = 500.0 if step == 1 else 0.1  # then the logarithm is of negative numbers
        fast = {name: p - rate * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        return (functional_call(model, fast, (x,)) - 1.0).square().mean()

    origin = the_origin(verdict_of(model, adapted))
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")


def test_a_healthy_loop_whose_first_call_is_functional_is_not_ended():
    model = nn.Linear(4, 1)

    def loss_of(_):
        fast = {name: p * 1.0 for name, p in model.named_parameters()}
        return functional_call(model, fast, (torch.randn(8, 4),)).square().mean()

    assert verdict_of(model, loss_of) is None


# ---- ordinary operators ------------------------------------------------------------------------------


class AfterLog(nn.Module):
    """What follows is given a NaN, born in the logarithm of a negative number."""

    def __init__(self, following):
        super().__init__()
        self.linear, self.following = nn.Linear(16, 16), following

    def forward(self, x):
        return self.following(torch.log(self.linear(x)))


def image(x):
    return x.reshape(4, 2, 8, 8)


def gathered(x, kind):
    return x.to(kind).gather(-1, torch.zeros(4, 8, 1, dtype=torch.long))


def stft(x):
    return torch.stft(x.flatten(1), 32, 16, window=torch.ones(32), return_complex=True).abs()


def scatter_reduce(x):
    index = torch.arange(16).expand(4, 8, 16) % 4
    return torch.zeros(4, 8, 4).scatter_reduce(-1, index, x, "mean", include_self=False)


FOLLOWING = {
    "mse_loss": (lambda x: F.mse_loss(x, torch.zeros_like(x)), ()),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)), ()),
    "scatter_reduce": (scatter_reduce, ()),
    "huber_loss": (lambda x: F.huber_loss(x, torch.zeros_like(x)), ()),
    "matrix_exp": (lambda x: torch.matrix_exp(0.01 * x[:, :, :8]), ()),
    "conv_transpose": (lambda x: F.conv_transpose2d(image(x), torch.ones(2, 4, 3, 3), stride=2), ()),
    "conv_transpose3d": (
        lambda x: F.conv_transpose3d(x.reshape(4, 2, 4, 4, 4), torch.ones(2, 3, 2, 2, 2)),
        (),
    ),
    "rfft": (lambda x: torch.fft.rfft(x).abs(), ()),
    "stft": (stft, ()),
    "interpolate": (lambda x: F.interpolate(image(x), scale_factor=2, mode="bilinear"), ()),
    "gather in bfloat16": (functools.partial(gathered, kind=torch.bfloat16), ()),
    "gather in float16": (functools.partial(gathered, kind=torch.float16), ()),
}


@contextlib.contextmanager
def fresh_memory_filled_with(byte):
    perturb = ctypes.CDLL(None).mallopt
    perturb(-6, 256 + 255 - byte)  # M_PERTURB of malloc.h: fresh memory gets the complement of the last byte
    try:
        yield
    finally:
        perturb(-6, 0)


@pytest.fixture
def fresh_memory_is_nan():
    """Else it depends on what lay there whether an operator's own memory is taken for data."""
    with fresh_memory_filled_with(0xFF):
        yield


@pytest.mark.in_turn(3)
@pytest.mark.host
@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (_, marks) in FOLLOWING.items()])
def test_an_operator_that_is_given_a_nan_is_no_origin_beside_its_birth(name):
    for _ in range(4):
        model = AfterLog(FOLLOWING[name][0])
        origin = the_origin(verdict_of(model, lambda _, of=model: of(torch.randn(4, 8, 16)).float().sum()))
        assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")


class Pads(nn.Module):
    def forward(self, x):
        out = torch.empty(4, 24, 8)
        out[:, :16] = x
        return out


@pytest.mark.host
def test_an_overflow_of_finite_values_that_nobody_wrote_is_of_the_memory(capfd):
    model = nn.Sequential(nn.Linear(8, 8), Pads(), nn.LayerNorm(8), nn.Linear(8, 1))
    with fresh_memory_filled_with(0x7B):  # 1.3e36, of which layer_norm makes NaN and no Inf
        origin = the_origin(verdict_of(model, lambda _: model(torch.randn(4, 16, 8)).square().mean()))
    assert (origin["cause"], origin["phase"]) == ("uninitialised_memory", "forward")
    said = " ".join(capfd.readouterr().err.split())
    assert "allocated at" in said and "in Pads.forward: out = torch.empty(4, 24, 8)" in said


def test_a_transposed_convolution_that_overflows_is_the_origin():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ConvTranspose2d(2, 4, 3, stride=2))
    nn.init.constant_(model[1].weight, 3e38)
    origin = the_origin(verdict_of(model, lambda _: model(torch.full((1, 2, 8, 8), 10.0)).sum()))
    assert (origin["phase"], origin["module"], origin["cause"]) == ("forward", "1", "operator_overflow")


def test_a_convolution_that_is_given_a_nan_gradient_is_no_origin_beside_its_birth():
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)),
    )

    def loss_of(_):
        x = torch.rand(16, 1, 16, 16)
        p, q = F.normalize(model(x), dim=-1), F.normalize(model(x.clone()), dim=-1)
        return torch.acos((p * q).sum(-1).clamp(-1, 1)).sum()

    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["phase"], origin["forward_operator"]) == ("backward", "aten::acos")


class SpoilsItsGradient(torch.autograd.Function):
    """Writes a NaN without the dispatcher into the gradient that it returns."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        ctypes.c_float.from_address(gradient.data_ptr()).value = math.nan
        return gradient


class Spoiling(nn.Module):
    def forward(self, x):
        return SpoilsItsGradient.apply(x)


@pytest.mark.host
@pytest.mark.parametrize("place", ["in a module", "in the loss"])
def test_a_gradient_that_a_function_spoils_is_not_of_the_module_that_reads_it(place):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    spoiling = Spoiling() if place == "in a module" else SpoilsItsGradient.apply
    origin = the_origin(verdict_of(model, lambda _: spoiling(model(torch.ones(2, 4))).square().mean()))
    assert (origin["phase"], origin["operator"]) == ("backward", "SpoilsItsGradientBackward")
    assert origin["forward_operator"] == "SpoilsItsGradient" and origin["module"] in (None, "Spoiling")


class SpoilsOneOfTwo(torch.autograd.Function):
    """Multiplies; in backward an operator writes both gradients, and other code a NaN into one of them."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        both = torch.stack((gradient * y, gradient * x))
        ctypes.c_float.from_address(both[1].data_ptr()).value = math.nan
        return both[0], both[1]


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(SpoilsOneOfTwo.apply(self.left(x).sigmoid(), self.right(x).sigmoid()))


@pytest.mark.host
def test_one_of_several_gradients_that_a_function_spoils_is_its_own():
    model = TwoBranches()
    origin = the_origin(verdict_of(model, lambda _: model(torch.ones(2, 4)).square().mean()))
    assert (origin["operator"], origin["module"]) == ("SpoilsOneOfTwoBackward", "TwoBranches")
    assert origin["cause"] != "memory_corruption"


# ---- kinds of causes ---------------------------------------------------------------------------------

POLES = {
    "atanh": (torch.atanh, 1.0),
    "log1p": (torch.log1p, -1.0),
    "logit": (torch.logit, 1.0),
    "erfinv": (torch.erfinv, 1.0),
    "digamma": (torch.digamma, -2.0),
}


@pytest.mark.parametrize("name", POLES)
def test_a_pole_is_no_overflow(name):
    function, pole = POLES[name]
    model = nn.Linear(4, 2)
    constant = torch.tensor([[0.3, pole]])
    loss_of = lambda _: function(constant * (1 + 0 * model(torch.ones(1, 4)))).sum()  # noqa: E731
    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["operator"], origin["cause"]) == (f"aten::{name}", "operator_undefined")


def test_a_ctc_loss_without_an_alignment_is_no_overflow():
    model = nn.Linear(4, 5)

    def loss_of(_):
        scores = model(torch.randn(4, 1, 4)).log_softmax(-1)
        return F.ctc_loss(scores, torch.tensor([[1, 2, 3, 1, 2, 3]]), torch.tensor([4]), torch.tensor([6]))

    verdict = verdict_of(model, loss_of)
    assert verdict["rerun"]["reproduced"] is True
    assert the_origin(verdict)["cause"] == "operator_undefined"


def test_a_ctc_loss_of_labels_that_repeat_too_often_is_no_overflow():
    model = nn.Linear(4, 300)

    def loss_of(_):
        scores = model(torch.randn(40, 3, 4)).log_softmax(-1)
        labels = torch.tensor([[7] * 30, [7, 8] * 15, [7] * 30])  # a blank between equal labels
        lengths = torch.full((3,), 40), torch.tensor([20, 30, 30])
        return F.ctc_loss(scores, labels, *lengths, blank=299)

    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["operator"], origin["cause"]) == ("aten::_ctc_loss", "operator_undefined")


EMPTY = {
    "mean": lambda y: y.mean(),
    "smooth_l1_loss": lambda y: F.smooth_l1_loss(y, y.detach() + 1),
    "huber_loss": lambda y: F.huber_loss(y, y.detach() + 1),
    "mse_loss": lambda y: F.mse_loss(y, y.detach() + 1),
    "binary_cross_entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), torch.ones_like(y)),
}


@pytest.mark.host
@pytest.mark.parametrize("name", EMPTY)
def test_a_mean_of_nothing_is_the_users_operator_and_no_division(name, capfd):
    class Head(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.square().mean() + EMPTY[name](y[y > 1e3])  # no box is near enough

    model = Head(4, 2)
    origin = the_origin(verdict_of(model, lambda _: model(torch.ones(3, 4))))
    assert origin["operator"].split(".")[0] == f"aten::{name}"
    assert origin["detail"] == "mean_of_nothing"
    assert "it was given 0 elements" in capfd.readouterr().err


ZERO_ROWS = {
    "_fused_rms_norm": lambda y: F.rms_norm(y, (4,), eps=0.0),
    "_weight_norm_interface": lambda y: torch._weight_norm(y, torch.ones(3, 1), 0),
}


@pytest.mark.host
@pytest.mark.parametrize("name", ZERO_ROWS)
def test_a_norm_of_zeros_divides_by_zero_within_one_operator(name):
    model = nn.Linear(4, 4)
    origin = the_origin(verdict_of(model, lambda _: ZERO_ROWS[name](model(torch.ones(3, 4)) * 0).sum()))
    assert (origin["operator"], origin["detail"]) == (f"aten::{name}", "zero_over_zero")


def test_a_determinant_of_zero_is_the_origin_of_its_logarithm():
    model = nn.Linear(4, 4)
    origin = the_origin(verdict_of(model, lambda _: torch.logdet(model(torch.eye(4)) * 0)))
    assert (origin["operator"], origin["detail"]) == ("aten::_linalg_slogdet", "log_of_zero")


def test_a_product_of_ordinary_numbers_overflows():
    model = nn.Linear(4, 1)
    origin = the_origin(verdict_of(model, lambda _: (50 + model(torch.zeros(400, 4))).prod()))
    assert (origin["operator"], origin["cause"]) == ("aten::prod", "operator_overflow")


def generalised_intersection_over_union(model, _):
    """One of four boxes is degenerate, and so is its target: 0/0."""
    target = torch.tensor([[0.0, 0, 1, 1], [0, 0, 2, 2], [1, 1, 1, 1], [0, 0, 1, 2]])
    size = model(torch.randn(4, 4)).sigmoid()[:, :2] * (torch.arange(4) != 2)[:, None]
    boxes = torch.cat((target[:, :2], target[:, :2] + size), -1)
    low, high = torch.max(boxes[:, :2], target[:, :2]), torch.min(boxes[:, 2:], target[:, 2:])
    intersection = (high - low).clamp(min=0).prod(-1)
    areas = [(each[:, 2:] - each[:, :2]).prod(-1) for each in (boxes, target)]
    return (1 - intersection / (areas[0] + areas[1] - intersection)).mean()


def relative_error(model, _):
    size = torch.tensor([1.0, 2, 3, 0, 1, 1, 1, 1])
    return (model(torch.randn(8, 4)).square().sum(-1) * size / size).mean()


@pytest.mark.parametrize("loss", [generalised_intersection_over_union, relative_error])
def test_zero_over_zero_in_one_element_of_a_loss_is_no_empty_mask(loss):
    model = nn.Linear(4, 4)
    origin = the_origin(verdict_of(model, functools.partial(loss, model)))
    assert (origin["phase"], origin["operator"]) == ("loss", "aten::div.Tensor")
    assert (origin["cause"], origin["detail"]) == ("operator_undefined", "zero_over_zero")


def mean_over_mask(model):
    mask = torch.zeros(8)
    return (model(torch.randn(8, 4)).square().mean(-1) * mask).sum() / mask.sum()


def cross_entropy_of_nothing(model):
    return F.cross_entropy(model(torch.randn(8, 4)), torch.full((8,), -100))


@pytest.mark.parametrize("loss", [mean_over_mask, cross_entropy_of_nothing])
def test_a_mean_over_no_label_is_an_empty_mask(loss):
    model = nn.Linear(4, 4)
    origin = the_origin(verdict_of(model, lambda _: loss(model)))
    assert (origin["phase"], origin["cause"]) == ("loss", "empty_loss_mask")


class Rotary(nn.Module):
    """Keeps its angles, of which a base of 0 makes NaN, in one of several ways."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), kept
        self.cached = functools.lru_cache(self.angles)
        if kept == "attribute":
            self.table = self.angles(8)
        if kept == "buffer":
            self.register_buffer("table", self.angles(8), persistent=False)
        if kept == "a cache that is filled":
            self.cached(8)

    @staticmethod
    def angles(length):
        frequencies = 1 / 0.0 ** (torch.arange(4) / 4)
        return torch.outer(torch.arange(length), frequencies).cos()

    def forward(self, x):
        return self.linear(x) * (self.table if self.kept in ("attribute", "buffer") else self.cached(8))


@pytest.mark.parametrize(
    "kept",
    [
        "attribute",
        "buffer",
        "a cache that is filled",
        "a cache",
    ],
)
def test_a_tensor_that_a_module_keeps_is_no_data(kept):
    model = Rotary(kept)
    origin = the_origin(verdict_of(model, lambda _: model(torch.randn(2, 8, 4)).square().mean()))
    assert (origin["cause"], origin["owner"]) == ("bad_buffer", "model_author")


# ---- one fault, several origins ----------------------------------------------------------------------


def test_a_derivative_of_what_was_bad_is_no_origin():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.bias, -1.0)

    def loss_of(_):
        x = torch.rand(8, 2, requires_grad=True)
        u = model(x) ** 1.2
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (u + slope.sum(-1, keepdim=True)).mean()

    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["phase"], origin["operator"]) == ("loss", "aten::pow.Tensor_Scalar")


def test_second_derivatives_of_what_was_bad_are_no_origins():
    model = nn.Sequential(nn.Linear(2, 1), nn.Softplus())

    def loss_of(step):
        x = torch.rand(8, 2, requires_grad=True)
        u = torch.acos(model(x) - 0.7 + 5 * step)  # outside of its domain in the second step
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (u + slope.sum(-1, keepdim=True) + bend.sum(-1, keepdim=True)).mean()

    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["phase"], origin["operator"]) == ("loss", "aten::acos")


def test_a_slope_that_is_bad_where_the_loss_is_not_is_an_origin():
    model = nn.Linear(2, 1)

    def loss_of(_):
        h = model(torch.zeros(8, 2)) * 0
        return torch.where(h > 0, torch.log(h), h).mean()

    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["phase"], origin["forward_operator"]) == ("backward", "aten::log")


def test_buffers_that_the_same_step_made_bad_are_no_origins():
    model = nn.Sequential(
        *(nn.Linear(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
    )

    def loss_of(_):
        one, other = (model(torch.randn(16, 4)) for _ in range(2))
        return (one - other).abs().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e25)
    verdict = verdict_of(model, loss_of, steps=4, optimizer=optimizer)
    assert verdict is not None
    assert [each["parameter"] for each in verdict["origins"] if each["cause"] == "bad_buffer"] == []


def test_an_update_with_a_bad_learning_rate_is_one_origin():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=math.nan)
    verdict = verdict_of(
        model, lambda _: model(torch.randn(8, 4)).square().mean(), optimizer=optimizer, check_params=True
    )
    assert the_origin(verdict)["cause"] == "optimizer_update"


def test_a_group_with_a_bad_weight_decay_is_one_origin_and_names_no_weight_of_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    groups = [
        {"params": model[1].parameters(), "weight_decay": math.inf},
        {"params": [*model[0].parameters(), *model[2].parameters()]},
    ]
    verdict = verdict_of(
        model,
        lambda _: model(torch.randn(8, 4)).square().mean(),
        optimizer=torch.optim.AdamW(groups),
        check_params=True,
    )
    origin = the_origin(verdict)
    (others,) = (fact["names"] for fact in origin["facts"] if fact["kind"] == "further_weights_bad")
    assert origin["cause"] == "optimizer_update"
    assert {origin["parameter"], *others} == {"1.weight", "1.bias"}


# ---- what happened before, or is never looked at -----------------------------------------------------


def test_an_epsilon_that_is_zero_in_the_weights_dtype_is_named_and_no_restart_is_advised():
    embedding = nn.Embedding(10, 4).half()
    optimizer = torch.optim.Adam(embedding.parameters(), lr=1e-3)
    verdict = verdict_of(
        embedding,
        lambda step: embedding(torch.tensor([1, 2 + step])).float().square().mean(),
        optimizer=optimizer,
    )
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART"
    assert "checkpoint" not in the_origin(verdict)["alternatives"]
    assert any("epsilon is 0 in float16" in each for each in the_origin(verdict)["evidence"])


def test_a_learning_rate_that_stays_nan_is_named():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["lr"] = math.nan
    verdict = verdict_of(model, lambda _: model(torch.ones(2, 4)).square().mean(), optimizer=optimizer)
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART"
    assert any("learning rate was NaN" in each for each in the_origin(verdict)["evidence"])


def test_the_learning_rate_is_a_suspect_where_the_weights_have_grown(capfd):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=3e3)
    verdict = verdict_of(
        model, lambda _: model(torch.randn(16, 8)).square().mean(), steps=60, optimizer=optimizer
    )
    (rate,) = (fact for fact in the_origin(verdict)["facts"] if fact["kind"] == "learning_rate")
    assert rate["value"] == 3e3
    said = " ".join(capfd.readouterr().err.split())
    assert "cause: learning rate or code, open" in said
    assert "if the learning rate (3e+03 now) is larger than intended" in said


def test_the_learning_rate_is_no_suspect_of_an_overflow_among_usual_weights(capfd):
    model = nn.Linear(4, 1)
    verdict = verdict_of(model, lambda step: torch.exp(model(torch.ones(2, 4)) + 100.0 * step).mean())
    assert the_origin(verdict)["operator"] == "aten::exp"
    said = " ".join(capfd.readouterr().err.split())
    assert "cause: code, likely" in said and "learning rate" not in said
    assert "clamp them below 88.7" in said


def test_a_learning_rate_that_was_infinite_for_one_update_is_named():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.inf if step == 1 else 1.0)

    def loss_of(step):
        if step:
            schedule.step()
        return model(torch.ones(2, 4)).square().mean()

    verdict = verdict_of(model, loss_of, steps=4, optimizer=optimizer)
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART"
    assert verdict["narrative"]["code"] == "bad_update"


@pytest.mark.parametrize("decay", [0.5, math.nan], ids=["healthy", "spoilt"])
def test_weights_that_the_program_itself_has_written_are_told_with_its_line(decay):
    model = nn.Linear(4, 1)
    average = {name: weight.clone() for name, weight in model.state_dict().items()}

    def loss_of(step):
        for name, weight in model.state_dict().items():
            average[name] = decay * average[name] + (1 - decay) * weight
        if step == 2:
            model.load_state_dict(average)  # here
        return model(torch.ones(2, 4)).square().mean()

    verdict = verdict_of(model, loss_of, steps=4)
    if decay == 0.5:
        assert verdict is None
        return
    origin = the_origin(verdict)
    assert (origin["cause"], origin["detail"]) == ("bad_weight", "made_earlier")
    assert origin["code"]["text"].endswith("# here")
    assert (origin["alternatives"], verdict["narrative"]["code"]) == ([], "written_weight")


def test_a_weight_that_an_update_has_written_since_is_none_of_the_programs():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(step):
        with torch.no_grad():
            model.weight.copy_(torch.ones(1, 4))
        if step == 1:
            optimizer.param_groups[0]["weight_decay"] = math.inf
        return model(torch.ones(2, 4)).square().mean() + (step == 2) * model.bias.sum()

    verdict = verdict_of(model, loss_of, steps=4, optimizer=optimizer)
    assert the_origin(verdict)["parameter"] == "bias"
    assert the_origin(verdict)["detail"] is None


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        weights = logits.softmax(-1)
        ctx.save_for_backward(weights, logits)
        return -(weights * logits).sum(-1)

    @staticmethod
    def backward(ctx, gradient):
        weights, logits = ctx.saved_tensors
        return -gradient.unsqueeze(-1) * weights * logits


def test_an_infinity_that_was_put_there_is_no_fault_of_the_function_that_is_given_it():
    model = nn.Linear(4, 6)
    mask = torch.arange(6) >= 5
    verdict = verdict_of(
        model, lambda _: Masked.apply(model(torch.ones(2, 4)).masked_fill(mask, -math.inf)).mean()
    )
    origin = the_origin(verdict)
    assert origin["detail"] == "from_infinity"
    assert verdict["narrative"]["code"] == "inf_operand"
    assert "finite inputs" not in " ".join(origin["evidence"])


def test_a_weight_that_was_never_right_is_not_laid_to_an_update():
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, math.nan)
    origin = the_origin(verdict_of(model, lambda _: model(torch.ones(2, 4)).square().mean()))
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "weight")
    assert "last_update" not in origin["alternatives"]


def verdicts_of_clip(scale, norm_type=2.0, further=()):
    """The gradients of the model's 64 weights and 8 biases are all ``scale``."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    (model(torch.ones(1, 8)) * scale).sum().backward()
    norm = nn.utils.clip_grad_norm_([*model.parameters(), *further], 1.0, norm_type)
    optimizer.step()
    watch.remove()
    assert not norm.isfinite()
    return watch.verdicts


@pytest.mark.parametrize("scale", [1e20, 1e19], ids=["a square overflows", "their sum overflows"])
def test_a_norm_that_is_not_finite_though_every_gradient_is_is_found(scale):
    (verdict,) = verdicts_of_clip(scale)
    origin = the_origin(verdict)
    assert (origin["phase"], origin["operator"], origin["cause"]) == ("grad_norm", None, "unknown")
    assert {fact["kind"] for fact in origin["facts"]} == {"norm_bad", "norm_overflows", "learning_rate"}


def test_a_norm_that_something_else_makes_bad_is_not_laid_to_the_watched_gradients():
    strange = nn.Parameter(torch.ones(2))
    strange.grad = torch.full((2,), math.nan)
    assert verdicts_of_clip(1.0, further=[strange]) == []


def test_gradients_that_a_caught_error_left_behind_are_no_data_of_the_next_step():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = nanlocator.watch(model, optimizer)
    verdicts = []
    for step in range(5):
        try:
            loss = model(torch.randn(4, 8)).square().mean()
            (torch.log(loss * 0) if step == 1 else loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        except nanlocator.NonFiniteGradientError as error:
            verdicts.append(error.verdict)
    watch.remove()
    assert the_origin(verdicts[0])["operator"] == "aten::log"
    assert [the_origin(each)["cause"] for each in verdicts[1:]] == ["left_gradients"] * 3
    assert all("step 2" in the_origin(each)["evidence"][0] for each in verdicts[1:])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return Categorical(logits=self.linear(x))


@pytest.mark.filterwarnings("ignore:std")
def test_the_step_of_a_module_that_returns_a_distribution_is_executed_again():
    policy = Policy()

    def loss_of(_):
        reward = torch.tensor([1.0])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        return -(policy(torch.randn(1, 4)).log_prob(torch.tensor([1])) * advantage).mean()

    verdict = verdict_of(policy, loss_of)
    assert verdict["rerun"]["done"]
    assert the_origin(verdict)["operator"].startswith("aten::std")


class Encoder(nn.Module):
    """Returns its results in an object of the program's own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mean, spread = self.linear(x).chunk(2, -1)
        return types.SimpleNamespace(mean=mean, others=[{"spread": spread}])


def test_results_in_objects_of_the_program_are_followed():
    model = Encoder()

    def loss_of(step):
        found = model(torch.randn(8, 4))
        return (found.mean.square() / (found.others[0]["spread"] * (step == 0))).mean()

    verdict = verdict_of(model, loss_of)
    assert verdict["rerun"]["reproduced"]
    assert the_origin(verdict)["operator"] == "aten::div.Tensor"


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("basis", torch.rand(8, 8))

    def forward(self, x):
        return torch.log(x @ self.basis)


def test_a_child_without_parameters_that_the_loop_calls_itself_keeps_its_name():
    model = nn.ModuleDict({"mel": LogMel(), "net": nn.Linear(8, 8)})

    def loss_of(step):
        mel = model["mel"](torch.rand(2, 8) * (step == 0))
        return (model["net"](mel) - mel).abs().mean()

    origin = the_origin(verdict_of(model, loss_of))
    assert (origin["operator"], origin["module"]) == ("aten::log", "mel")


def test_a_child_without_parameters_is_named_after_the_model_that_holds_it():
    front = nn.ModuleDict({"features": nn.ModuleList([nn.Identity(), LogMel()])})
    models = {"front": front, "net": nn.Linear(8, 8)}
    optimizer = torch.optim.SGD(models["net"].parameters(), lr=0.01)

    def loss_of(step):
        return models["net"](front["features"][1](torch.rand(2, 8) * (step == 0))).abs().mean()

    origin = the_origin(verdict_of(models, loss_of, optimizer=optimizer))
    assert (origin["operator"], origin["module"]) == ("aten::log", "front.features.1")


# ---- between backward and update ---------------------------------------------------------------------


def verdict_of_closure(change, backwards=1):
    """``change(model)`` runs between the second step's backward and a clip in the same closure."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, steps = nanlocator.watch(model, optimizer), []

    def closure():
        optimizer.zero_grad()
        for _ in range(backwards):
            loss = model(torch.ones(2, 4)).mean()
            loss.backward()
        steps.append(loss)
        if len(steps) == 2:
            change(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    try:
        for _ in range(3):
            optimizer.step(closure)
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


@pytest.mark.parametrize("backwards", [1, 2])
def test_an_operator_on_gradients_is_neither_of_the_loss_nor_of_forward(backwards):
    origin = the_origin(verdict_of_closure(lambda model: model.weight.grad.div_(0.0), backwards))
    assert (origin["operator"], origin["phase"]) == ("aten::div_.Tensor", "grad_norm")


def replace_gradient(model):
    model.weight.grad = model.weight.grad * math.nan


def write_to_an_element(model):
    model.weight.grad[0, 0] = math.nan


def write_to_data(model):
    model.weight.grad.data[0] = math.nan


@pytest.mark.parametrize("change", [replace_gradient, write_to_an_element, write_to_data])
def test_a_gradient_that_the_program_itself_makes_bad_accuses_no_machine(change):
    origin = the_origin(verdict_of_closure(change))
    assert (origin["parameter"], origin["phase"]) == ("weight", "grad_norm")
    assert (origin["cause"], origin["owner"]) == ("bad_scalar", "model_author")
    assert change.__name__ in origin["code"]["function"]


def test_a_clip_of_values_by_nan_is_one_origin():
    verdict = verdict_of_closure(lambda model: nn.utils.clip_grad_value_(model.parameters(), math.nan))
    assert the_origin(verdict)["cause"] == "bad_scalar"


# ---- unedited scripts --------------------------------------------------------------------------------

SCRIPT = """
import torch
torch.manual_seed(0)
{model}
for step in range(4):
    x = torch.randn(8, 4)
    if step == 2:
        x[0, 0] = float("nan")
    loss = {output}.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOOPS = {
    "forward as a function": (
        "model = torch.nn.Linear(4, 2); optimizer = torch.optim.Adam(model.parameters())",
        "model.forward(x)",
    ),
    "parameters in a list": (
        "weights = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]; "
        "optimizer = torch.optim.Adam(weights); strange = torch.ones(2, requires_grad=True)",
        "(strange.square().sum().backward(), torch.linalg.multi_dot([x, *weights]))[1]",
    ),
    "a bare parameter": (
        "weight = torch.nn.Parameter(torch.randn(4, 2)); optimizer = torch.optim.SGD([weight], lr=0.01)",
        "(x @ weight)",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_optimizer_whose_module_is_never_called_is_watched(name):
    model, output = LOOPS[name]
    Path("train.py").write_text(SCRIPT.format(model=model, output=output))
    run_python("-m", "nanlocator", "train.py")
    verdicts = [json.loads(path.read_text()) for path in Path().glob("nanlocator_run/*/verdict.json")]
    assert [verdict["iteration"] for verdict in verdicts] == [3]


def test_a_script_finds_its_own_file_after_it_has_changed_the_folder():
    Path("train.py").write_text(
        "import os\nfrom pathlib import Path\nos.chdir('/')\nassert Path(__file__).resolve().exists()\n"
    )
    assert run_python("-m", "nanlocator", "train.py").returncode == 0
