"""What loops do beside forward and backward: zero gradients by hand, keep float32 copies, create optimizers
again, wrap an optimizer's step. Unedited scripts under the launcher: each fault is the division that a module
makes in step 5, and a healthy run prints what it prints alone."""

import json
import textwrap
from pathlib import Path

import pytest
from ranks import run_python

MODEL = """
import gc, sys, weakref
import torch
from torch import nn

torch.manual_seed(0)
BAD = 5 if "bad" in sys.argv or "twice" in sys.argv else 0
FIRST = 3 if "twice" in sys.argv else BAD

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 4), nn.Linear(4, 3)
        nn.init.constant_(self.body.bias, 2.0)

    def forward(self, x, step):
        hidden = self.body(x).relu() * (step not in (FIRST, BAD))
        return self.head(hidden / hidden.norm(dim=-1, keepdim=True))

def loss_of(model, step):
    return model(torch.rand(6, 8), step).square().mean()
"""

ZEROED = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
for step in range(1, 8):
    loss_of(model, step).backward()
    optimizer.step()
    for p in model.parameters():
        {zero}
print([float(p.sum()) for p in model.parameters()])
"""

COPIES = """
model = Model().bfloat16()
copies = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(copies, 1e-2)
for step in range(1, 8):
    model(torch.rand(6, 8).bfloat16(), step).float().square().mean().backward()
    for p, copy in zip(model.parameters(), copies):
        copy.grad = p.grad.float()
    torch.nn.utils.clip_grad_norm_(copies, 1.0)
    optimizer.step()
    {zero}
    with torch.no_grad():
        for p, copy in zip(model.parameters(), copies):
            p.copy_(copy)
            p.grad = None
print([float(p.sum()) for p in model.parameters()])
"""

EPOCHS = """
model = Model()
step = 0
for epoch in range(4):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        step += 1
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
print([float(p.sum()) for p in model.parameters()])
"""

SCALED = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(1, 8):
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model, step)
    loss = loss.float() * (1e8 if step in (2, 3) else 1)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(scaler.get_scale(), [float(p.sum()) for p in model.parameters()])
"""

EVALUATED = """
model = Model()
optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
for step in range(1, 8):
    batch, calls = torch.rand(6, 8), 0

    def closure():
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = model(batch, step if calls == 3 else -1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
print([float(p.sum()) for p in model.parameters()])
"""

SKIPPING = """
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(1, 8):
    loss = loss_of(model, step)
    if not torch.isfinite(loss):
        continue
    {zero}
    (loss * 2 + 0.1).backward()
    optimizer.step()
"""

MEASURING = """
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(1, 8):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()
    measured = model(torch.rand(6, 8), BAD).square().mean()
    print(measured.item())
    del measured
"""

TASKS = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(1, 8):
    losses = model(torch.rand(6, 8), step).square().mean(0)
    flat = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        flat.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for p, gradient in zip(model.parameters(), sum(flat).split([p.numel() for p in model.parameters()])):
        p.grad = gradient.view_as(p).clone()
    optimizer.step()
print([float(p.sum()) for p in model.parameters()])
"""

SUMMED = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(1, 8):
    optimizer.zero_grad()
    total, outputs = torch.zeros(()), torch.zeros(6, 3)
    outputs[:, :] = model(torch.rand(6, 8), step)
    total += outputs.square().mean()
    total.backward()
    optimizer.step()
print([float(p.sum()) for p in model.parameters()])
"""

