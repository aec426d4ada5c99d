"""Programs that an error ends before their gradients exist, as something refuses a NaN: torch's linear
algebra, a distribution, an ``assert``, autograd's anomaly mode. The verdict explains the NaN."""

import json
import textwrap
from pathlib import Path

import pytest
from ranks import run_programs, run_python

PROGRAM = """
import torch, nanlocator
import torch.nn.functional as F
from torch.distributions import Categorical, Normal

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x, is_bad):
        hidden = self.first(x)
        if is_bad:
            hidden = torch.log(hidden - 100)
        hidden = self.last(hidden)
        {in_model}
        return hidden

class Diverged(Exception):
    pass

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
nanlocator.watch(model, optimizer)

def train(step):
    x = torch.randn(8, 4)
    {before}
    output = model(x, {is_bad} and step == 3)
    {in_loop}
    optimizer.zero_grad()
    output.mean().backward()
    optimizer.step()

for step in range(1, 5):
    train(step)
"""


def verdict_of(*, in_model="pass", before="pass", in_loop="pass", is_bad=True):
    """The program's verdict, which must be one, or None; and its error output."""
    parts = {"in_model": in_model, "before": before, "in_loop": in_loop}
    deep = {
        name: textwrap.indent(text, " " * (8 if name == "in_model" else 4)).strip()
        for name, text in parts.items()
    }
    Path("train.py").write_text(PROGRAM.format(is_bad=is_bad, **deep))
    done = run_python("train.py")
    assert done.returncode == 1, done.stderr
    found = [json.loads(path.read_text()) for path in Path().glob("nanlocator_run/*/verdict.json")]
    assert len(found) < 2
    return found[0] if found else None, done.stderr


def the_place(verdict):
    (origin,) = verdict["origins"]
    return origin["operator"], origin["module"], origin["cause"], origin["detail"]


LOG = ("aten::log", "Model", "operator_undefined", "log_of_negative")
IN_MODEL = {
    "linear algebra": "torch.linalg.svdvals(hidden)",
    "sampling": "torch.multinomial(torch.softmax(hidden, -1), 1)",
    "a loss": "F.binary_cross_entropy(torch.sigmoid(hidden), torch.ones_like(hidden))",
    "a distribution": "Normal(hidden, 1.0)",
    "an assert": "assert torch.isfinite(hidden).all(), 'activations'",
    "an assert beside memory that is NaN on purpose": (
        "unfilled = torch.full((3,), float('nan'))\nassert torch.isfinite(hidden).all(), 'activations'"
    ),
    "a number": "hidden[0, int(hidden[0, 0].clamp(0, 3))]",
}


@pytest.mark.parametrize("check", IN_MODEL)
def test_what_the_model_refuses_is_explained(check):
    verdict, errors = verdict_of(in_model=IN_MODEL[check])
    assert verdict is not None, errors
    assert the_place(verdict) == LOG
    (note,) = verdict["notes"]
    assert note.startswith("rank 0: The program ended by ")
    assert verdict["origins"][0]["bundle"], verdict


def test_what_the_model_refuses_of_a_second_microbatch_is_explained():
    first = "if step == 3: model(x, False).mean().backward()"
    verdict, errors = verdict_of(in_model=IN_MODEL["linear algebra"], before=first)
    assert verdict is not None, errors
    assert the_place(verdict) == LOG


IN_LOOP = {
    "a distribution": {"in_loop": "Categorical(logits=output)"},
    "an error with a cause": {
        "in_loop": "try: Categorical(logits=output)\nexcept ValueError as error: raise Diverged() from error"
    },
    "a rollout": {"before": "with torch.no_grad(): Categorical(logits=model(x, step == 3)).sample()"},
}


@pytest.mark.parametrize("place", IN_LOOP)
def test_what_the_loop_refuses_is_explained(place):
    verdict, errors = verdict_of(**IN_LOOP[place])
    assert verdict is not None, errors
    assert the_place(verdict) == LOG


def test_bad_data_that_the_model_refuses_is_data():
    verdict, errors = verdict_of(
        before="if step == 3: x[1, 2] = float('nan')", in_model="torch.linalg.svdvals(hidden)", is_bad=False
    )
    assert verdict is not None, errors
    assert [origin["cause"] for origin in verdict["origins"]] == ["bad_input"]


