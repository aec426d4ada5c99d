"""Frames of backward: the gradients that each module's call receives and contributes. Results do not
change."""

import re

import pytest
import torch
from test_debugger import printed_by
from tiny_models import language_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import debug_utils as original

from nanlocator.transformers import DebugUnderflowOverflow

NAN, INF = float("nan"), float("inf")


def traced(model, train, **options):
    """Printed text of the first batch's backward, without its headers."""

    def run():
        with DebugUnderflowOverflow(model, trace_batch_nums=[0], backward=True, **options):
            train()

    text, error = printed_by(run)
    assert error is None
    _, _, backward = text.partition(
        "*** Starting backward of batch number=0 ***\nabs min  abs max  metadata\n"
    )
    return backward


def row(tensor, context):
    return f"{tensor.abs().min():8.2e} {tensor.abs().max():8.2e} {context}"


# ---- Healthy ------------------------------------------------------------------------------------


class Shares(nn.Module):
    """A layer that is used twice, an in-place operator, and an output that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.layer(x)) * 2
        y += x
        return self.layer(y), y.exp()


def trained(kind, is_watched):
    torch.manual_seed(3)
    if kind == "shared":
        model, x = Shares(), torch.randn(2, 4, requires_grad=True)
        loss = lambda: model(x * 2)[0].square().sum()  # noqa: E731
    else:
        name, *checkpointing = kind.split()
        model = language_model(name)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == ["reentrant"]})
        tokens = torch.randint(2, 64, (2, 12))
        arguments = {"use_cache": False} if checkpointing else {}
        loss = lambda: model(input_ids=tokens, labels=tokens, **arguments).loss  # noqa: E731
    debugger = DebugUnderflowOverflow(model, backward=True) if is_watched else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.detach())
        optimizer.step()
    if debugger:
        assert any("grad_output" in frame for frame in debugger.frames)
        debugger.remove()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.parameters(), torch.get_rng_state()]


@pytest.mark.parametrize(
    "kind",
    ["bert", "gpt2", "t5", "llama", "gpt2 reentrant", "gpt2 non-reentrant", "shared"],
)
def test_training_has_the_same_bits(kind):
    plain, watched = trained(kind, False), trained(kind, True)
    assert len(plain) >= 8
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a, b)


def test_a_frame_has_what_the_call_took_and_what_it_gave():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    x = torch.randn(5, 3, requires_grad=True)
    hidden = model[0](x)
    active = model[1](hidden)
    output = model[2](active)
    seed = torch.randn(5, 2)
    weights = [*model.parameters()]
    of_output = seed
    of_active, of_hidden, of_x, *of_weights = torch.autograd.grad(
        output, [active, hidden, x, *weights], seed, retain_graph=True
    )
    assert traced(model, lambda: model(x).backward(seed)).splitlines() == [
        " " * 18 + "2 Linear",
        row(of_output, "grad_output"),
        row(of_active, "grad_input[0]"),
        row(of_weights[2], "grad_weight"),
        " " * 18 + "1 ReLU",
        row(of_active, "grad_output"),
        row(of_hidden, "grad_input[0]"),
        " " * 18 + " Sequential",  # gives its last gradient before the weight's is transposed
        row(of_output, "grad_output"),
        row(of_x, "grad_input[0]"),
        " " * 18 + "0 Linear",
        row(of_hidden, "grad_output"),
        row(of_x, "grad_input[0]"),
        row(of_weights[0], "grad_weight"),
        row(of_weights[1], "grad_bias"),
    ]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden, *, scale=None):
        return hidden + self.linear(hidden) * scale


def test_an_input_that_is_used_twice_has_a_row_for_each_use_and_keywords_have_theirs():
    torch.manual_seed(1)
    model = Residual()
    x, scale = torch.randn(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    text = traced(model, lambda: model(x, scale=scale).sum().backward())
    frame = text.split(" " * 18 + " Residual\n")[1]
    contexts = [re.sub(r"^\S+ +\S+ ", "", line) for line in frame.splitlines()]
    assert contexts[:4] == [
        "grad_output",
        "grad_input[0] of AddBackward0",
        "grad_input[0] of AddmmBackward0",
        "grad_input[scale]",
    ]


def test_a_shared_module_has_a_frame_for_each_call_with_its_own_part():
    torch.manual_seed(1)
    model = Shares()
    x = torch.rand(1, 4)
    text = traced(model, lambda: model(x)[0].sum().backward())
    of_calls = text.split("layer Linear\n")[1:]
    assert len(of_calls) == 2
    first, second = (re.search(r"(\S+) grad_weight", frame)[1] for frame in of_calls)
    assert first != second
    assert float(first) < model.layer.weight.grad.abs().max()  # the sum


@pytest.mark.parametrize("reentrant", [True, False])
def test_frames_are_whole_with_checkpoints(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, self.linear(x), use_reentrant=reentrant) * 2

    torch.manual_seed(1)
    model = Checkpointed()
    x = torch.randn(2, 3)
    text = traced(model, lambda: model(x).sum().backward())
    parts = re.findall(r"^ {18}(\S*) (\w+)\n((?:\S.*\n|  \S.*\n|\s+None.*\n)*)", text, re.M)
    backward = {(name, cls): rows for name, cls, rows in parts if "grad_" in rows}
    linear = ["grad_output", "grad_input[0]", "grad_weight", "grad_bias"]
    contexts = {key: re.findall(r"grad_\S+", rows) for key, rows in backward.items()}
    assert contexts["block.0", "Linear"] == linear
    assert contexts["block.1", "Tanh"] == ["grad_output", "grad_input[0]"]
    assert contexts["linear", "Linear"] == ["grad_output", "grad_weight", "grad_bias"]


def test_what_a_backward_leaves_out_is_shown_when_it_ends():
    torch.manual_seed(1)
    model = nn.Bilinear(3, 3, 2)
    left, right = torch.randn(2, 2, 3, requires_grad=True).unbind()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = model

        def forward(self, x, y):
            return self.linear(x, y) + 0, x * y

    both = Both()
    text = traced(both, lambda: both(left, right)[1].sum().backward())
    (name, *rows) = text.splitlines()
    assert name.endswith(" Both") and "Bilinear" not in text
    contexts = [re.sub(r"^\S+ +\S+ ", "", row) for row in rows]
    assert contexts == ["grad_output[1]", "grad_input[0] of MulBackward0", "grad_input[1] of MulBackward0"]


def test_a_second_backward_through_the_same_graph_has_its_own_frames():
    model = nn.Linear(2, 2)

    def train():
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert traced(model, train).count("grad_weight") == 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return {"scaled": Product.apply(x, self.scale)}


def test_a_function_of_one_s_own_and_a_gradient_of_a_gradient():
    model = Scaled()
    x = torch.tensor([5.0, 7.0], requires_grad=True)

    def train():
        (gradient,) = torch.autograd.grad(model(x)["scaled"].square().sum(), x, create_graph=True)
        gradient.sum().backward()

    text = traced(model, train)
    # d/dx (s x)^2 = 2 s^2 x, and of its sum by x: 2 s^2, by s: 4 s x
    first, second = text.split(" " * 18 + " Scaled\n")[1:]
    assert first.splitlines() == [
        "2.00e+01 4.20e+01 grad_output[scaled]",
        "4.00e+01 1.26e+02 grad_input[0]",
        "1.00e+02 2.94e+02 grad_scale",
    ]
    assert second.count("grad_scale") == 1
    assert torch.equal(x.grad, torch.tensor([8.0, 18.0]))
    assert torch.equal(model.scale.grad, torch.tensor([40.0, 84.0]))


# ---- Bad ----------------------------------------------------------------------------------------


class Root(nn.Module):
    """sqrt has an infinite derivative at zero, and 0 * inf is NaN."""

    def forward(self, x):
        return torch.sqrt(x) * 0


class Attention(nn.Module):
    """Three consumers of one tensor; the first one makes a NaN in backward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.q, self.k, self.v = Root(), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        h = self.norm(x).clamp(min=0)
        return self.q(h) + self.k(h) + self.v(h)