CLIPPED_EACH = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(1, 8):
    optimizer.zero_grad()
    for part in range(2):
        loss_of(model, step if part == 0 else -1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print([float(p.sum()) for p in model.parameters()])
"""

LOOPS = {
    "clipped after each microbatch": CLIPPED_EACH,
    "zeroed in place": ZEROED.format(zero="p.grad.zero_()"),
    "detached and zeroed": ZEROED.format(zero="p.grad.detach_(); p.grad.zero_()"),
    "filled with 0": ZEROED.format(zero="p.grad.data.fill_(0)"),
    "multiplied by 0": ZEROED.format(zero="p.grad *= 0"),
    "replaced by zeros": ZEROED.format(zero="p.grad = torch.zeros_like(p)"),
    "left": ZEROED.format(zero="pass"),
    "float32 copies": COPIES.format(zero="optimizer.zero_grad()"),
    "float32 copies, never zeroed": COPIES.format(zero="pass"),
    "an optimizer for each epoch": EPOCHS,
    "updates that a scaler leaves out": SCALED,
    "several evaluations in a step": EVALUATED,
    "gradients of several tasks": TASKS,
    "sums in place": SUMMED,
}


def run(script, *arguments):
    Path("train.py").write_text(MODEL + textwrap.dedent(script))
    return run_python("-m", "nanlocator", "train.py", *arguments)


@pytest.mark.parametrize("way", LOOPS)
def test_a_division_is_located_in_its_step(way):
    done = run(LOOPS[way], "bad")
    assert done.returncode != 0, done.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    verdict = json.loads(path.read_text())
    (origin,) = verdict["origins"]
    assert verdict["iteration"] == 5
    assert (origin["detail"], origin["module"]) == ("zero_over_zero", "Model")
    assert origin["code"]["text"].startswith("return self.head(hidden / hidden.norm")
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART" and not verdict["decision"]["hosts"]


@pytest.mark.parametrize("way", ["zeroed in place", *list(LOOPS)[-7:]])
def test_a_healthy_loop_is_left_as_it_is(way):
    watched = run(LOOPS[way])
    alone = run_python("train.py")
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert watched.stderr.count("attached to") == 1 and "without a name" not in watched.stderr
    assert not list(Path().glob("nanlocator_run/*/verdict.json"))


COUNTING = """
seen = []

class Counting(Model):
    def forward(self, x, step):
        self.calls = getattr(self, "calls", 0) + 1
        seen.append(step)
        return super().forward(x, step)

model = Counting()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
"""
DISCARDED = {
    "bad losses skipped": SKIPPING.format(zero="optimizer.zero_grad()"),
    "bad losses skipped, gradients dropped": SKIPPING.format(
        zero="for p in model.parameters(): p.grad = None"
    ),
    "bad gradients skipped": COUNTING
    + """
for step in range(1, 8):
    loss_of(model, step).backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.step()
    optimizer.zero_grad()
print([float(p.sum()) for p in model.parameters()], model.calls, seen)
""",
    "bad norms skipped": COUNTING
    + """
for step in range(1, 8):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    print(norm.item())
    if norm.isfinite():
        optimizer.step()
print([float(p.sum()) for p in model.parameters()], model.calls, seen)
""",
    "bad norms skipped, zeroed after the next forward": COUNTING
    + """
for step in range(1, 8):
    loss = loss_of(model, step)
    optimizer.zero_grad()
    loss.backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite():
        optimizer.step()
print([float(p.sum()) for p in model.parameters()], model.calls, seen)
""",
    "bad norms skipped, gradients dropped by hand": COUNTING
    + """
for step in range(1, 8):
    loss_of(model, step).backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite():
        optimizer.step()
    for p in model.parameters():
        p.grad = None
print([float(p.sum()) for p in model.parameters()], model.calls, seen)
""",
    "bad gradients mended after the clip": COUNTING
    + """
other = nn.Linear(2, 2)
for step in range(1, 8):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    other.weight.grad = torch.full((2, 2), 100.0)
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    print(other.weight.grad.sum().item())
    for p in model.parameters():
        p.grad.nan_to_num_()
    optimizer.step()
print([float(p.sum()) for p in model.parameters()], model.calls, seen)
""",
}


@pytest.mark.parametrize("way", DISCARDED)
def test_what_the_program_itself_discards_is_told_and_stops_nothing(way):
    """Nothing of it runs once more: the next one is traced."""
    watched = run(DISCARDED[way], "twice")
    alone = run_python("train.py", "twice")
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert watched.stderr.count("nanlocator WARNING[needs_trace]") == 1
    assert watched.stderr.count("nanlocator WARNING[zero_over_zero]") == 1
    assert "the program itself discarded what step 5 computed" in watched.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    verdict = json.loads(path.read_text())
    (origin,) = verdict["origins"]
    assert (verdict["iteration"], origin["detail"]) == (5, "zero_over_zero")
    assert verdict["job"]["is_discarded"]


# Gradients that are gone are not always discarded: each loop uses them after all.
USED = {
    "clipped and used": """
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)""",
    "kept and put back": """
    kept = [p.grad for p in model.parameters()]
    print(sum(g.norm() for g in kept).item())
    optimizer.zero_grad()
    for p, g in zip(model.parameters(), kept):
        p.grad = g""",
    "added to others": """
    print(model.body.weight.grad.norm().item())
    torch._foreach_add_(sums, [p.grad for p in model.parameters()])
    optimizer.zero_grad()
    for p, s in zip(model.parameters(), sums):
        p.grad = s.clone()""",
    "a part of them": """
    print(model.body.weight.grad.norm().item())
    model.head.zero_grad()""",
}


@pytest.mark.parametrize("way", USED)
def test_gradients_that_the_program_uses_after_zeroing_stop_it(way):
    script = f"""
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
sums = [torch.zeros_like(p) for p in model.parameters()]
for step in range(1, 8):
    loss_of(model, step).backward(){USED[way]}
    optimizer.step()
    optimizer.zero_grad()
