"""``python -m nanlocator`` and ``NANLOCATOR=1``: scripts that do not import nanlocator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_python
from watched_steps import as_code_says

PACKAGE = Path(__import__("nanlocator").__file__).parents[1]  # also has nanlocator.pth

SCRIPT = """
import sys
import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return x - torch.log(x.clamp(min=0).sum(-1, keepdim=True))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Log())
optimizer = torch.optim.SGD(model.parameters(), 0.0)
for step in range(3):
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.0 if step == 2 and "bad" in sys.argv else 1.0)
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


@pytest.fixture
def script():
    Path("train.py").write_text(SCRIPT)
    return "train.py"


def interpreter(*command, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "NANLOCATOR"} | variables
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment
    )


def run(*command, as_installed=False, start=run_python, **variables):
    """``as_installed``: the folder of nanlocator.pth is a site directory, read twice as in a virtual
    environment (site.venv, then site.main)."""
    paths = [str(PACKAGE)]
    if as_installed:
        Path("site").mkdir(exist_ok=True)
        add = f"site.addsitedir({str(PACKAGE)!r})\n"
        Path("site/sitecustomize.py").write_text(f"import site\n{add}{add}")
        paths.insert(0, str(Path("site").absolute()))
    return start(*command, PYTHONPATH=os.pathsep.join(paths), **variables)


LOADED = """
import nanlocator_after_import

def say(module):
    print(module.__name__, module.last)

nanlocator_after_import.AfterImport({"package": say, "package.inside": say})
nanlocator_after_import.AfterImport({"package.later": say})
nanlocator_after_import.AfterImport({"package.later": say})
"""


def test_a_package_that_is_being_loaded_is_acted_on_when_its_import_has_ended():
    """For example DeepSpeed, if a script imports it before torch."""
    for path, text in {
        "package/__init__.py": "import follows\nimport package.inside\nlast = 1\n",
        "package/inside.py": "last = 2\n",
        "package/later.py": "last = 3\n",
        "follows.py": LOADED,
        "broken/__init__.py": "import follow_broken\nraise ImportError\n",
        "follow_broken.py": LOADED.replace("package", "broken"),
    }.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
    script = "import package\ntry:\n    import broken\nexcept ImportError:\n    print('broken')\n"
    script += "import package, importlib\nimportlib.reload(package)\nimport package.later\n"
    Path("script.py").write_text(script)
    done = run("script.py")
    said = ["package.inside 2", "package 1", "broken", *["package.later 3"] * 2, ""]
    assert done.stdout.split("\n") == said, done.stderr


def how_it_is_started(script, how, *arguments):
    if how == "launcher":
        return run("-m", "nanlocator", script, *arguments, start=interpreter)
    if how == "module":
        return run("-m", "nanlocator", "-m", Path(script).stem, *arguments)
    return run(script, *arguments, as_installed=True, start=interpreter, NANLOCATOR="1")


@pytest.mark.parametrize("how", ["launcher", "module", "variable"])
def test_a_fault_in_an_unedited_script_is_located(script, how):
    done = how_it_is_started(script, how, "bad")
    status = 1 if how == "variable" else 93  # a launcher's own: do not restart
    assert done.returncode == status, done.stderr
    assert "nanlocator: attached to SGD and Sequential (2 parameters); findings go to" in done.stderr
    said = " ".join(done.stderr.split())  # lines may be wrapped
    assert "step 3: LEAVE IT DOWN, PAGE THE MODEL AUTHOR" in said
    assert "logarithm of zero: torch.log in module 1 gave -Inf" in said
    assert f"train.py:8 in {as_code_says('Log.forward')}" in said
    assert len(done.stdout.split()) == 2


def test_a_healthy_script_prints_what_it_prints(script):
    alone = run(script)
    watched = run(script, as_installed=True, NANLOCATOR="1")
    assert watched.returncode == alone.returncode == 0
    assert watched.stdout == alone.stdout
    assert watched.stderr.count("\n") == 1 and watched.stderr.startswith("nanlocator: attached to ")


def test_the_variable_is_inherited_by_what_a_launched_script_starts(script):
    Path("starter.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'train.py', 'bad']))\n"
    )
    done = run("-m", "nanlocator", "starter.py", as_installed=True, start=interpreter)
    assert done.returncode == 1 and "torch.log" in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import torch", "no optimizer was created"),
        (
            "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)])",
            "no module that an optimizer trains was called",
        ),
    ],
)
def test_a_script_with_nothing_to_attach_to_says_so_in_one_line(code, said):
    Path("script.py").write_text(code + "; print(1)")
    done = run("script.py", as_installed=True, NANLOCATOR="1")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr == f"nanlocator: attached to nothing: {said}\n"


DP_SGD = """
import torch
from torch.func import functional_call, grad, vmap

net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)


def loss(weights, x):
    return functional_call(net, weights, (x[None],)).square().sum()


for step in range(4):
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    gradients = vmap(grad(loss), (None, 0))(weights, torch.randn(6, 4))
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
    factors = 1 / (norms * (torch.arange(6) != step - 3 + 2))
    optimizer.zero_grad()
    for name, weight in net.named_parameters():
        weight.grad = torch.einsum("b...,b->...", gradients[name], factors)
    optimizer.step()
"""


