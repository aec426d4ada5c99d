"""no_autocast: a module that overflows under fp16 autocast, or with fp16 weights, runs in fp32."""

import collections
import copy
import pickle

import pytest
import torch
from test_trainer import USES_CPU
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

import nanlocator
from nanlocator.transformers import no_autocast


class Large(nn.Module):
    """Its inner values exceed fp16's range; its result does not."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x) * 1e4) * 1e-4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.large, self.last = nn.Linear(8, 8), Large(), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.large(self.first(x)))


def make(dtype=torch.float32):
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.large.up.weight.mul_(30)
    return model.to(dtype), torch.randn(4, 8)


def loss_and_gradients(model, x, autocast=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.float() for p in model.parameters())]


def is_finite(tensors):
    return all(bool(t.isfinite().all()) for t in tensors)


def test_an_overflow_under_autocast_is_cured_and_comes_back():
    model, x = make()
    exact = loss_and_gradients(model, x)
    assert not is_finite(loss_and_gradients(model, x, torch.float16))
    handle = no_autocast(model.large)
    cured = loss_and_gradients(model, x, torch.float16)
    for got, expected in zip(cured, exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    assert loss_and_gradients(model, x)[0] == exact[0]  # no change without autocast
    handle.remove()
    handle.remove()
    assert not is_finite(loss_and_gradients(model, x, torch.float16))
    assert "forward" not in vars(model.large)


def test_the_action_of_a_verdict_is_what_cures_it():
    model, x = make()
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        optimizer.step(closure)
    (origin,) = raised.value.verdict["origins"]
    assert (origin["cause"], origin["tensor"]["dtype"]) == ("operator_overflow", "float16")
    no_autocast(model.get_submodule(origin["module"]))
    assert bool(optimizer.step(closure).isfinite())


def test_operators_of_the_module_run_in_fp32_and_its_output_stays_fp32_under_autocast():
    model, x = make()
    seen = {}
    model.large.up.register_forward_hook(lambda m, args, out: seen.update(inside=(args[0].dtype, out.dtype)))
    model.large.register_forward_hook(lambda m, args, out: seen.update(given=args[0].dtype, output=out.dtype))
    with no_autocast(model.large), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert seen == {
        "inside": (torch.float32, torch.float32),
        "given": torch.bfloat16,
        "output": torch.float32,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_used_in_fp32_and_stay_the_optimizers(dtype):
    model, x = make(dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=10.0)
    reference = copy.deepcopy(model).float()
    exact = loss_and_gradients(reference, x.to(dtype).float())
    no_autocast(model.large)
    cured = loss_and_gradients(model, x.to(dtype))
    assert is_finite(cured)
    for got, expected in zip(cured, exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=2e-2 * expected.abs().max().item())
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert all(p.dtype == dtype and p.grad.dtype == dtype for p in parameters)
    assert model.large(x.to(dtype)).dtype == dtype  # needed by the next module's weights
    before = model.large.up.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.large.up.weight)


def test_weights_come_back_after_an_error():
    model, x = make(torch.float16)
    weight = model.large.up.weight
    no_autocast(model.large)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model.large(x[:, :5].half())
    assert model.large.up.weight is weight and not torch.is_autocast_enabled("cpu")


def test_tied_weights_stay_tied_and_written_buffers_are_kept():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            assert self.a.weight is self.b.weight and self.a.weight.dtype == torch.float32
            return self.norm(self.b(self.a(x)))

    module = Tied().half()
    mean = module.norm.running_mean
    no_autocast(module)
    module(torch.randn(8, 4).half()).sum().backward()
    assert module.norm.running_mean is mean and mean.dtype == torch.float16 and mean.any()
    assert module.norm.num_batches_tracked == 1
    assert module.a.weight.grad.isfinite().all()


def test_nested_arguments_are_converted_and_other_objects_left():
    Pair = collections.namedtuple("Pair", "left right")
    seen = {}

    class Keeps(nn.Module):
        def forward(self, *args, **kwargs):
            seen.update(args=args, kwargs=kwargs)
            return {"output": args[0]["x"][0], "index": kwargs["pair"].right}

    marker, exact = object(), torch.ones(1, dtype=torch.float64)
    half, index = torch.ones(2).half(), torch.arange(3)
    output = no_autocast(Keeps())._module(
        {"x": [half, None]}, pair=Pair(half, index), marker=marker, exact=exact
    )
    assert seen["args"][0]["x"][0].dtype == seen["kwargs"]["pair"].left.dtype == torch.float32
    assert seen["args"][0]["x"][1] is None and seen["kwargs"]["marker"] is marker
    assert seen["kwargs"]["exact"] is exact and output["index"] is index
    assert output["output"].dtype == torch.float16


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype, autocast", [(torch.float32, torch.float16), (torch.float16, None)])
def test_checkpointing_around_the_module_gives_the_same_gradients(use_reentrant, dtype, autocast):
    model, x = make(dtype)
    no_autocast(model.large)
    plain = loss_and_gradients(model, x.to(dtype), autocast)
    large = model.large.forward

    class Checkpointed(Net):
        def forward(self, x):
            return self.last(checkpoint(self.large, self.first(x), use_reentrant=use_reentrant))

    model.__class__ = Checkpointed
    assert model.large.forward == large
    for got, expected in zip(loss_and_gradients(model, x.to(dtype), autocast), plain, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_inside_the_module_stays_in_fp32(use_reentrant):
    class Inside(Large):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model, x = make()
    exact = loss_and_gradients(model, x)
    model.large.__class__ = Inside
    no_autocast(model.large)
    for got, expected in zip(loss_and_gradients(model, x, torch.float16), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


def test_a_copy_and_a_pickle_have_a_remedy_of_their_own():
    model, x = make()
    handle = no_autocast(model.large)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.large.down.bias.fill_(1e4)
        assert is_finite(loss_and_gradients(other, x, torch.float16))
        assert other.large.forward.args[0]._module is other.large
        assert not torch.equal(other.large(x), model.large(x))
    handle.remove()
    assert no_autocast(other.large) is other.large.forward.args[0]  # the same handle


def test_a_whole_model_trains_in_fp32_in_a_trainer_with_mixed_precision():
    config = GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8), "unused": 1}] * 4

    def losses(is_cured, **precision):
        set_seed(0)
        model = GPT2LMHeadModel(config)
        if is_cured:
            no_autocast(model)
        options = {
            "max_steps": 2,
            "logging_steps": 1,
            "use_cpu": USES_CPU,
            "report_to": [],
            "disable_tqdm": True,
        }
        args = TrainingArguments("out", save_strategy="no", **options, **precision)
        trainer = Trainer(model, args, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    exact = losses(False)
    assert losses(True, bf16=True) == exact
    assert losses(False, bf16=True) != exact


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"no_autocast takes a module.*not a str"):
        no_autocast("lm_head")


def test_the_overflow_of_t5_is_cured():
    """The documented case: a dense-gated-gelu with an output near fp16's limit, and a dropout after it."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    dense = model.encoder.block[1].layer[1].DenseReluDense
    with torch.no_grad():
        dense.wo.weight.mul_(3e5)
    ids = torch.arange(8).reshape(1, 8)

    def loss(dtype=None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return model(input_ids=ids, labels=ids).loss

    exact = loss()
    assert exact.isfinite() and not loss(torch.float16).isfinite()
    with no_autocast(model.encoder.block[1].layer[1]):
        torch.testing.assert_close(loss(torch.float16).float(), exact, rtol=2e-2, atol=0)
