"""Runs that leave a bundle of a custom operator or a kernel, and replays of the bundle without the model, or,
for the exported script, without nanlocator."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ranks import RankServer, run_python

from nanlocator import _C

BUILD = Path(_C.__file__).parents[2]
_without_triton = RankServer("torch")  # its import reads the environment, and a bundle has its own

# A registration of `planted`, which returns NaN for negative numbers, and the import of a caller.
CUSTOM_OP = """
import numpy
import torch

FLOOR = 0.0


@torch.library.custom_op("planted::root", mutates_args=())
def root(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(numpy.sqrt(x.detach().numpy() * by) + FLOOR)


@root.register_fake
def _(x, by=1.0):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    (output,) = ctx.saved_tensors
    return gradient / (2 * output), None


root.register_autograd(_backward, setup_context=_setup)


def planted(x):
    return root(x, by=2.0)
"""

TRAINING = """
import nanlocator
from torch import nn


class Planted(nn.Module):
    def forward(self, x):
        return planted(x)


torch.manual_seed(0)
x = torch.randn(3, 4)
model = nn.Sequential(nn.Linear(4, 4), Planted(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
nanlocator.watch(model, optimizer)
model(x).square().mean().backward()
try:
    optimizer.step()
    raise SystemExit("nothing was found")
except nanlocator.NonFiniteGradientError as error:
    print(error.verdict["origins"][0]["operator"])
"""


def trained(files, folder="project", **variables):
    """Runs train.py of ``files`` in ``folder``; returns its operator and the bundle."""
    for name, text in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = run_python("train.py", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    for path in [Path(folder), *Path(folder).rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o022)  # whatever the umask, because --trust checks it
    (bundle,) = Path(folder).glob("nanlocator_run/*/bundles/*")
    return done.stdout.split()[-1], bundle.absolute()


def edited(bundle, edit):
    """Lets ``edit`` change the content of bundle.json; returns the bundle."""
    path = bundle / "bundle.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return bundle


def replayed(bundle, *options, importing_from="", cwd="elsewhere", **variables):
    """Replays the bundle in an empty folder, or in ``cwd``."""
    Path(cwd).mkdir(exist_ok=True)
    path = f"{os.environ.get('PYTHONPATH', '')}:{importing_from and Path(importing_from).absolute()}"
    return _without_triton.run_python(
        "-m", "nanlocator.replay", bundle, *options, cwd=cwd, PYTHONPATH=path.strip(":"), **variables
    )


def interpreter(*command, cwd, **variables):
    command, environment = [sys.executable, *map(str, command)], os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)


def exported(bundle, *arguments, importing_from="", start=run_python, **variables):
    """Runs the exported script without nanlocator."""
    Path("alone").mkdir(exist_ok=True)
    Path("alone/script.py").write_text(_C.export_python(bundle))
    Path("alone/nanlocator.py").write_text("raise ImportError('a script needs no nanlocator')")
    path = str(importing_from and Path(importing_from).absolute())
    return start("script.py", *arguments, cwd="alone", PYTHONPATH=path, **variables)
