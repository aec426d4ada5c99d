"""A GPT compiled by Inductor: a fault is named as in eager code, with the generated source if the compiler
is at fault."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config, cpu_vec_isa
from transformers import GPT2Config, GPT2LMHeadModel
from watched_steps import verdict_of_steps
from wrong_lowering import lowered_to_logarithm

pytestmark = pytest.mark.compiles
VOCABULARY = 64
NO_LABEL = -100


@pytest.fixture(autouse=True, scope="module")
def without_vectors():
    """Otherwise Inductor compiles ten programs to detect this CPU's vectors, and each kernel takes twice as
    long. test_compiled.py uses vectors."""
    with pytest.MonkeyPatch.context() as patch, config.patch("cpp.vec_isa_ok", False):
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        yield
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def gpt():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=16, use_cache=False)
    )


def verdict_of(model, watched, *, has_labels=True):
    """The verdict of two steps that call ``model``."""

    def loss():
        tokens = torch.randint(0, VOCABULARY, (2, 16))
        labels = tokens if has_labels else torch.full_like(tokens, NO_LABEL)
        return model(tokens, labels=labels).loss

    try:
        return verdict_of_steps(watched, loss)
    finally:
        torch._dynamo.reset()


class Exponential(nn.Module):
    def forward(self, x):
        return torch.exp(x.abs() * 1e4)


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt((x - x).abs())  # its slope is infinite


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - x.amax(-1, keepdim=True) - 1)


class UnitLength(nn.Module):
    def forward(self, x):
        same = x - x
        return x + same / same.norm(dim=-1, keepdim=True)


class Standardized(nn.Module):
    """A layer norm without epsilon, of a constant input."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) / (x.std(-1, keepdim=True) * 0)


class MaskedWhole(nn.Module):
    def forward(self, x):
        return x * torch.softmax(torch.full_like(x, -torch.inf), -1)


class SoftmaxOfNothing(nn.Module):
    """One row is fully masked."""

    def forward(self, x):
        masked = torch.zeros_like(x)
        masked[0, 3] = -torch.inf
        return x * torch.softmax(masked, -1)


class LogOfZero(nn.Module):
    def forward(self, x):
        return x + torch.log((x - x)[..., :1])


class Power(nn.Module):
    def forward(self, x):
        return torch.pow(x - 100.0, 0.5)


