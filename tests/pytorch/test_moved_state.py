"""State that a pass changes: iterators that it draws from, buffers and attributes of modules."""

import functools
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from watched_steps import Raises, verdict_of_loop

import nanlocator


def verdict_of_random_data(model):
    def compute(_):
        model(torch.randn(8, 4)).square().mean().backward()

    return verdict_of_loop(model, compute, 4)


def batches():
    for batch in range(100):
        x = torch.randn(8, 4)
        if batch == 3:
            x[2, 1] = math.nan
        yield x


class Batches:
    """Draws from one of its iterators."""

    def __init__(self):
        self.iterator, self.other = batches(), iter(())
        self.rows = list(itertools.islice(batches(), 3)) * 9

    def draw(self):
        return next(self.iterator)

    def draw_nested(self):
        return lambda: torch.cat([next(self.iterator) for _ in range(1)])

    def take(self):
        return self.rows[0]

    def __call__(self):
        return self.draw()


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
    "nested in a method": (lambda: Batches().draw_nested(), "self.iterator"),
    "object": (Batches, "self.iterator"),
    "default": (lambda: lambda iterator=batches(): next(iterator), "a default"),  # noqa: B008
    "partial": (lambda: functools.partial(next, batches()), "an argument"),
}


@pytest.mark.parametrize("how", DRAWS)
def test_a_closure_that_draws_another_batch_accuses_no_machine(how):
    torch.manual_seed(0)
    make, name = DRAWS[how]
    draw, model = make(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
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


numbers = iter([0.0, 0.0, math.nan] + [0.0] * 100)


class Moves(nn.Module):
    """Computes a different result in each call."""

    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.how, self.rows, self.counts = how, [], {"calls": 0}
        self.total = torch.zeros(())

    def forward(self, x):
        self.counts["calls"] += self.how == "counts"
        self.rows += [1] * (self.how == "rows")
        self.total += self.how == "total"
        counted = {"counts": self.counts["calls"], "rows": len(self.rows)}
        return self.linear(x) / (0 if counted.get(self.how, self.total) == 3 else 1)


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x + next(numbers))


class DrawsFromItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.numbers = iter([0.0, 0.0, math.nan] + [0.0] * 100)

    def forward(self, x):
        return self.linear(x + next(self.numbers))


@pytest.mark.parametrize("name", ["counts", "rows", "total", "numbers", "self.numbers"])
def test_what_moves_with_each_pass_accuses_no_machine(name):
    torch.manual_seed(0)
    drawing = {"numbers": Draws, "self.numbers": DrawsFromItself}
    model = drawing[name]() if name in drawing else Moves(name)
    verdict = verdict_of_random_data(model)
    [origin] = verdict["origins"]
    assert origin["cause"] == "unknown"
    assert any(f"'{name}'" in each for each in verdict["rerun"]["not_restored"])


class Replaces(nn.Module):
    """Replaces a value by another one in each call."""

    def __init__(self, calls, *, is_buffer):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        if is_buffer:
            self.register_buffer("calls", calls)
        else:
            self.calls = calls

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) / (self.calls != 3)


@pytest.mark.parametrize(
    ("calls", "is_buffer"), [(torch.zeros(()), True), (torch.zeros(()), False), (0, False), (0.0, False)]
)
def test_in_whose_place_a_forward_puts_another_is_put_back(calls, is_buffer):
    torch.manual_seed(0)
    model = Replaces(calls, is_buffer=is_buffer)
    verdict = verdict_of_random_data(model)
    [origin] = verdict["origins"]
    assert (origin["operator"], verdict["rerun"]["not_restored"]) == ("aten::div.Tensor", [])
    assert model.calls == 3


class BeginsOtherwise(nn.Module):
    """Its first pass, and the first after a reset, take a different branch."""

    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.how = how
        if how == "buffer":
            self.register_buffer("state", None)
        elif how != "made later":
            self.reset()

    def reset(self):
        if self.how == "made later":
            del self.state
        else:
            self.state = {"flag": False, "text": "new"}.get(self.how)

    def forward(self, x):
        state = getattr(self, "state", None)
        if state is None or state is False or state == "new":
            x = x / self.divisor
        self.state = {"flag": True, "text": "used"}.get(self.how, torch.ones(()))
        return self.linear(x)


