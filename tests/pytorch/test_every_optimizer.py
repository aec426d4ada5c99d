"""Each optimizer of PyTorch's own test list (``optim_db`` in ``torch.testing._internal``), in each of its
configurations and implementations: training under a watch has the same bits, a NaN in one tensor of its
state is told as such, and a NaN in its learning rate, too."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nanlocator

STEPS = 5
STATE = ("optimizer_state", "optimizer_update", "bad_weight")


@functools.cache
def infos() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_optimizers import optim_db
    return {info.name: info for info in optim_db}


NAMES = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
]  # fmt: skip


def known(name: str) -> Any:
    if name not in infos():
        pytest.skip("this torch does not have it")
    return infos()[name]


def options_of(info: Any) -> list[dict[str, Any]]:
    """Its configurations; the first of them also in each implementation."""
    configurations = [each.kwargs for each in info.optim_inputs_func(device="cpu")]
    kinds = [kind for kind in info.supported_impls if kind in ("foreach", "fused")]
    return configurations + [configurations[0] | {kind: True} for kind in kinds]


class Model(nn.Module):
    """Matrices alone, which Muon asks for; of rows that a batch reads, which SparseAdam asks for."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4, sparse=is_sparse)
        self.last = None if is_sparse else nn.Linear(4, 3, bias=False)

    def forward(self, step: int) -> torch.Tensor:
        x = self.first(torch.tensor([step % 8, (step + 3) % 8]))
        return (x if self.last is None else self.last(torch.tanh(x))).square().mean()


def train(name: str, options: dict[str, Any], spoil: Callable[[Any], None] | None, **watch: Any) -> Any:
    """The weights after some steps, and the verdict, if there was one. ``spoil(optimizer)`` is called two
    steps before the last: ASGD takes what it makes of its learning rate in the step after."""
    torch.manual_seed(0)
    model = Model(name == "SparseAdam")
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    watching = nanlocator.watch(model, optimizer, **watch) if watch else None
    verdict = None
    try:
        for step in range(STEPS):
            if spoil is not None and step == STEPS - 3:
                spoil(optimizer)

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(step)
                loss.backward()
                return loss

            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        verdict = error.verdict
    finally:
        if watching is not None:
            watching.remove()
    return [each.detach().clone() for each in model.parameters()], verdict


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", NAMES)
def test_training_has_the_same_bits_and_no_verdict(name):
    for options in options_of(known(name)):
        alone, _ = train(name, options, None)
        for level in ("grads", "operators"):
            watched, verdict = train(name, options, None, level=level, check_params=True)
            assert verdict is None, (options, verdict["origins"])
            assert all(map(torch.equal, alone, watched)), (options, level)


def state_names(name: str, options: dict[str, Any]) -> list[str]:
    """The tensors of a parameter's shape or part of it; a step's number is a tensor of one element."""
    found: list[str] = []

    def look(optimizer: Any) -> None:
        state = next(iter(optimizer.state.values()), {})
        found.extend(
            key
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
        )

    train(name, options, look)
    return found


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "LBFGS"])
def test_a_nan_in_its_state_is_one_origin_of_that_parameter(name):
    wrong = []
    for options in options_of(known(name)):
        for key in state_names(name, options):

            def spoil(optimizer, key=key):
                state = next(iter(optimizer.state.values()))
                state[key].view(-1)[-1] = math.nan

            alone, _ = train(name, options, spoil)
            _, verdict = train(name, options, spoil, level="modules", check_params=True)
            if verdict is None:
                if not all(each.isfinite().all() for each in alone):
                    wrong.append((options, key, "nothing found"))
                continue  # this configuration does not read it
            told = [(each["cause"], each["parameter"]) for each in verdict["origins"]]
            if len(told) != 1 or told[0][0] not in STATE or told[0][1] != "first.weight":
                wrong.append((options, key, told))
            elif verdict["decision"]["kind"] not in ("OLDER_CHECKPOINT", "DO_NOT_RESTART"):
                wrong.append((options, key, verdict["decision"]))
    assert not wrong


# LBFGS has no update of one parameter; Rprop and Adafactor have steps of their own; no later batch reads the
# rows that are bad in SparseAdam.
WITHOUT_RATE = ("LBFGS", "Rprop", "Adafactor", "SparseAdam")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_RATE])
def test_a_learning_rate_that_is_nan_is_named(name):
    def spoil(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = math.nan

    _, verdict = train(name, options_of(known(name))[0], spoil, level="modules")
    assert verdict is not None
    causes = {each["cause"] for each in verdict["origins"]}
    evidence = " ".join(line for each in verdict["origins"] for line in each["evidence"])
    assert causes <= {"optimizer_update", "bad_weight"} and "learning rate was NaN" in evidence
    assert len(verdict["origins"]) == 1
