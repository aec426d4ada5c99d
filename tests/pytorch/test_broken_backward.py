"""Backwards that an error ends after they have written a part of the gradients; the program goes on."""

import pytest
import torch
from torch import nn

import nanlocator


class Fragile(torch.autograd.Function):
    """Raises in its backward while ``error`` is set."""

    error = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fragile.error is not None:
            raise Fragile.error
        return grad


def train(fault, after_error, *, is_watched=True, error=RuntimeError, steps=5):
    """In step 3 the error ends the backward; ``fault``: a divisor of the output. Returns the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer) if is_watched else None
    try:
        for step in range(1, steps + 1):
            Fragile.error = error("no more memory") if step == 3 else None
            hidden = Fragile.apply(model[1](model[0](torch.randn(4, 4))))
            loss = (model[2](hidden) / (fault if step == 3 else 1.0)).square().mean()
            try:
                loss.backward()
            except error:
                if after_error == "discard":
                    optimizer.zero_grad()
                    continue
                if after_error == "again":
                    Fragile.error = None
                    optimizer.zero_grad()
                    model[2](model[1](model[0](torch.randn(4, 4)))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Fragile.error = None
        if watch is not None:
            watch.remove()
    return model


@pytest.mark.parametrize("error", [RuntimeError, ValueError, torch.OutOfMemoryError])
def test_what_it_has_written_is_scanned_before_it_is_used(error):
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        train(0.0, "use", error=error)
    verdict = raised.value.verdict
    (origin,) = verdict["origins"]
    assert (verdict["iteration"], verdict["job"]["weights_finite"]) == (3, True)
    assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::div.Tensor")
    assert "model[2](hidden) / " in origin["code"]["text"]


@pytest.mark.parametrize("after_error", ["discard", "again"])
def test_what_the_program_discards_is_no_finding(after_error):
    watched, alone = (train(0.0, after_error, is_watched=each) for each in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


def verdict_of(backward):
    """The verdict in three steps, in each of which ``backward(model, step)`` writes the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        for step in range(1, 4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        Fragile.error = None
        watch.remove()
    pytest.fail("the NaN in the gradients was used")


def test_what_the_program_discards_by_itself_is_not_repeated():
    def backward(model, step):
        data, Fragile.error = torch.randn(4, 4), torch.OutOfMemoryError("1.5 GiB") if step == 3 else None
        loss = model[2](Fragile.apply(model[1](model[0](data)))).square().mean()
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            Fragile.error = None
            for parameter in model.parameters():
                parameter.grad = None
            for half in data.chunk(2):
                (model(half) / half.new_zeros(())).mean().backward()

    assert [(each["cause"], each["operator"]) for each in verdict_of(backward)["origins"]] == [
        ("operator_undefined", "aten::div.Tensor")
    ]


def test_a_finite_part_of_the_gradients_is_used_as_without_a_watch():
    watched, alone = (train(1.0, "use", is_watched=each) for each in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


def test_a_backward_that_does_not_end_so_again_is_explained_where_the_nan_comes_again():
    def backward(model, step):
        data = torch.randn(4, 4)
        data[0, 0] = float("nan") if step == 3 else 0.0
        loss = model(data).square().mean()
        if step == 3:
            data.zero_()  # backward needs what forward has read
        try:
            loss.backward()
        except RuntimeError as error:
            assert "inplace operation" in str(error)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    verdict = verdict_of(backward)
    assert verdict["job"]["weights_finite"]
    assert [origin["cause"] for origin in verdict["origins"]] == ["bad_input"]
