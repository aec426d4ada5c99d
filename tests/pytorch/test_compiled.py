"""Compiled modules: a fault is named by its operator, as in eager code; a compiler's fault is reported so."""

import ctypes
import itertools

import pytest
import torch
from torch import nn
from watched_steps import verdict_of_steps
from wrong_lowering import lowered_to_logarithm

import nanlocator
import nanlocator.calls.inductor_kernels
import nanlocator.calls.kernels

pytestmark = pytest.mark.compiles
WIDTH = 8


@pytest.fixture(autouse=True)
def nothing_was_compiled_before():
    torch._dynamo.utils.counters.clear()


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt((x - x).abs())  # its slope is infinite


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class Quotient(nn.Module):
    def forward(self, x):
        return x / (x - x).sum()


class Exponential(nn.Module):
    def forward(self, x):
        return torch.exp(x * 1000)


class Block(nn.Module):
    def __init__(self, guilty):
        super().__init__()
        self.fc1, self.guilty, self.fc2 = nn.Linear(WIDTH, WIDTH), guilty, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(self.guilty(self.fc1(x).tanh()))


def model_of(guilty):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(guilty), nn.Linear(WIDTH, 1))


def verdict_of(model, **options):
    try:
        return verdict_of_steps(model, lambda: model(torch.randn(6, WIDTH)).square().mean(), **options)
    finally:
        torch._dynamo.reset()


FAULTS = {"root": Root, "log": Log, "quotient": Quotient, "exponential": Exponential}


# A fault in forward, a fault in backward, and each way to compile.
CASES = [("log", {}), ("root", {}), ("log", {"fullgraph": True}), ("root", {"dynamic": True})]
OTHERS = [("quotient", {}), ("exponential", {}), ("root", {"fullgraph": True}), ("log", {"dynamic": True})]


@pytest.mark.parametrize(
    ("fault", "options"), CASES + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS]
)
def test_a_fault_is_named_by_its_operator_as_in_eager_code(fault, options):
    (eager,) = verdict_of(model_of(FAULTS[fault]()))["origins"]
    model = model_of(FAULTS[fault]())
    model[1].compile(**options)
    verdict = verdict_of(model)
    (compiled,) = verdict["origins"]
    for key in ("operator", "module", "cause", "detail", "phase", "code"):
        assert compiled[key] == eager[key]
    assert verdict["rerun"]["variants"][0] == {"variant": "eager", "bad": True}


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor(2.0))

    def forward(self, x):
        return torch.log(x + self.shift)


def test_a_fault_in_a_batch_of_another_length_is_named_as_in_eager_code():
    def verdict_of_lengths(model):
        lengths, updates = iter(range(3, 9)), itertools.count(1)

        def corrupt():
            if next(updates) == 4:
                model[1].guilty.shift.zero_()

        def loss():
            return model(torch.randn(next(lengths), WIDTH)).square().mean()

        try:
            return verdict_of_steps(model, loss, corrupt=corrupt, steps=6)
        finally:
            torch._dynamo.reset()

    eager = verdict_of_lengths(model_of(Shifted()))
    model = model_of(Shifted())
    model[1].compile(dynamic=True, fullgraph=True)
    compiled = verdict_of_lengths(model)
    for verdict in (eager, compiled):
        (origin,) = verdict["origins"]
        assert (verdict["iteration"], origin["operator"], origin["module"]) == (5, "aten::log", "1.guilty")
        assert origin["tensor"]["shape"] == [7, WIDTH]
    assert compiled["rerun"]["variants"][0] == {"variant": "eager", "bad": True}
    assert compiled["notes"] == []


def miscompiling(module, inputs):
    """A backend that turns large values of tanh into NaN."""
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "tanh":
            node.target = "atanh"
    module.recompile()
    return module.forward


