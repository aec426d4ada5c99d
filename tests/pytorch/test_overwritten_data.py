"""Loops that load the next batch into this batch's memory before the bad step is re-run."""

import collections
import dataclasses
import itertools
import math
import queue
import threading
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from watched_steps import Raises, verdict_of_loop

import nanlocator

READ = {
    "itself": lambda buffer: buffer,
    "copy": lambda buffer: buffer.clone(),
    "scaled": lambda buffer: buffer / 255,
    "chain": lambda buffer: (buffer.double() * 2).float(),
    "view": lambda buffer: buffer.view(4, 8).view(8, 4),
    "slice": lambda buffer: buffer[:6, 1:],
    "scaled slice": lambda buffer: buffer[:, 1:] * 2,
    "expanded": lambda buffer: buffer[:, 1:2].expand(-1, 4),
    "transposed": lambda buffer: buffer[:4].t(),
    "detached": lambda buffer: buffer.detach(),
    "data": lambda buffer: buffer.data,
    "rows": lambda buffer: torch.stack(list(buffer)),
}


def overwrite(buffer):
    buffer.copy_(torch.randn_like(buffer))


def overwrite_without_a_version(buffer):
    buffer.data.copy_(torch.randn_like(buffer))


def overwrite_by_numpy(buffer):
    buffer.numpy()[:] = np.random.randn(*buffer.shape)


# Autograd itself refuses to overwrite tensors that its backward still needs.
WHEN = {
    "after backward": ("late", overwrite),
    "before backward, unseen by autograd": ("early", overwrite_without_a_version),
    "by numpy": ("early", overwrite_by_numpy),
}
EACH_TIME = [pytest.param(when, marks=[pytest.mark.host] * (when == "by numpy")) for when in WHEN]


def model_of(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))


def train(read, time, overwrite, spoil, *, steps=5):
    buffer = torch.randn(8, 4)
    model = model_of(read(buffer).shape[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        for step in range(steps):
            if step == 3:
                spoil(buffer)
            loss = model(read(buffer)).square().mean()
            if time == "early":
                overwrite(buffer)
            loss.backward()
            if time == "late":
                overwrite(buffer)
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


def spoil(buffer):
    buffer[2, 1] = math.nan


def marked(how, when):
    """Each way to read runs with a write that autograd does not see; the other writes, with one way that
    copies and one that does not."""
    marks = [pytest.mark.host] if when == "by numpy" else []
    if when != "before backward, unseen by autograd" and how not in ("itself", "scaled"):
        marks.append(pytest.mark.exhaustive)
    return pytest.param(how, when, marks=marks)


@pytest.mark.parametrize(("how", "when"), itertools.starmap(marked, itertools.product(READ, WHEN)))
def test_a_bad_batch_whose_memory_holds_the_next_one_is_bad_data(how, when):
    verdict = train(READ[how], *WHEN[when], spoil)
    [origin] = verdict["origins"]
    # By numpy, another thread may have written it. Of "chain" the recorder knows the converted copy only.
    is_seen = when != "by numpy" or how == "chain"
    assert (origin["cause"], origin["cause_confidence"]) == ("bad_input", "high" if is_seen else "low")
    assert origin["detail"] == (None if is_seen else "rewritten")
    assert verdict["rerun"]["reproduced"] is True
    assert verdict["rerun"]["not_restored"] == []


@pytest.mark.host
@pytest.mark.parametrize("fill", [torch.Tensor.copy_, overwrite_by_numpy], ids=["torch", "numpy"])
def test_a_buffer_that_a_loader_fills_too_late_skips_no_batch(fill):
    """Read as it is, its batch would be told as bad data, though a restart reads it filled."""
    model, buffer = model_of(4), torch.zeros(8, 4)
    read, filled = threading.Event(), threading.Event()

    def load():
        buffer.fill_(math.nan)
        filled.set()
        read.wait()
        fill(buffer, *([torch.ones(8, 4)] if fill is torch.Tensor.copy_ else []))

    def compute(step):
        if step < 3:
            return model(torch.randn(8, 4)).square().mean().backward()
        loader = threading.Thread(target=load)
        loader.start()
        filled.wait()
        loss = model(buffer.clone()).square().mean()
        read.set()
        loader.join()
        return loss.backward()

    verdict = verdict_of_loop(model, compute, 4)
    [origin] = verdict["origins"]
    assert (origin["detail"], origin["alternatives"]) == ("rewritten", ["race"])
    assert verdict["decision"]["kind"] == "RESTART_AS_IS"


@pytest.mark.parametrize("when", EACH_TIME)
def test_an_operator_on_data_outside_of_the_model_is_named_with_its_line(when):
    def read(buffer):
        return torch.log(buffer.abs())  # here

    def make_zero(buffer):
        buffer[2, 1] = 0.0

    verdict = train(read, *WHEN[when], make_zero)
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")
    assert origin["code"]["text"].endswith("# here")


def test_the_microbatches_of_a_step_may_share_their_memory():
    torch.manual_seed(0)
    model, buffer = model_of(4), torch.empty(8, 4)

    def compute(step):
        for microbatch in range(3):
            buffer.data.copy_(torch.randn(8, 4))
            if (step, microbatch) == (1, 1):
                spoil(buffer)
            model(buffer / 2).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 3)
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["microbatch"]) == ("bad_input", 1)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor


class Packed(NamedTuple):
    x: torch.Tensor


class PlainBatch:
    def __init__(self, x):
        self.parts = {"x": [x]}

    @property
    def x(self):
        return self.parts["x"][0]


class Items(dict):
    x = property(lambda self: self["x"])

    def __setitem__(self, name, value):
        assert isinstance(value, torch.Tensor)
        super().__setitem__(name, value)


class Slotted:
    __slots__ = ("lock", "x")

    def __init__(self, x):
        self.x, self.lock = x, threading.Lock()


class CopiesToItself(PlainBatch):
    def __copy__(self):
        return self


class Validated(NamedTuple("Validated", [("x", torch.Tensor)])):
    def __new__(cls, x):
        assert isinstance(x, torch.Tensor)
        return super().__new__(cls, x)


@dataclasses.dataclass
class WithMore:
    number: int

    @classmethod
    def of(cls, x):
        batch = cls(1)
        batch.x = x
        return batch


class OfBatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model_of(4)

    def forward(self, batch):
        return self.layers(batch.x)


def verdict_of_batches(make, encoder=None):
    torch.manual_seed(0)
    model, buffer = OfBatches(), torch.randn(8, 4)
    models = [model] if encoder is None else [model, encoder]

    def compute(step):
        if step == 1:
            spoil(buffer)
        x = buffer if encoder is None else encoder(buffer)
        model(make(x)).square().mean().backward()
        overwrite_without_a_version(buffer)

    return verdict_of_loop(models, compute, 3)


@pytest.mark.parametrize("kind", [Batch, Packed, Validated, WithMore.of])
@pytest.mark.parametrize("encoder", [None, lambda: nn.Linear(4, 4)])
def test_the_data_may_be_in_an_object(kind, encoder):
    verdict = verdict_of_batches(kind, encoder and encoder())
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["cause_confidence"]) == ("bad_input", "high")
    assert verdict["rerun"]["not_restored"] == []


@pytest.mark.parametrize("kind", [PlainBatch, lambda x: Items(x=x), Slotted, CopiesToItself])
def test_an_object_that_is_not_copied_is_looked_at_and_accuses_no_machine(kind):
    verdict = verdict_of_batches(kind)
    [origin] = verdict["origins"]
    assert origin["cause"] == "unknown"
    assert any("was overwritten later" in each for each in verdict["rerun"]["not_restored"])


def test_no_object_of_the_program_is_written_to_or_asked():
    from nanlocator.state.containers import mapped, tensors_beside

    x = torch.ones(2)
    cycle = []
    cycle.append(cycle)
    with torch.device("cpu"):  # lengths must be on the CPU
        packed = torch.nn.utils.rnn.pack_sequence([x])
    for value in (
        *(kind(x) for kind in (Batch, Packed, Validated, PlainBatch, Slotted, CopiesToItself)),
        Items(x=x),
        threading.Lock(),
        queue.Queue(),
        weakref.ref(x),
        torch.strided,
        torch.finfo(torch.float32),
        packed,
        collections.ChainMap({"x": x}),
        cycle,
    ):
        mapped(value, lambda tensor: tensor.clone())
        tensors_beside(value)
        if hasattr(type(value), "x"):
            assert value.x is x


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x.mul_(2).add_(1))


def test_a_model_that_writes_to_its_input_is_given_the_same_each_time():
    torch.manual_seed(0)
    model = WritesItsInput()

    def compute(step):
        x = torch.full((2, 4), -0.5 if step == 1 else 1.0)
        model(x).square().mean().add(torch.log(x[0, 0])).backward()

    verdict = verdict_of_loop(model, compute, 3)
    assert verdict["rerun"]["reproduced"] is True
    assert verdict["rerun"]["not_restored"] == []