def test_a_caught_error_is_not_taken_for_a_later_one():
    verdict, errors = verdict_of(
        before="try: model(x, step == 3)\nexcept ValueError: pass",
        in_model="if is_bad: Normal(hidden, 1.0)",
        in_loop="if step == 3: Normal(0.0, -1.0)",
        is_bad=False,
    )
    assert verdict is None, errors


@pytest.mark.parametrize(
    "error",
    [
        "raise ValueError('the schedule has ended')",
        "{}['tokens']",
        "torch.zeros(3)[7]",
        "torch.zeros(3) @ torch.zeros(4)",
    ],
)
def test_an_error_of_another_kind_beside_memory_that_is_nan_on_purpose_is_no_finding(error):
    unfilled = (
        "unfilled = torch.full((3,), float('nan'))\nif torch.initial_seed() == 0 and x.sum() > 3: " + error
    )
    verdict, errors = verdict_of(in_model=unfilled, is_bad=False)
    assert verdict is None, errors
    assert "nanlocator ERROR" not in errors


UNNAMED = {
    "in the model": {"in_model": "torch.linalg.cholesky(hidden.T @ hidden + torch.eye(4))"},
    "in the loop": {"in_loop": "torch.linalg.cholesky(output.T @ output + torch.eye(4))"},
}


@pytest.mark.parametrize("place", UNNAMED)
def test_a_nan_in_what_no_variable_holds_is_explained(place):
    verdict, errors = verdict_of(**UNNAMED[place])
    assert "is not positive-definite" in errors
    assert verdict is not None, errors
    assert the_place(verdict) == LOG


@pytest.mark.parametrize("place", ["in_model", "in_loop"])
def test_a_finite_matrix_that_is_refused_is_no_finding(place):
    verdict, errors = verdict_of(
        is_bad=False, **{place: "if torch.is_grad_enabled(): torch.linalg.cholesky(-torch.eye(4) * 2.0)"}
    )
    assert "is not positive-definite" in errors
    assert verdict is None, errors
    assert "nanlocator ERROR" not in errors


def test_an_assertion_that_names_a_nan_without_gradient_is_explained():
    lines = (
        "with torch.no_grad():",
        "    step_size = (0.1 / hidden.abs().amax()).clamp(max=1.0)",
        "    assert float(step_size) > 0, f'underflow of the step: {step_size}'",
    )
    verdict, errors = verdict_of(in_model="\n".join(lines))
    assert "underflow of the step: nan" in errors
    assert verdict is not None, errors
    assert the_place(verdict) == LOG


POLE = "torch.autograd.set_detect_anomaly(True)\noutput = torch.sqrt((output * (step != 3)).square().sum())"


def test_a_nan_that_anomaly_mode_refuses_is_explained():
    verdict, errors = verdict_of(in_loop=POLE, is_bad=False)
    assert "returned nan values" in errors
    assert verdict is not None, errors
    operator, _, cause, detail = the_place(verdict)
    assert (operator, cause, detail) == ("aten::div.Tensor", "operator_undefined", "derivative_at_pole")


FILLED = ["padded = x.new_full((9, 4), float('nan'))", "padded[:8] = x", "batch = x.clone()"]


def test_padding_that_holds_nan_on_purpose_is_not_accused_of_what_the_program_refuses():
    lines = [*FILLED, "if step == 3: raise ValueError('NaN in file 17')"]
    verdict, _ = verdict_of(in_loop="\n".join(lines), is_bad=False)
    assert verdict is None


def one_rank_refuses(rank, world_size, port, level):
    import time

    import torch
    import torch.distributed as dist

    import nanlocator

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nanlocator.watch(model, optimizer, gather_deadline=4, level=level)
    for step in range(1, 4):
        if step == 2:
            time.sleep(2)  # every monitor is connected
        output = model(torch.randn(8, 4))
        if step == 2 and rank == 1:
            output = torch.log(output - 100)
        torch.distributions.Categorical(logits=output)
        output.mean().backward()
        optimizer.step()


@pytest.mark.parametrize("level", ["grads", "operators"])
def test_among_several_ranks_it_is_named_by_its_rank_and_by_its_operator_once_traced(level):
    run_programs(2, one_rank_refuses, level)
    verdict = json.loads(Path("nanlocator_run/a0/verdict_rank1.json").read_text())
    (origin,) = verdict["origins"]
    assert origin["candidates"] == [1]
    assert (origin["operator"] == "aten::log") == (level == "operators")
    assert any("ValueError" in note for note in verdict["notes"])