"""
    done = run(script, "bad")
    assert done.returncode != 0 and "discarded" not in done.stderr, done.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    verdict = json.loads(path.read_text())
    assert verdict["iteration"] == 5 and verdict["origins"][0]["detail"] == "zero_over_zero"


VALIDATING = """
def loss_of_batch(x, is_empty):
    losses = model(x).square()[:0] if is_empty else model(x).square()
    return losses.mean()

model = nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(1, 8):
    model.train()
    optimizer.zero_grad()
    loss_of_batch(torch.rand(6, 8), False).backward()
    optimizer.step()
    model.eval()
    print(loss_of_batch(torch.rand(6, 8), True).item())
"""


@pytest.mark.parametrize("script", [MEASURING, VALIDATING], ids=["measured", "validated"])
def test_a_bad_number_that_the_program_has_only_measured_is_no_step(script):
    done = run(script)
    assert done.returncode == 0 and done.stdout.count("nan") == 7, done.stderr
    assert not list(Path().glob("nanlocator_run/*/verdict.json"))


WRAPPED = """
weight = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], 0.1)
calls, step_of_optimizer = 0, optimizer.step

def step(*arguments):
    global calls
    calls += 1
    return step_of_optimizer(*arguments)

optimizer.step = step
for _ in range(3):
    (gradient,) = torch.autograd.grad((weight * 2).sum(), [weight])
    weight.grad = gradient
    optimizer.step()
print(calls, weight.tolist())
"""

TAKEN_OVER = """
class Twice:
    def __init__(self, optimizer):
        vars(self).update(vars(optimizer))
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()
        self.optimizer.step()

weight = nn.Parameter(torch.ones(3))
optimizer = Twice(torch.optim.SGD([weight], 0.1))
for _ in range(3):
    weight.grad = torch.ones(3)
    optimizer.step()
print(weight.tolist())
"""

CLOSURE = """
weight = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], 0.1)
calls = 0
for _ in range(3):
    def closure():
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
print(calls, weight.tolist())
"""


@pytest.mark.parametrize("script", [WRAPPED, TAKEN_OVER, CLOSURE], ids=["wrapped", "taken over", "closure"])
def test_an_optimizer_steps_as_often_as_alone(script):
    watched = run(script)
    alone = run_python("train.py")
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout


FEWER = """
model = nn.Linear(4, 4)
head = nn.Linear(4, 1)
first = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.01)
whole = nn.Sequential(model, head)
for step in range(8):
    if step == 4:
        del first
        gc.collect()
        first = torch.optim.SGD(model.parameters(), 0.01)
    whole(torch.randn(3, 4)).mean().backward()
    first.step()
    for p in whole.parameters():
        p.grad.zero_()
