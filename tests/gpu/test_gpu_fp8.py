"""Training in fp8 by TransformerEngine and torchao, where they are installed: faults beside their modules are
named, and healthy steps are executed again bit for bit."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_expected import Expected, check
from gpu_machine import DEVICE, ROOT
from ranks import KeptRanks, RankServer, standard_error
from test_gpu_kernels import LOG, OVERFLOW, UNDEFINED, Compute, Fault, Plant, log_of_negative
from test_gpu_parallel import MegatronPlaces, check_healthy, found, installed, located_in, weights
from torch import nn

import nanlocator

pytestmark = pytest.mark.needs_gpu
WIDTH, ROWS = 256, 64
RECIPES = ("bf16", "delayed", "current", "block")
MODULES = ("Linear", "LayerNormMLP", "TransformerLayer")


def root_of_zero(x: torch.Tensor) -> torch.Tensor:
    return x + torch.sqrt(x - x) * 0


def overflow_of_exp(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.float().abs() + 100).to(x.dtype)


# ---- TransformerEngine --------------------


def recipe_named(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "bf16": None,
        "delayed": recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }[name]


class Quantized(nn.Module):
    """A place for a fault behind the first of three modules of TransformerEngine."""

    def __init__(self, compute: Compute, module: str, recipe: str, has_fp8_weights: bool = False) -> None:
        import transformer_engine.pytorch as engine

        super().__init__()
        options = {} if module == "Linear" else {"ffn_hidden_size": 4 * WIDTH}
        if module == "TransformerLayer":
            options |= {"num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        sizes = (WIDTH, WIDTH) if module == "Linear" else (WIDTH,)
        self.recipe = recipe_named(recipe)
        self.autocast = functools.partial(engine.autocast, enabled=recipe != "bf16", recipe=self.recipe)
        with engine.quantized_model_init(enabled=has_fp8_weights, recipe=self.recipe):
            kind = functools.partial(getattr(engine, module), *sizes, **options, params_dtype=torch.bfloat16)
            self.first, self.middle, self.last = kind(), kind(), kind()
        self.fault = Fault(compute)
        self.head = nn.Linear(WIDTH, 1, dtype=torch.bfloat16)
        self.is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            x = self.first(x)
            if self.is_bad:
                x = self.fault(x)
            x = self.last(self.middle(x))
        return self.head(x)


class Graphed(Quantized):
    """The middle module is replayed as a CUDA graph."""

    def to(self, *args: Any, **kwargs: Any) -> "Graphed":
        import transformer_engine.pytorch as engine

        super().to(*args, **kwargs)
        self.middle = engine.make_graphed_callables(
            self.middle,
            (batch(DEVICE).requires_grad_(),),
            enabled=self.recipe is not None,
            recipe=self.recipe,
        )
        return self


def batch(device: str) -> torch.Tensor:
    return torch.randn(ROWS, 4, WIDTH, device=device, dtype=torch.bfloat16)


def spoil_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("middle").get_parameter("weight").view(-1)[7] = float("nan")


def plant(
    compute: Compute, expected: Expected, make: type[Quantized] = Quantized, *of: Any, **more: Any
) -> Plant:
    made = functools.partial(make, module=of[0], recipe=of[1], has_fp8_weights="fp8 weights" in of)
    return Plant(compute, expected, dtype=torch.bfloat16, make=made, batch=batch, healthy_steps=3, **more)


IN_BACKWARD = Expected(("aten::div",), UNDEFINED)
EXP = Expected(("aten::exp",), OVERFLOW)
BAD_WEIGHT = Expected((), ("bad_weight",), module="middle")
FAULTS: dict[str, Plant] = {
    **{
        f"{name}, {module}, {recipe}": plant(compute, expected, Quantized, module, recipe)
        for name, compute, expected in [
            ("log", log_of_negative, LOG),
            ("a root's derivative", root_of_zero, IN_BACKWARD),
        ]
        for module in MODULES
        for recipe in RECIPES
    },
    # A cast that saturates may make the Inf finite again.
    **{
        f"exp, Linear, {recipe}": plant(overflow_of_exp, EXP, Quantized, "Linear", recipe, may_be_finite=True)
        for recipe in RECIPES
    },
    **{
        f"a bad weight, Linear, {recipe}": plant(
            lambda x: x, BAD_WEIGHT, Quantized, "Linear", recipe, spoil=spoil_weight
        )
        for recipe in RECIPES
    },
    **{
        f"log, Linear, {recipe}, fp8 weights": plant(
            log_of_negative, LOG, Quantized, "Linear", recipe, "fp8 weights"
        )
        for recipe in ("delayed", "current")
    },
    **{
        f"log, TransformerLayer, {recipe}, graphed": plant(
            log_of_negative, LOG, Graphed, "TransformerLayer", recipe
        )
        for recipe in ("bf16", "delayed")
    },
}


@pytest.fixture
def transformer_engine():
    return pytest.importorskip("transformer_engine.pytorch")


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_before_modules_of_transformer_engine_is_named(name, record_property):
    fault = FAULTS[name]
    is_bad = fault.is_bad_without(DEVICE)
    record_property("is_bad", is_bad)
    assert is_bad or fault.may_be_finite, "the planted fault makes no gradient bad"
    check(fault.verdict(DEVICE), fault.expected if is_bad else None)


def trained(make: Callable[[], nn.Module], steps: int, **options: Any) -> tuple[list[torch.Tensor], Any, str]:
    """Losses and weights; the watch, if there are options for it; and the output on stderr."""
    torch.manual_seed(0)
    model = make().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = nanlocator.watch(model, optimizer, on_bad="report", **options) if options else None
    losses = []
    with standard_error() as printed:
        for step in range(steps):
            torch.manual_seed(step)
            loss = model(batch(DEVICE)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        said = printed()
    if watch:
        watch.remove()
    return losses + [p.detach().clone() for p in model.parameters()], watch, said


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_healthy_steps_of_transformer_engine_are_executed_again_bit_for_bit(recipe, module):
    make = functools.partial(Quantized, log_of_negative, module, recipe)
    alone, _, _ = trained(make, 6)
    watched, watch, said = trained(make, 6, rerun="always")
    check_healthy(alone, watched, watch.verdicts, said)


# ---- Megatron-Core on TransformerEngine --------------------

_megatron = KeptRanks(RankServer("torch", on_gpu=DEVICE == "cuda"), "nccl")


def places(recipe: str) -> MegatronPlaces:
    sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
    os.environ["MEGATRON_ON"] = DEVICE
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron_training import Training, parallel_state
    from plan_configurations import Configuration

    class OnTransformerEngine(Training):
        def _layer_spec(self) -> Any:
            return get_gpt_layer_with_transformer_engine_spec()

        def _options(self) -> dict[str, Any]:
            return {} if recipe == "bf16" else {"fp8": "hybrid", "fp8_recipe": recipe}

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    torch.manual_seed(0)
    sizes = 4, 512, 1024, 8, 8, 1024, 256
    made = OnTransformerEngine(Configuration(recipe, *sizes, ranks=1, tp=1, pp=1, microbatches=2))
    return MegatronPlaces(made, DEVICE)


def healthy(rank: int, world_size: int, recipe: str) -> dict[str, Any]:
    alone = places(recipe)
    for _ in range(6):
        alone.training.step()
    watched = places(recipe)
    locator = installed(watched.training, rerun="always", on_bad="report")
    with standard_error() as printed:
        for _ in range(6):
            watched.training.step()
        said = printed()
    locator.remove()
    check_healthy(weights(alone), weights(watched), locator.verdicts, said)
    return {}


def located(rank: int, world_size: int, recipe: str) -> dict[str, Any]:
    return located_in(places(recipe), rank, world_size, "log of a negative")


@pytest.mark.megatron
@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("function", [healthy, located])
def test_megatron_on_transformer_engine(function, recipe, record_property):
    record_property("found", found(_megatron, 1, function, recipe)[0])


# ---- torchao --------------------


class Float8Linears(nn.Module):
    """A place for a fault between linear layers that torchao has converted."""

    def __init__(self, compute: Compute, recipe: str) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        super().__init__()
        self.first, self.fault, self.last = nn.Linear(WIDTH, WIDTH), Fault(compute), nn.Linear(WIDTH, WIDTH)
        self.is_bad = False
        convert_to_float8_training(self, config=Float8LinearConfig.from_recipe_name(recipe))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.fault(x) if self.is_bad else x)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("compute", "expected"),
    [(log_of_negative, LOG), (root_of_zero, IN_BACKWARD), (overflow_of_exp, EXP)],
)
def test_a_fault_between_layers_of_torchao_is_named(compute, expected, recipe, record_property):
    pytest.importorskip("torchao")
    fault = Plant(
        compute,
        expected,
        dtype=torch.bfloat16,
        make=functools.partial(Float8Linears, recipe=recipe),
        batch=lambda device: batch(device).view(-1, WIDTH),
    )
    is_bad = fault.is_bad_without(DEVICE)
    record_property("is_bad", is_bad)
    assert is_bad or compute is overflow_of_exp, "the planted fault makes no gradient bad"
    check(fault.verdict(DEVICE), expected if is_bad else None)
