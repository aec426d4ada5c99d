"""`pip install . --no-build-isolation`, as a user does it: package and command in a prefix of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_pip_install_gives_the_package_and_the_command(tmp_path):
    prefix = tmp_path / "prefix"
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
    run(*pip, "--no-build-isolation", "--no-deps", "--ignore-installed", "--prefix", prefix, ROOT)
    (packages,) = prefix.glob("lib*/python*/site-packages")
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    code = (
        "import nanlocator, nanlocator.session, torch; p = torch.nn.Linear(2, 2); "
        "o = nanlocator.LocatingOptimizer(torch.optim.SGD(p.parameters(), 0.1), p); "
        "p(torch.ones(1, 2)).sum().backward(); o.step(); print(nanlocator.__file__, nanlocator.__version__)"
    )
    printed = run(sys.executable, "-c", code, env=environment, cwd=tmp_path)
    assert str(packages) in printed
    assert printed.split()[-1] in run(prefix / "bin" / "nanlocator", "version")
    shown = run(prefix / "bin" / "nanlocator", "map", "show", tmp_path / "nanlocator_run" / "a0")
    assert "weight" in shown and "bias" in shown