print("done")
"""


def test_an_optimizer_of_fewer_parameters_follows():
    done = run(FEWER)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


TRIALS = """
def trial(with_schedule):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2) if with_schedule else None
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step + 1).backward()
        optimizer.step()
        if schedule:
            schedule.step()
    return weakref.ref(model)

def discarded():
    model = Model()
    torch.optim.Adam(model.parameters(), 1e-2)
    return weakref.ref(model)

BAD = 0
models = [trial(k % 2) for k in range(3)] + [discarded()]
gc.collect()
print([model() is None for model in models])
"""


def test_a_model_that_the_program_drops_is_freed():
    done = run(TRIALS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, True, True, True]\n"
    assert "attached to nothing" not in done.stderr


COMPILED = """
from torch.func import functional_call

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
call = torch.compile(
    lambda weights, x: functional_call(model, weights, (x, 1)).sum(), backend="aot_eager", fullgraph=True
)
for _ in range(2):
    optimizer.zero_grad()
    call(dict(model.named_parameters()), torch.rand(6, 8)).backward()
    optimizer.step()
print("done")
"""


@pytest.mark.compiles
def test_a_functional_call_is_compiled_whole():
    done = run(COMPILED)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def verdict_of(script):
    done = run(script, "bad")
    assert done.returncode != 0, done.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    return json.loads(path.read_text()), done


WRITTEN = """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 8):
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            {write}
"""


@pytest.mark.parametrize(
    "write",
    [
        "p.data = p.data.clone(); p.mul_(float('nan') if step == BAD else 1)",
        "p.add_(p * 0 / (0 if step == BAD else 1))",
        "p.data.mul_(float('nan') if step == BAD else 1)",
        "p[0].div_(0.0 if step == BAD else 1.0).sub_(p[0])",
    ],
    ids=["other memory", "in place", "its data", "a part of it"],
)
def test_a_weight_that_the_program_has_changed_in_place_accuses_no_machine(write):
    verdict, done = verdict_of(WRITTEN.format(write=write))
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["detail"]) == ("bad_weight", "made_earlier")
    assert origin["alternatives"] == ["last_update"] and origin["code"]["text"] == write
    assert "ERROR[changed_weight]" in done.stderr and not verdict["decision"]["hosts"]


KEPT = """
class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mean = nn.Linear(4, 4), None

    def forward(self, x, step):
        hidden = self.layer(x)
        if self.mean is not None:
            hidden = hidden - self.mean
        with torch.no_grad():
            self.mean = torch.log(x.abs().min() * (step != BAD)) * 1e-3
        return hidden

model = Keeping()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 8):
    model(torch.randn(6, 4), step).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_tensor_without_dimensions_that_a_module_keeps_is_no_number_of_the_program():
    verdict, _ = verdict_of(KEPT)
    (origin,) = verdict["origins"]
    assert verdict["iteration"] == 6
    assert (origin["cause"], origin["code"]["text"]) == ("bad_buffer", "hidden = hidden - self.mean")


MASKED = """
model = nn.Linear(4, 5)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 8):
    scores = model(torch.randn(6, 4)).index_fill(1, torch.tensor([1]), float("-inf"))
    if step == BAD:
        scores = scores.index_fill(0, torch.tensor([3]), float("-inf"))
    chances = (scores - scores.logsumexp(1, keepdim=True)).exp()
    optimizer.zero_grad()
    chances.square().mean().backward()
    optimizer.step()
"""


def test_the_element_shown_is_the_nan_and_no_masked_one():
    verdict, _ = verdict_of(MASKED)
    (origin,) = verdict["origins"]
    assert origin["tensor"]["first_bad_index"] == [3, 0]


SELECTED = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 8):
    loss = model(torch.randn(6, 4)).square()
    hard = loss[loss > (1e9 if step == BAD else -1)]
    optimizer.zero_grad()
    hard.mean().backward()
    optimizer.step()
