"""Causes that looked like another kind: no labels within a forward, what a kernel fills by itself, a weight
that no update makes so large, a divisor that underflows."""

import json
from pathlib import Path

from ranks import run_python

LOOP = """
import ctypes
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
{model}
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(1, 8):
    is_bad = step == 5
{step}
"""
STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LANGUAGE = """
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)

    def forward(self, tokens, labels):
        logits = self.head(self.embedding(tokens)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / (labels != -100).sum()

net = Language()
"""
EXPERTS = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.body = nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x, is_taken):
        routed = self.router(x) * is_taken
        share = routed.sum() / (is_taken != 0).sum()
        return self.body(x).square().mean() + share

net = Experts()
"""


def verdict_of(model, step):
    Path("train.py").write_text(LOOP.format(model=model, step=step))
    stopped = run_python("-m", "nanlocator", "train.py")
    (path,) = Path("nanlocator_run").glob("*/verdict.json")
    return json.loads(path.read_text()), stopped.stderr


def test_no_label_counts_where_the_model_computes_its_loss():
    step = """
    tokens = torch.randint(30, (4, 6))
    loss = net(tokens, torch.full_like(tokens, -100) if is_bad else tokens)
    """
    verdict, _ = verdict_of(LANGUAGE, step + STEP)
    (origin,) = verdict["origins"]
    assert (origin["cause"], verdict["decision"]["kind"]) == ("empty_loss_mask", "SKIP_BATCH")


def test_another_count_within_a_forward_is_none_of_labels():
    step = """
    loss = net(torch.randn(4, 8), torch.zeros(4, 1) if is_bad else torch.ones(4, 1))
    """
    verdict, _ = verdict_of(EXPERTS, step + STEP)
    (origin,) = verdict["origins"]
    assert origin["detail"] == "zero_over_zero"


def test_what_the_backward_of_a_loss_fills_by_itself_is_no_number_of_the_program():
    step = """
    masked = net(torch.randn(7, 2, 8)).masked_fill(torch.arange(6) == 5, float("-inf")) if is_bad else net(
        torch.randn(7, 2, 8)
    )
    targets, lengths = torch.tensor([[1, 2, 3], [2, 1, 4]]), torch.tensor([7, 7])
    loss = nn.CTCLoss(zero_infinity=True)(masked.log_softmax(-1), targets, lengths, torch.tensor([3, 3]))
    """
    verdict, _ = verdict_of("net = nn.Linear(8, 6)", step + STEP)
    origin = verdict["origins"][0]
    assert verdict["iteration"] == 5 and "ctc_loss" not in (origin["operator"] or "")
    assert origin["code"]["text"].startswith("masked = ")


def test_a_weight_that_steady_gradients_cannot_make_so_large_was_written():
    model = "net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))"
    step = """
    loss = (net(torch.randn(8, 4)) - 1).square().mean()
    """
    flip = """
    if step == 6:
        ctypes.c_float.from_address(net[1].weight.data_ptr()).value = 1e37
    """
    verdict, _ = verdict_of(model, step + STEP + flip)
    (origin,) = verdict["origins"]
    assert verdict["iteration"] == 7 and "memory" in origin["alternatives"]
    assert verdict["decision"]["kind"] == "OLDER_CHECKPOINT"


def test_a_divisor_that_is_tiny_is_what_overflows():
    step = """
    divisor = torch.full((2,), 1e-42 if is_bad else 1.0)
    loss = (net(torch.randn(8, 4)).exp() / divisor).mean()
    """
    verdict, printed = verdict_of("net = nn.Linear(4, 2)", step + STEP)
    assert verdict["origins"][0]["cause"] == "operator_overflow"
    assert "find what makes the divisor of torch.div so small (1e-42)" in printed


def test_an_epsilon_that_half_precision_rounds_away_is_named():
    model = """
class Norm(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-8)

net = nn.Sequential(nn.Linear(4, 8, bias=False), Norm()).half()
"""
    step = """
    loss = net(torch.randn(8, 4).half() * (not is_bad)).square().mean()
    """
    verdict, printed = verdict_of(model, step + STEP.replace("optimizer.step()", "pass"))
    assert verdict["origins"][0]["detail"] == "zero_over_zero"
    assert "1e-8 is 0 in float16" in printed