def test_what_is_kept_of_data_computes_the_same_bits():
    """Its strides and alignment are those of the original, because kernels depend on them."""
    from nanlocator import _C

    storage = torch.randn(4096)
    for view in (
        storage[3:1027].view(32, 32),
        storage[5:].as_strided((16, 7), (31, 3)),
        storage[7:39].view(1, 32).expand(8, 32),
        storage[:1024].view(32, 32).t(),
    ):
        copy = _C.steady_copies([view])[0]
        assert copy.data_ptr() != view.data_ptr()
        assert copy.data_ptr() % 64 == view.data_ptr() % 64
        assert (copy.shape, copy.stride()) == (view.shape, view.stride())
        assert torch.equal(copy, view)


def test_weights_and_what_is_no_plain_memory_are_not_copied():
    from nanlocator import _C

    with torch.inference_mode():
        of_inference = torch.ones(3)
    assert torch.equal(_C.steady_copies([of_inference])[0], of_inference)
    for tensor in (
        nn.Parameter(torch.ones(3)),
        torch.empty(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.empty(0),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        assert _C.steady_copies([tensor])[0] is tensor


class OfPairs(nn.Module):
    """Takes a different branch for identical arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, a, b):
        return self.linear(a + b if a is b else torch.log(b))


def test_equal_arguments_are_equal_when_the_step_is_executed_again():
    torch.manual_seed(0)
    model, x = OfPairs(), torch.full((2, 4), -1.0)

    def compute(step):
        (model(x, x).square().mean() * (math.nan if step else 1.0)).backward()

    verdict = verdict_of_loop(model, compute, 2)
    [origin] = verdict["origins"]
    assert origin["cause"] == "bad_scalar"


def verdict_of_large_data(rows, read, spoil, overwrite):
    torch.manual_seed(0)
    buffer, model = torch.randn(rows, 4), model_of(4)

    def compute(step):
        if step:
            spoil(buffer)
        loss = model(read(buffer)).square().mean()
        overwrite(buffer)
        loss.backward()

    return verdict_of_loop(model, compute, 2)


ROWS = (1 << 20) // 16  # rows in a MiB


@pytest.mark.host
def test_large_data_that_operators_read_may_be_overwritten():
    verdict = verdict_of_large_data(2 * ROWS, lambda b: (b - 0.5) / 2, spoil, overwrite_by_numpy)
    [origin] = verdict["origins"]
    assert origin["cause"] == "bad_input"


def test_an_operator_on_large_data_is_named_where_nobody_overwrites_it():
    def make_zero(buffer):
        buffer[2, 1] = 0.0

    verdict = verdict_of_large_data(2 * ROWS, lambda b: torch.log(b.abs()), make_zero, lambda buffer: None)
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")


@pytest.mark.host
def test_data_too_large_for_a_copy_that_is_overwritten_accuses_no_machine():
    verdict = verdict_of_large_data(65 * ROWS, lambda b: b, spoil, overwrite_by_numpy)
    [origin] = verdict["origins"]
    assert origin["cause"] == "unknown"
    assert any("was overwritten later" in each for each in verdict["rerun"]["not_restored"])


def test_data_that_needs_a_gradient_is_kept_as_it_is():
    torch.manual_seed(0)
    model = model_of(4)

    def compute(step):
        x = torch.randn(8, 4)
        if step:
            spoil(x)
        model(x.requires_grad_()).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 2)
    [origin] = verdict["origins"]
    assert origin["cause"] == "bad_input"


@pytest.mark.host
def test_a_module_that_remembers_its_result_hides_no_transient_fault():
    torch.manual_seed(0)
    calls = itertools.count()

    class Once(torch.autograd.Function):  # without the dispatcher, once
        @staticmethod
        def forward(ctx, x):
            y = x.clone()
            y.numpy()[0, 0] *= math.nan if next(calls) == 1 else 1.0
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last, self.output = nn.Linear(4, 1), 0.0, torch.zeros(8, 1)

        def forward(self, x):
            y = Once.apply(self.linear(x))
            self.last = float(y.detach().abs().max())
            self.output = y.detach()
            return y

    model = Model()

    def compute(_):
        model(torch.randn(8, 4)).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 3)
    assert verdict["origins"][0]["cause"] == "unknown"
    (unseen,) = verdict["rerun"]["not_restored"]  # nothing of the module itself
    assert unseen.startswith("what ") and unseen.endswith(
        "Model.forward may read of the loop, which had gone on"
    )


class TakesMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, more):
        return self.linear(x)


def test_an_argument_that_cannot_be_looked_at_is_no_business_of_a_step():
    torch.manual_seed(0)
    model, more = TakesMore(), Raises()

    def compute(step):
        x = torch.randn(8, 4)
        if step == 2:
            spoil(x)
        model(x, more).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 3)
    assert any("cannot be kept" in each for each in verdict["notes"])