def test_a_gradient_that_is_born_bad_is_reported_in_the_module_that_made_it():
    x = torch.tensor([[1.0, 5.0]])

    def train(tool, model, **options):
        def run():
            debugger = tool(model, **options)
            try:
                model(x).sum().backward()
            finally:
                if tool is DebugUnderflowOverflow:
                    debugger.remove()

        return printed_by(run)

    torch.manual_seed(1)
    assert train(original.DebugUnderflowOverflow, Attention()) == ("", None)
    model = Attention()
    text, error = train(DebugUnderflowOverflow, model, backward=True)
    assert error.startswith("ValueError: DebugUnderflowOverflow: inf/nan detected, aborting")
    assert "grad_input[0] has nans" in text
    report = text.split("\nDetected inf/nan during backward of batch_number=0\nLast ")[1]
    assert re.match(r"\d+ frames:\nabs min  abs max  metadata\n", report)
    lines = report.rstrip().splitlines()
    assert lines[-3:] == [
        " " * 18 + "q Root",
        "1.00e+00 1.00e+00 grad_output",
        "     nan      nan grad_input[0]",
    ]
    assert "k Linear\n" in report.split("*** Starting backward")[0]
    nans_of_others = re.findall(r"nan grad\S+", report)
    assert nans_of_others == ["nan grad_input[0]"]


def test_what_comes_in_bad_from_the_loss_is_reported_as_such():
    model = nn.Linear(2, 2)

    def run():
        with DebugUnderflowOverflow(model, backward=True):
            (model(torch.ones(1, 2)).sum() * INF).backward()

    text, error = printed_by(run)
    assert error.startswith("ValueError: ") and "inf/nan detected" in error
    assert "grad_output has infs\n" in text and "grad_weight" not in text


def test_after_a_report_in_backward_the_next_batch_is_judged_by_itself():
    model = nn.Linear(2, 2)
    with DebugUnderflowOverflow(model, backward=True) as debugger:
        _, error = printed_by(lambda: (model(torch.ones(1, 2)).sum() * NAN).backward())
        assert error.startswith("ValueError: ") and debugger.detected_overflow
        model(torch.ones(1, 2)).sum().backward()
        assert debugger.batch_number == 2 and not debugger.detected_overflow
        assert len(debugger.frames) == 2


def test_the_last_batch_has_its_backward_before_the_run_is_ended():
    model = nn.Linear(2, 2)

    def train():
        with DebugUnderflowOverflow(model, trace_batch_nums=[0], abort_after_batch_num=0, backward=True):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()

    text, error = printed_by(train)
    assert error.startswith("ValueError: ") and "aborting after 1 batches" in error
    assert text.count("grad_output") == 1


def test_removed_hooks_do_nothing_any_more():
    model = nn.Linear(2, 2)
    debugger = DebugUnderflowOverflow(model, backward=True)
    loss = model(torch.ones(1, 2)).sum() * NAN
    debugger.remove()
    loss.backward()
    assert not model._forward_pre_hooks and not model._forward_hooks
