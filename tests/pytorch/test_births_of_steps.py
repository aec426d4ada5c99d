"""A bad step's births in the verdict: state without a name, recomputation, losses outside the model."""

import math

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from watched_steps import verdict_of_closure

from nanlocator import LocatingOptimizer, NonFiniteGradientError


def origin_of_a_step(model, forward, **options):
    """The only origin of a step with a closure."""
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)

    def closure():
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    (origin,) = raised.value.verdict["origins"]
    return origin


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss])
@pytest.mark.parametrize("scale", [math.nan, 1e30])
def test_memory_that_a_loss_fills_inside_its_kernel_is_no_origin(loss, scale):
    """With a mean, these kernels write the elements to temporary memory without the dispatcher, and an inner
    operator then reads them."""

    class Layer(nn.Linear):
        def forward(self, x):
            return torch.log(super().forward(x) * 0 - 1) if math.isnan(scale) else super().forward(x) * scale

    model = Layer(4, 4)
    model.weight.data.fill_(scale if math.isfinite(scale) else 1)
    origin = origin_of_a_step(model, lambda: loss(model(torch.ones(2, 4)), torch.zeros(2, 4)))
    if math.isnan(scale):
        assert (origin["cause"], origin["operator"]) == ("operator_undefined", "aten::log")
    else:
        assert (origin["cause"], origin["operator"]) == ("operator_overflow", "aten::mul.Tensor")


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.cos = torch.ones(4)

    def forward(self, x):
        return x * self.cos


def test_a_bad_rotary_table_is_a_bad_buffer_with_its_name():
    model = nn.Sequential(nn.Linear(4, 4), Rotary())
    model[1].cos[2] = math.nan
    origin = origin_of_a_step(model, lambda: model(torch.ones(2, 4)).sum())
    assert (origin["cause"], origin["parameter"], origin["module"]) == ("bad_buffer", "1.cos", "1")
    assert origin["tensor"]["first_bad"] == 2


@pytest.mark.parametrize(
    ("loss_of", "operator"),
    [
        (lambda output: (output * math.nan).sum(), "aten::mul.Tensor"),
        (lambda output: output.sum() + math.inf, "aten::add.Tensor"),
        (lambda output: output.fill_(math.nan).sum(), "aten::fill_.Scalar"),
        (lambda output: output.masked_fill(output == output, math.inf).sum(), "aten::masked_fill.Scalar"),
    ],
)
def test_a_number_of_the_program_that_is_not_finite_is_told_with_its_line(loss_of, operator):
    model = nn.Linear(4, 4)
    origin = origin_of_a_step(model, lambda: loss_of(model(torch.ones(2, 4))))
    assert (origin["cause"], origin["operator"]) == ("bad_scalar", operator)
    assert origin["code"]["text"].startswith("(lambda output: ")


def test_an_element_of_a_tensor_is_data_and_no_number_of_the_program():
    model, weights = nn.Linear(4, 4), torch.tensor([1.0, math.nan])
    origin = origin_of_a_step(model, lambda: (model(torch.ones(2, 4)) * weights[1]).sum())
    assert origin["cause"] == "bad_input"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_forward_that_comes_out_otherwise_the_second_time_is_a_recompute_mismatch(
    use_reentrant,
):
    model = nn.Linear(4, 4)
    calls = []

    def body(y):
        calls.append(1)
        logarithm = torch.log(y * (1.0 if len(calls) % 2 == 1 else 0.0))  # bad in every recomputation
        return logarithm * logarithm

    def forward():
        hidden = model(torch.ones(2, 4)).square() + 1
        return checkpoint(body, hidden, use_reentrant=use_reentrant).sum()

    origin = origin_of_a_step(model, forward)
    assert origin["cause"] == "recompute_mismatch"
    assert origin["operator"] == "aten::log"


def test_without_a_closure_the_loss_outside_of_modules_is_the_origin_without_a_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, level="operators", on_bad="report"
    )
    for divisor in (1.0, 0.0):
        optimizer.zero_grad()
        prediction = model(torch.ones(3, 4))
        loss = (prediction - prediction).sum() / torch.tensor(divisor)
        loss.backward()
        optimizer.step()
    optimizer.remove()
    (verdict,) = optimizer.verdicts
    (origin,) = verdict["origins"]
    assert origin["operator"] == "aten::div.Tensor"
    assert (origin["phase"], origin["module"]) == ("loss", None)


def every_weight_of_a_model_in_shards_is_bad(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 2))
    for module in (model[0], model[2], model[3], model):
        fully_shard(module, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(math.nan)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return verdict_of_closure(optimizer, lambda: model(torch.ones(3, 4)).square().sum())


@pytest.mark.host
def test_of_a_model_in_shards_with_every_weight_bad_the_first_is_named():
    verdicts = run_ranks(2, every_weight_of_a_model_in_shards_is_bad)
    (origin,) = verdicts[0]["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "0.weight")