def test_a_loop_whose_model_is_only_called_inside_transforms_is_attached_at_its_first_update():
    Path("script.py").write_text(DP_SGD)
    done = run("-m", "nanlocator", "script.py", start=interpreter)
    said = " ".join(done.stderr.split())
    assert done.returncode == 93, done.stderr
    assert "attached to SGD and Linear" in said
    assert "division by zero" in said and "factors = 1 / (norms" in said


CLOSURE = """
import torch

net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adagrad(net.parameters())
for step in range(1, 4):
    def closure():
        optimizer.zero_grad()
        loss = torch.log(net(torch.ones(3, 4)).square() * (step != BAD)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
"""


@pytest.mark.parametrize("bad", [1, 3])
def test_a_fault_in_a_closure_is_located_in_its_step_also_in_the_first(bad):
    Path("script.py").write_text(CLOSURE.replace("BAD", str(bad)))
    done = run("-m", "nanlocator", "script.py")
    said = " ".join(done.stderr.split())
    assert done.returncode == 93, done.stderr
    assert f"step {bad}: LEAVE IT DOWN" in said
    assert "logarithm of zero" in said and "loss = torch.log" in said


EVOLUTION = """
import torch

net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
x = torch.randn(8, 4)
for step in range(1, 4):
    total = [torch.zeros_like(p) for p in net.parameters()]
    for trial in range(3):
        noise = [torch.randn_like(p) for p in net.parameters()]
        with torch.no_grad():
            score = torch.func.functional_call(
                net, {n: p + 0.1 * d for (n, p), d in zip(net.named_parameters(), noise)}, (x,)
            ).square().mean()
            score = score / (score * (step != BAD))
        total = [t + score * d for t, d in zip(total, noise)]
    for p, t in zip(net.parameters(), total):
        p.grad = t
    optimizer.step()
"""


@pytest.mark.parametrize("bad", [1, 3])
def test_gradients_without_autograd_are_scanned_also_in_the_first_step(bad):
    Path("script.py").write_text(EVOLUTION.replace("BAD", str(bad)))
    done = run("-m", "nanlocator", "script.py")
    said = " ".join(done.stderr.split())
    assert f"step {bad}:" in said, done.stderr
    if bad == 1:  # nobody has seen how they were computed
        assert "it began before nanlocator was attached" in said
    else:
        assert "division by zero" in said and "score = score / (score" in said


@pytest.mark.parametrize("value", ["", "0", None])
def test_without_the_variable_nothing_is_imported(value):
    variables = {} if value is None else {"NANLOCATOR": value}
    done = run(
        "-c",
        "import sys; print([m for m in sys.modules if m.startswith(('nanlocator', 'torch'))])",
        as_installed=True,
        start=interpreter,
        **variables,
    )
    assert done.stdout == "[]\n"


def test_a_script_that_scans_by_itself_is_left_alone(script):
    text = Path(script).read_text()
    Path(script).write_text(
        text.replace("for step", "import nanlocator\nnanlocator.watch(model, optimizer)\nfor step")
    )
    done = run(script, "bad", as_installed=True, NANLOCATOR="1")
    assert "attached" not in done.stderr and done.stderr.count("ERROR[") == 2  # and the error's


def test_options_stand_before_the_script_and_reach_it_as_variables(script):
    done = run("-m", "nanlocator", "--on-bad", "report", "--output-dir", "elsewhere", script, "bad")
    assert done.returncode == 0, done.stderr
    assert Path("elsewhere/a0/verdict.json").exists()


@pytest.mark.parametrize("arguments", [[], ["nothing.py"], ["--on-bad", "shout", "train.py"]])
def test_wrong_use_exits_with_2_and_one_line(script, arguments):
    done = run("-m", "nanlocator", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith("; see python -m nanlocator --help\n")


def test_help_has_examples():
    done = run("-m", "nanlocator", "--help")
    assert done.returncode == 0 and "torchrun --nproc-per-node" in done.stdout


RESUMED = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in (100, 200):
    if step == 200:
        model.weight.data[0, 2] = float("nan")
    torch.save(model.state_dict(), f"checkpoints/step_{step}.pt")
model.load_state_dict(torch.load("checkpoints/step_200.pt"))
for step in range(300):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "file",
    ["{0}", "__import__('pathlib').Path({0})", "open({0}, 'rb')"],
    ids=["a name", "a path", "an open file"],
)
def test_the_checkpoint_that_a_script_has_loaded_is_read(file):
    Path("checkpoints").mkdir()
    Path("script.py").write_text(RESUMED.replace(name := '"checkpoints/step_200.pt"', file.format(name)))
    done = run("-m", "nanlocator", "--checkpoint-dir", "checkpoints", "script.py", start=interpreter)
    said = " ".join(done.stderr.split())
    assert "checkpoint, proven: step_200.pt, which this run had loaded: weight holds NaN" in said, done.stderr
    assert "NEVER LOAD step_200.pt (weight holds NaN)" in said
    assert "step_100.pt (after step 100): everything in it was read and is finite" in said


def test_a_weight_that_is_finite_in_the_loaded_checkpoint_became_bad_in_memory():
    Path("checkpoints").mkdir()
    after = 'model.weight.data[0, 2] = float("nan")\nfor step in range(300):'
    script = RESUMED.replace("step == 200", "False").replace("for step in range(300):", after)
    Path("script.py").write_text(script)
    done = run("-m", "nanlocator", "--checkpoint-dir", "checkpoints", "script.py", start=interpreter)
    said = " ".join(done.stderr.split())
    assert "step_200.pt, which this run had loaded, is finite, so it became bad in memory" in said
