"""A NaN that enters each operator and module of PyTorch's own test lists, and an infinite gradient that
enters its derivative: the verdict names where they were born, and nothing else. And each function of one or
two numbers outside of its domain: it is named itself.

The lists are ``OpInfo`` and ``ModuleInfo`` in ``torch.testing._internal``."""

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from watched_steps import verdict_of_steps

GROUPS = 40

IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions
CAST = {
    "contiguous": lambda x: x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels_last": lambda x: x.contiguous(memory_format=IMAGES[x.dim()]),
}


@functools.cache
def operators() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db  # takes seconds
    return [each for each in op_db if each.supports_autograd]


@functools.cache
def modules() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return list(module_db)


class Source(nn.Module):
    """Adds the logarithm of 1; of -1 in one element, in a bad step."""

    is_bad = False

    def forward(self, x):
        argument = torch.ones(x.shape)
        if self.is_bad:
            argument.view(-1)[x.numel() // 2] = -1
        return x + torch.log(argument).to(x.dtype)


class Tail(nn.Module):
    """A loss; in a bad step the root of 0, whose slope is infinite."""

    is_bad = False

    def forward(self, results):
        total = sum(each.abs().sum().float() for each in results)
        return torch.sqrt(total * 0.0) if self.is_bad else total * 1e-3


class Step(nn.Module):
    """``call(x)`` between source and tail; ``module``: the module that it calls, if any."""

    def __init__(self, x, call, module=None):
        super().__init__()
        self.weight = nn.Parameter(x.detach().clone())
        self.source, self.tail = Source(), Tail()
        self.call, self.module = call, module

    def forward(self):
        results = self.call(self.source(self.weight * 1.0))
        return self.tail([each for each in tensors_in(results) if each.requires_grad])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def is_healthy(step: Step) -> bool:
    """Whether the sample itself has finite results and gradients, which depend on its input."""
    torch.manual_seed(0)
    try:
        loss = step()
        loss.backward()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):  # no gradient of this dtype
        return False
    gradients = [p.grad for p in step.parameters() if p.grad is not None]
    step.zero_grad()
    return bool(gradients) and all(map(torch.isfinite, map(torch.sum, [loss, *gradients])))


def check(name: str, step: Step, wrong: list[str]) -> int:
    """Adds to ``wrong`` what is accused instead. Returns the number of verdicts."""
    if not is_healthy(step):
        return 0
    found = 0
    for bad, place in ((step.source, "source"), (step.tail, "tail")):
        numbers = itertools.count()

        def loss(bad=bad, numbers=numbers):
            bad.is_bad = next(numbers) > 0
            return step()

        optimizer = torch.optim.SGD(step.parameters(), lr=0.0)
        try:
            verdict = verdict_of_steps(step, loss, optimizer=optimizer)
        except RuntimeError:  # linear algebra refuses NaN
            continue
        finally:
            bad.is_bad = False
            step.zero_grad()
        if verdict is None:  # the operator does not pass it on
            continue
        found += 1
        places = [(each["operator"], each["module"], each["cause"]) for each in verdict["origins"]]
        if [module for _, module, _ in places] != [place]:
            wrong.append(f"{name}, {place}: {places}")
    return found


def samples_of(operator: Any, dtype: torch.dtype, layout: str) -> Iterator[Any]:
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=True):
        x = sample.input
        is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dtype == dtype
        if layout == "channels_last" and (not is_plain or x.dim() not in IMAGES):
            continue
        if is_plain and x.numel() > 1 and torch.isfinite(x).all():
            yield sample


def check_operators(group: int, dtype: torch.dtype, layout: str, groups: int = GROUPS) -> None:
    wrong: list[str] = []
    found = 0
    for operator in operators()[group::groups]:
        if dtype not in operator.dtypes or dtype not in (operator.backward_dtypes or operator.dtypes):
            continue
        sample = next(samples_of(operator, dtype, layout), None)
        if sample is None:
            continue

        def call(x, operator=operator, sample=sample):
            return operator(CAST[layout](x), *sample.args, **sample.kwargs)

        name = f"{operator.name}.{operator.variant_test_name}"
        found += check(name, Step(sample.input, call), wrong)
    assert not wrong
    assert found > 0