@pytest.mark.parametrize(
    ("how", "bad_step"), [*itertools.product(["attribute", "buffer", "flag", "text", "made later"], [0, 3])]
)
def test_what_a_pass_fills_in_is_empty_again_when_it_is_executed_again(how, bad_step):
    torch.manual_seed(0)
    model = BeginsOtherwise(how)

    def compute(step):
        model.divisor = float(step != bad_step)
        if step:
            model.reset()
        model(torch.ones(8, 4)).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 5)
    [origin] = verdict["origins"]
    assert (origin["operator"], verdict["rerun"]["not_restored"]) == ("aten::div.Tensor", [])


class TwoModes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.mode, self.hidden, self.steps = "plain", None, 0

    def forward(self, x):
        return self.linear(x) / (self.mode == "plain")


def test_a_mode_that_the_loop_sets_between_two_calls_accuses_no_machine():
    torch.manual_seed(0)
    model = TwoModes()

    def compute(step):
        model.mode = "plain"
        first = model(torch.randn(8, 4))
        model.mode = "strange" if step else "plain"
        (first + model(torch.randn(8, 4))).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 2)
    [origin] = verdict["origins"]
    assert origin["cause"] == "unknown"
    assert verdict["rerun"]["not_restored"][0] == (
        "the modules' attributes: 'mode' was set during the step, but is not in its re-run"
    )


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 1), 0.0

    def forward(self, x):
        y = self.linear(x)
        return y / (y - self.shift)


def test_a_tensor_that_the_loop_sets_on_a_module_and_its_forward_reads_accuses_no_machine():
    torch.manual_seed(0)
    model = Shifted()

    def compute(step):
        x = torch.randn(8, 4)
        model.shift = model.linear(x).detach() if step else 0.0
        model(x).square().mean().backward()

    verdict = verdict_of_loop(model, compute, 2)
    [origin] = verdict["origins"]
    assert origin["cause"] == "unknown"
    assert verdict["rerun"]["not_restored"][0] == (
        "the modules' attributes: 'shift' was set during the step, but is not in its re-run"
    )


def test_what_the_loop_keeps_on_a_module_is_as_it_had_set_it_after_a_re_run():
    torch.manual_seed(0)
    model = TwoModes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    for step in range(2):
        out = model(torch.randn(8, 4))
        model.hidden, model.steps = out.detach(), step + 1
        (out.square().mean() * (math.nan if step == 1 else 1.0)).backward()
        optimizer.step()
        assert (model.hidden.data_ptr(), model.steps) == (out.data_ptr(), step + 1)
        optimizer.zero_grad()
    watch.remove()
    [verdict] = watch.verdicts
    assert (verdict["origins"][0]["cause"], verdict["rerun"]["reproduced"]) == ("bad_scalar", True)


class KeepsItsResult(nn.Module):
    """Keeps its result from the third call on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.result, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        result = self.linear(x)
        if self.calls > 2:
            self.result = result
        return result


def test_a_result_that_a_module_keeps_is_freed_when_the_next_one_takes_its_place():
    model = KeepsItsResult()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    for _ in range(5):
        before = weakref.ref(model.result) if model.result is not None else None
        loss = model(torch.randn(8, 4)).square().mean()
        assert before is None or before() is None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    watch.remove()


class ReplacesInScript(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x / (self.calls != 3)


def test_a_scripted_module_is_put_back_as_well():
    torch.manual_seed(0)
    script = torch.jit.script(ReplacesInScript())
    model = nn.Sequential(nn.Linear(4, 1), script)
    verdict = verdict_of_random_data(model)
    [origin] = verdict["origins"]
    assert (origin["cause"], verdict["rerun"]["not_restored"]) == ("operator_undefined", [])
    assert script.calls == 3


def test_what_a_function_does_not_draw_from_is_not_named():
    from nanlocator.state.closures import iterators_of

    data, proxy = iter(()), Raises()

    def closure(x):
        proxy.anything  # noqa: B018
        return x.data

    assert iterators_of(Batches().take) == []
    assert iterators_of(closure) == []
    assert iterators_of(len) == []
    assert next(data, None) is None