"""


def test_a_selection_of_nothing_is_no_batch_without_labels():
    verdict, _ = verdict_of(SELECTED)
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["detail"]) == ("operator_undefined", "mean_of_nothing")
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART"


SCRIPTED = """
@torch.jit.script
def dice(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 8):
    loss = dice(torch.sigmoid(model(torch.rand(8, 4))), torch.rand(8, 1))
    if step == BAD:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_function_that_cannot_be_executed_again_ends_by_the_finding():
    verdict, done = verdict_of(SCRIPTED)
    assert verdict["iteration"] == 5 and "torch.jit.script" in verdict["rerun"]["why_not"]
    assert done.stderr.rstrip().splitlines()[-2].startswith("nanlocator.NonFiniteGradientError")


PREPARED = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(1, 4):
    x = torch.ones(6, 8)
    if BAD:
        x = (x - x.mean(0)) / x.std(0)
    loss = model(x, step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

REPLACED = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(1, 8):
    optimizer.zero_grad()
    loss_of(model, -1).backward()
    optimizer.step()
    if step + 1 == BAD:
        model.body.weight.data = model.body.weight.data / 0 * 0
"""

QUOTIENT = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(1, 8):
    optimizer.zero_grad()
    error = loss_of(model, -1) * (step != BAD)
    base = torch.rand(4).var() * (step != BAD)
    (error / base).backward()
    optimizer.step()
"""

BAD_SCALE = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(1, 8):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, -1)).backward()
    scaler.step(optimizer)
    scaler.update(float("nan") if step == BAD else None)
print("done")
"""


def origin_of(script, step):
    done = run(script, "bad")
    assert done.returncode != 0, done.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    verdict = json.loads(path.read_text())
    (origin,) = verdict["origins"]
    assert verdict["iteration"] == step and not verdict["decision"]["hosts"]
    return origin, verdict["decision"]


def test_what_the_first_step_prepared_before_the_launcher_attached_is_no_proven_data():
    origin, decision = origin_of(PREPARED, 1)
    assert (origin["cause"], origin["detail"]) == ("bad_input", "unrecorded")
    assert origin["cause_confidence"] == "low"
    assert (decision["kind"], decision["page"]) == ("DO_NOT_RESTART", "model_author")


def test_a_weight_that_the_program_replaced_is_the_programs():
    origin, _ = origin_of(REPLACED, 5)
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "body.weight")
    assert "written_by_program" in [fact["kind"] for fact in origin["facts"]]
    assert "writer" in origin["alternatives"]


def test_a_quotient_of_two_numbers_is_no_mean_over_labels():
    origin, decision = origin_of(QUOTIENT, 5)
    assert (origin["cause"], origin["detail"]) == ("operator_undefined", "zero_over_zero")
    assert decision["kind"] == "DO_NOT_RESTART"


def test_a_loss_scale_that_is_nan_ends_nothing_by_an_error_of_ours():
    done = run(BAD_SCALE, "bad")
    assert "UsageError" not in done.stderr


RARE = """
class Rare(Model):
    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(8, 8)
        with torch.no_grad():
            self.rare.weight[{where}] = torch.nan  # as torch.empty may leave it

    def forward(self, x, step):
        return super().forward(x + self.rare(x) if step == 5 else x, -1)

model = Rare()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(1, 8):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    {between}
    optimizer.step()
"""


@pytest.mark.parametrize("where", ["2, 3", "2"])
def test_a_weight_that_was_bad_from_the_start_is_no_matter_of_memory(where):
    done = run(RARE.format(where=where, between="pass"))
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    verdict = json.loads(path.read_text())
    (origin,) = verdict["origins"]
    assert (verdict["iteration"], origin["cause"], origin["parameter"]) == (5, "bad_weight", "rare.weight")
    assert origin["alternatives"] == ["checkpoint", "initialisation"]
    assert "it was so when the first step began" in done.stderr and "not ruled out" not in done.stderr


def test_a_weight_that_was_bad_from_the_start_and_written_since_is_not_known_to_be_so():
    run(RARE.format(where="2", between="model.rare.weight.detach().mul_(1.0)"))
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    (origin,) = json.loads(path.read_text())["origins"]
    assert "bad_at_start" not in [fact["kind"] for fact in origin["facts"]]
