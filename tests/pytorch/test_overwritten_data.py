"""Loops that load the next batch into the memory of this one, before the bad step is executed again."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

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


# Autograd itself refuses what its backward still needs.
WHEN = {
    "after backward": ("late", overwrite),
    "before backward, unseen by autograd": ("early", overwrite_without_a_version),
    "by numpy": ("early", overwrite_by_numpy),
}


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


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("how", READ)
def test_a_bad_batch_whose_memory_holds_the_next_one_is_bad_data(how, when):
    verdict = train(READ[how], *WHEN[when], spoil)
    [origin] = verdict["origins"]
    assert (origin["cause"], origin["cause_confidence"]) == ("bad_input", "high")
    assert verdict["rerun"]["reproduced"] is True
    assert verdict["rerun"]["not_restored"] == []


@pytest.mark.parametrize("when", WHEN)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
            for step in range(3):
                for microbatch in range(3):
                    buffer.data.copy_(torch.randn(8, 4))
                    if (step, microbatch) == (1, 1):
                        spoil(buffer)
                    model(buffer / 2).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watch.remove()
    [origin] = raised.value.verdict["origins"]
    assert (origin["cause"], origin["microbatch"]) == ("bad_input", 1)


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x.mul_(2).add_(1))


def test_a_model_that_writes_to_its_input_is_given_the_same_each_time():
    torch.manual_seed(0)
    model = WritesItsInput()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
            for step in range(3):
                x = torch.full((2, 4), -0.5 if step == 1 else 1.0)
                model(x).square().mean().add(torch.log(x[0, 0])).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watch.remove()
    verdict = raised.value.verdict
    assert verdict["rerun"]["reproduced"] is True
    assert verdict["rerun"]["not_restored"] == []


def test_what_is_kept_of_data_computes_the_same_bits():
    """Its strides and its alignment are those of the original: kernels choose by them."""
    from nanlocator import _C

    storage = torch.randn(4096)
    for view in (
        storage[3:1027].view(32, 32),
        storage[5:].as_strided((16, 7), (31, 3)),
        storage[7:39].view(1, 32).expand(8, 32),
        storage[:1024].view(32, 32).t(),
    ):
        copy = _C.steady_copy(view)
        assert copy.data_ptr() != view.data_ptr()
        assert copy.data_ptr() % 64 == view.data_ptr() % 64
        assert (copy.shape, copy.stride()) == (view.shape, view.stride())
        assert torch.equal(copy, view)


def test_weights_and_what_is_no_plain_memory_are_not_copied():
    from nanlocator import _C

    with torch.inference_mode():
        of_inference = torch.ones(3)
    assert torch.equal(_C.steady_copy(of_inference), of_inference)
    for tensor in (
        nn.Parameter(torch.ones(3)),
        torch.empty(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.empty(0),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        assert _C.steady_copy(tensor) is tensor


def batches():
    for batch in range(100):
        x = torch.randn(8, 4)
        if batch == 3:
            spoil(x)
        yield x


class Batches:
    """Draws from an iterator that its method uses."""

    def __init__(self):
        self.iterator = batches()

    def draw(self):
        return next(self.iterator)


def draw_of_a_variable():
    iterator = batches()
    return lambda: next(iterator)


def draw_by_another_function():
    inner = draw_of_a_variable()

    def draw():
        return inner()

    return draw


DRAWS = {
    "variable": (draw_of_a_variable, "iterator"),
    "method": (lambda: Batches().draw, "self.iterator"),
    "another function": (draw_by_another_function, "iterator"),
    "partial": (lambda: functools.partial(next, batches()), "an argument"),
}


@pytest.mark.parametrize("how", DRAWS)
def test_a_closure_that_draws_another_batch_accuses_no_machine(how):
    torch.manual_seed(0)
    make, name = DRAWS[how]
    draw, model = make(), model_of(4)
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def closure():
        optimizer.zero_grad()
        loss = model(draw()).square().mean()
        loss.backward()
        return loss

    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        for _ in range(6):
            optimizer.step(closure)
    verdict = raised.value.verdict
    [origin] = verdict["origins"]
    assert origin["cause"] == "unknown"
    assert any(f"'{name}'" in each for each in verdict["rerun"]["not_restored"])