class ZeroOverZero(torch.autograd.Function):
    """The identity, with 0/0 in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        nothing = torch.zeros_like(gradient)
        return gradient * (nothing / nothing)


class OwnBackward(nn.Module):
    def forward(self, x):
        return ZeroOverZero.apply(x)


class ExpertWithoutTokens(nn.Module):
    """The mean over the tokens that no expert received."""

    def forward(self, x):
        is_sent = (x > 1e9).to(x.dtype)
        return x + (x * is_sent).sum() / is_sent.sum()


class PaddingTimesZero(nn.Module):
    def forward(self, x):
        padded = torch.cat((x, torch.full_like(x[:, :1], torch.inf)), 1)
        is_token = torch.ones_like(padded[..., :1])
        is_token[:, -1] = 0
        return (padded * is_token)[:, 1:].contiguous()


class HalfPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x):
        with torch.autocast(torch.get_default_device().type, torch.float16):
            return self.linear(x.abs() * 1e4 + 6e4).float()


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Exponential()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Table(nn.Module):
    """A bad plain attribute."""

    def __init__(self):
        super().__init__()
        self.table = torch.ones(128)
        self.table[5] = torch.nan

    def forward(self, x):
        return x * self.table


def activation(guilty):
    def plant(model):
        model.transformer.h[0].mlp.act = guilty()

    return plant


def last_norm(model):
    model.transformer.ln_f = Standardized(model.transformer.ln_f)


def head(model):
    model.lm_head = nn.Sequential(model.lm_head, Log())


@torch.no_grad()
def bad_weight(model):
    model.transformer.h[0].attn.c_proj.weight[3, 5] = torch.nan


@torch.no_grad()
def embedding_row(model):
    model.transformer.wte.weight[7] = torch.inf


@torch.no_grad()
def large_weight(model):
    model.transformer.h[0].mlp.c_fc.weight.fill_(3e38)


def nothing(model):
    pass


FAULTS = {
    "exponential": activation(Exponential),
    "root": activation(Root),
    "log": activation(Log),
    "unit length": activation(UnitLength),
    "masked": activation(MaskedWhole),
    "norm": last_norm,
    "head": head,
    "bad weight": bad_weight,
    "large weight": large_weight,
    "softmax": activation(SoftmaxOfNothing),
    "log of zero": activation(LogOfZero),
    "power": activation(Power),
    "own backward": activation(OwnBackward),
    "expert without tokens": activation(ExpertWithoutTokens),
    "padding": activation(PaddingTimesZero),
    "autocast": activation(HalfPrecision),
    "recomputed": activation(Recomputed),
    "table": activation(Table),
    "embedding row": embedding_row,
    "no label": nothing,
}
WAYS = {
    "torch.compile": lambda model: (torch.compile(model), model),
    "torch.compile, its result watched": lambda model: (torch.compile(model),) * 2,
    "blocks": lambda model: ([block.compile() for block in model.transformer.h], (model, model))[1],
}
CASES = [(fault, "torch.compile") for fault in FAULTS]
CASES += [(fault, way) for way in list(WAYS)[1:] for fault in ("exponential", "bad weight", "no label")]
# Faults that are compiled in a special way, or outside any compiled graph; other operators are like the
# exponential. A bad value in the same graph costs no compilation.
USUAL = {"exponential", "own backward", "autocast", "recomputed", "table"}
USUAL |= {"bad weight", "large weight", "embedding row", "no label"}


def marked(fault, way):
    is_usual = fault in USUAL and (way != "blocks" or fault == "exponential")
    marks = [] if is_usual else pytest.mark.exhaustive
    return pytest.param(fault, way, id=f"{fault}, {way}", marks=marks)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("fault", "way"), [marked(*case) for case in CASES])
def test_a_fault_is_named_as_in_eager_code(fault, way):
    has_labels = fault != "no label"

    def planted():
        model = gpt()
        FAULTS[fault](model)
        return model

    model = planted()
    (eager,) = verdict_of(model, model, has_labels=has_labels)["origins"]
    verdict = verdict_of(*WAYS[way](planted()), has_labels=has_labels)
    (compiled,) = verdict["origins"]
    for key in ("operator", "module", "parameter", "cause", "detail", "phase", "code"):
        assert compiled.get(key) == eager.get(key)
    assert verdict["rerun"]["variants"][0] == {"variant": "eager", "bad": True}


@torch.library.custom_op("nanlocator_gpt::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda _, gradient: gradient * 3)


class Tripled(nn.Module):
    def forward(self, x):
        return torch.ops.nanlocator_gpt.tripled(x)


def test_a_wrong_kernel_is_told_with_its_generated_source(tmp_path, own_folder):
    with lowered_to_logarithm(torch.ops.nanlocator_gpt.tripled.default):
        model = gpt()
        activation(Tripled)(model)
        verdict = verdict_of(*WAYS["torch.compile"](model))
    outcomes = [(each["variant"], each["bad"]) for each in verdict["rerun"]["variants"]]
    assert outcomes[:2] == [("eager", False), ("compiled", True)]
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["owner"]) == ("compiled_region", "vendor")
    assert re.match(r"(inductor::cpp|triton::triton_\w+?)_fused_.*tripled", origin["operator"])
    assert re.match(r"(in_)?out_ptr", origin["tensor"]["role"])
    (bundle,) = Path("nanlocator_run").glob(f"*/{origin['bundle']}")
    source = (bundle / "kernel.py").read_text()
    assert origin["operator"].rpartition("::")[2] in source
    assert re.search(r"[.:]log\(", source)  # the lowering's result

    def printed(*command):
        """Runs a command as on a machine that has not compiled it."""
        elsewhere = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *command], env=elsewhere, stdout=subprocess.PIPE, text=True
        ).stdout

    report = json.loads(printed("-m", "nanlocator.replay", bundle, "--trust", "--json"))
    bad = origin["tensor"]["nan"]
    assert (report["kernel"], report["conclusion"], report["bad"]) == (origin["operator"], "bad_again", bad)
    script = tmp_path / "script.py"
    script.write_text(printed("-m", "nanlocator.replay", bundle, "--export-python", "-"))
    said = printed(script, bundle.absolute(), "--trust")
    assert f"{origin['tensor']['role']} (2, 16, 128) {bad} NaN or Inf" in said
