"""Kernels that PyTorch's dispatcher does not see: each planted bug by the kernel's name, line and extent."""

import ctypes
import math

import pytest
import torch
from planted_kernels import Experts, RowSums, Scaled, Silu, kernels
from torch import nn

import nanlocator
from nanlocator import _C
from nanlocator.kernels import KernelCalls

WIDTH = 9  # 54 elements in a batch of 6: a tail after the last 8


def around(guilty):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Silu(), guilty, Silu(), nn.Linear(WIDTH, 1))


@pytest.fixture
def garbage():
    """What malloc hands out holds 0x7f7f7f7f, as float32 3.4e38: finite, until something is added to it."""
    perturb = -6  # M_PERTURB of <malloc.h>
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(perturb, 0x80)
    yield
    mallopt(perturb, 0)


def free_nan():
    """What malloc hands out for the experts' gradient is NaN, as after a step that was bad."""
    spoilt = [torch.full((3 * WIDTH * WIDTH,), math.nan) for _ in range(64)]
    del spoilt


def verdict_of(model, batch=6, before=lambda: None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = nanlocator.watch(model, optimizer, **options)
    try:
        for step in range(2):
            torch.manual_seed(step)
            before()
            model(torch.randn(batch, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


WRONG = {
    "forward, one element": (Silu(forward="element"), "planted_kernels::silu", "forward", 1),
    "backward, one element": (Silu(backward="element"), "planted_kernels::silu_gradient", "backward", 1),
    "a method": (Scaled(math.inf), "planted_kernels::Workspace.scale", "forward", 54),
    "reads beyond its input": (
        RowSums("beyond", beside=math.nan),
        "planted_kernels::row_sums",
        "forward",
        6,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_kernel_that_computes_wrong_values_is_named(case):
    guilty, op, phase, bad = WRONG[case]
    (origin,) = verdict_of(around(guilty))["origins"]
    assert (origin["operator"], origin["phase"], origin["module"]) == (op, phase, "2")
    assert origin["tensor"]["nan"] + origin["tensor"]["pos_inf"] == bad
    assert origin["code"]["file"].endswith("planted_kernels.py")
    assert origin["place_confidence"] == "high"


def test_only_for_one_shape():
    assert verdict_of(around(Silu(forward="shape"))) is None
    (origin,) = verdict_of(around(Silu(forward="shape")), batch=7)["origins"]
    assert (origin["operator"], origin["tensor"]["pos_inf"]) == ("planted_kernels::silu", 1)


UNWRITTEN = {
    "the tail of an output": (Silu(forward="tail"), "planted_kernels::silu", "forward", 6),
    "the tail of a gradient": (Silu(backward="tail"), "planted_kernels::silu_gradient", "backward", 6),
}


@pytest.mark.parametrize("case", UNWRITTEN)
def test_memory_that_nobody_wrote_is_told_from_a_kernel_that_computes_wrong_values(case, garbage):
    guilty, op, phase, bad = UNWRITTEN[case]
    verdict = verdict_of(around(guilty))
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["operator"], origin["phase"]) == ("uninitialised_memory", op, phase)
    assert origin["tensor"]["nan"] == bad and origin["module"] == "2"
    assert {each["variant"]: each["bad"] for each in verdict["rerun"]["variants"]}["nan_memory"] is True


def test_the_gradient_of_an_expert_without_tokens():
    (origin,) = verdict_of(around(Experts(WIDTH, "expert")), before=free_nan)["origins"]
    assert (origin["cause"], origin["phase"]) == ("uninitialised_memory", "backward")
    assert origin["operator"] == "planted_kernels::grouped_gemm_gradient"
    assert origin["tensor"]["nan"] == WIDTH * WIDTH
    assert origin["tensor"]["extent"]["dimensions"][0] == {"first": 1, "last": 1, "count": 1}


def test_an_operator_that_reads_memory_that_nobody_wrote(garbage):
    class Padded(nn.Module):
        def forward(self, x):
            padded = x.new_empty(x.shape[0] + 2, x.shape[1])
            padded[: x.shape[0]] = x
            return padded.mean(dim=0) + x

    (origin,) = verdict_of(around(Padded()))["origins"]
    assert (origin["cause"], origin["module"]) == ("uninitialised_memory", "2")
    assert origin["operator"].startswith(("aten::mean", "aten::sum"))  # the one inside the other


@pytest.mark.parametrize("guilty", [Silu, Scaled, RowSums, lambda: Experts(WIDTH)])
def test_without_a_bug_nothing_is_found_and_every_step_comes_again_alike(guilty, garbage, capfd):
    assert verdict_of(around(guilty()), rerun="always") is None
    assert "other bits" not in capfd.readouterr().err


def test_what_was_bad_before_a_kernel_is_not_its_fault():
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x.abs() * 0 - 1)

    (origin,) = verdict_of(nn.Sequential(around(Log()), Silu(), Scaled()))["origins"]
    assert (origin["operator"], origin["module"]) == ("aten::log", "0.2")


def test_afterwards_every_binding_is_the_one_that_it_was():
    before = kernels.silu, kernels.row_sums, vars(kernels.Workspace)["scale"]
    with KernelCalls():
        assert kernels.silu is not before[0]
        with _C.OperatorTrace() as trace:
            trace.begin_pass()
            assert torch.isnan(kernels.silu(torch.ones(8), "element")[5])
    assert (kernels.silu, kernels.row_sums, vars(kernels.Workspace)["scale"]) == before