def test_what_enters_an_operator_was_born_elsewhere():
    check_operators(7, torch.float32, "contiguous")


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, "contiguous"),
        (torch.float32, "strided"),
        (torch.bfloat16, "contiguous"),
        (torch.float16, "contiguous"),
        (torch.complex64, "contiguous"),
    ],
)
def test_what_enters_any_operator_was_born_elsewhere(dtype, layout, group):
    check_operators(group, dtype, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", range(4))
def test_what_enters_any_operator_on_images_was_born_elsewhere(group):
    check_operators(group, torch.float32, "channels_last", groups=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_enters_any_module_was_born_elsewhere(training):
    wrong: list[str] = []
    found = 0
    for info in modules():
        if not training and not info.train_and_eval_differ:
            continue
        for given in info.module_inputs_func(info, "cpu", torch.float32, True, training):
            forward = given.forward_input
            x = forward.args[0] if forward is not None and forward.args else None
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() < 2:
                continue
            made = given.constructor_input
            torch.manual_seed(0)
            module = info.module_cls(*made.args, **made.kwargs).train(training)

            def call(x, module=module, forward=forward):
                return module(x, *forward.args[1:], **forward.kwargs)

            found += check(info.name, Step(x, call, module), wrong)
            break
    assert not wrong
    assert found > 100 if training else found > 10


class Function(nn.Module):
    """A function of numbers that are safe in all but the last element, and bad there in a bad step."""

    def __init__(self, function, safe, bad):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.function, self.safe, self.bad = function, safe, bad

    def forward(self, is_bad):
        arguments = [torch.full((4,), number) for number in self.safe]
        if is_bad:
            for argument, number in zip(arguments, self.bad, strict=True):
                argument[3] = number
        return self.function(*(argument + self.weight for argument in arguments))


class OnFunction(nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.function = Function(*arguments)

    def forward(self, is_bad):
        return self.function(is_bad).float().sum()


def is_finite_at(function: Any, numbers: tuple[float, ...]) -> bool | None:
    """Value and slopes; None if the function has no slope there."""
    at = [torch.tensor([number], requires_grad=True) for number in numbers]
    try:
        value = function(*at)
        value.sum().backward()
    except (RuntimeError, AttributeError, TypeError):  # it takes more, or has no slope
        return None
    slopes = [each.grad for each in at if each.grad is not None]
    return all(bool(torch.isfinite(each).all()) for each in [value, *slopes])


def functions() -> list[Any]:
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    return [each for each in operators() if isinstance(each, BinaryUfuncInfo | UnaryUfuncInfo)]


# torch.special.i0 and i1 compute e**x first, which is infinite where they are not; float_power is finite in
# float64 and only its result overflows as a float32.
NOT_THEIR_OWN = {
    ("i0", (88.8,)),
    ("special.i1", (88.8,)),
    ("float_power", (-1e30, 2.0)),
    ("float_power", (1e30, 2.0)),
}
ONE = [(x,) for x in (-1e4, -88.0, -2.0, -1.0, 0.0, 1.0, 2.0, 88.8, 710.0, 1e30)]
TWO = list(itertools.product((-1e30, -2.0, -0.5, 0.0, 0.5, 2.0, 1e30), repeat=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", range(10))
def test_a_function_outside_of_its_domain_is_named(group):
    wrong = []
    found = 0
    for function in functions()[group::10]:
        has_two = "Binary" in type(function).__name__
        candidates = [(0.5, 1.5), (1.5, 0.5), (2.0, 2.0)] if has_two else [(0.5,), (1.5,), (0.0,)]
        safe = next((each for each in candidates if is_finite_at(function, each)), None)
        for bad in (TWO if has_two else ONE) if safe else []:
            if is_finite_at(function, bad) is not False or (function.name, bad) in NOT_THEIR_OWN:
                continue
            model = OnFunction(function, safe, bad)
            numbers = itertools.count()
            verdict = verdict_of_steps(
                model,
                lambda model=model, numbers=numbers: model(next(numbers) > 0),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            )
            assert verdict is not None, (function.name, bad)
            found += 1
            told = [(each["module"], each["cause"], each["detail"]) for each in verdict["origins"]]
            is_named = len(told) == 1 and told[0][0] == "function"
            if not is_named or told[0][1] not in ("operator_undefined", "operator_overflow"):
                wrong.append((function.name, bad, told))
            elif told[0][1] == "operator_overflow" and max(map(abs, bad)) < 88 and 0 not in bad:
                wrong.append((function.name, bad, told))
    assert not wrong
    assert found > 0