def test_what_only_the_compiled_code_does_is_the_compilers():
    model = model_of(nn.Identity())
    with torch.no_grad():
        model[1].fc1.weight.mul_(30)
    model[1].compile(backend="aot_eager_decomp_partition")
    assert verdict_of(model) is None
    model = model_of(nn.Identity())
    with torch.no_grad():
        model[1].fc1.weight.mul_(30)
    model[1].compile(backend=miscompiling)
    verdict = verdict_of(model)
    outcomes = [tuple(each.values()) for each in verdict["rerun"]["variants"]]
    assert outcomes[:3] == [("eager", False), ("compiled", True), ("compiled", True)]
    (origin,) = verdict["origins"]
    assert origin["cause"] == "compiled_region"


@torch.library.custom_op("nanlocator_test::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


half.register_fake(torch.empty_like)
half.register_autograd(lambda ctx, gradient: gradient / 2)


class Half(nn.Module):
    def forward(self, x):
        return torch.ops.nanlocator_test.half(x)


@pytest.mark.parametrize("memory", ["as it is", "left with NaN in it"])
@pytest.mark.parametrize("kernels", ["seen", "unseen"])
def test_a_wrong_lowering_of_inductor_is_the_compilers(kernels, memory, monkeypatch):
    allocate = torch._C._dynamo.guards._empty_strided_cpu

    def with_nan(*of):
        tensor = allocate(*of)
        ctypes.memset(tensor.data_ptr(), 0xFF, tensor.untyped_storage().nbytes())
        return tensor

    if memory != "as it is":  # Inductor allocates without the dispatcher
        monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", with_nan)
        torch._inductor.codecache.FxGraphCache.clear()
        torch._inductor.codecache.PyCodeCache.cache_clear()
    is_on_cpu = torch.get_default_device().type == "cpu"
    is_seen = kernels == "seen" or not is_on_cpu  # Triton's kernels are always seen
    if kernels == "unseen":  # as if C++ called them
        monkeypatch.setattr(nanlocator.calls.inductor_kernels, "is_generated", lambda _: False)
        monkeypatch.setattr(nanlocator.calls.kernels, "_is_extension", lambda _: False)
    with lowered_to_logarithm(torch.ops.nanlocator_test.half.default):
        model = model_of(Half())
        model[1].compile()
        verdict = verdict_of(model)
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["owner"]) == ("compiled_region", "vendor")
    assert origin["module"].startswith("1")
    fused = "inductor::cpp_fused_half" if is_on_cpu else "triton::triton_poi_fused"
    assert (origin["operator"] or "").startswith(fused) is is_seen
    assert origin["place_confidence"] == ("high" if is_seen else "medium")


def test_healthy_compiled_steps_come_again_alike(capfd):
    model = model_of(nn.GELU())
    model[1].compile()
    assert verdict_of(model, rerun="always") is None
    assert "other bits" not in capfd.readouterr().err


def test_eager_execution_ends_with_the_rerun():
    model = model_of(Log())
    model[1].compile()
    assert verdict_of(model, on_bad="stop") is not None
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_what_comes_and_goes_is_not_the_compilers():
    class EverySecond(nn.Module):
        calls = 0

        @torch.compiler.disable
        def forward(self, x):
            type(self).calls += 1
            return x * (float("nan") if self.calls > 1 and self.calls % 2 == 0 else 1.0)

    model = model_of(nn.GELU())
    model[1].compile()
    verdict = verdict_of(nn.Sequential(EverySecond(), model))
    (origin,) = verdict["origins"]
    assert origin["cause"] == "unknown"


def test_eager_execution_ends_with_an_interrupt_of_the_rerun_too():
    class Interrupted(nn.Module):
        calls = 0

        @torch.compiler.disable
        def forward(self, x):
            type(self).calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return x

    model = model_of(Log())
    model[1].compile()
    with pytest.raises(KeyboardInterrupt):
        verdict_of(nn.Sequential(Interrupted(), model))
    assert torch._dynamo.eval_frame._stance.stance == "default"
