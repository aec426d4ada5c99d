"""`pip install . --no-build-isolation`, as users run it: package and command in a separate prefix."""

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
    source = ROOT / "integrations"
    kinds = ("*.py", "*.pyi", "nanlocator/**/*.txt", "py.typed")
    files = [file.relative_to(source) for kind in kinds for file in source.rglob(kind)]
    assert [str(file) for file in files if not (packages / file).is_file()] == []
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    code = (
        "import nanlocator, nanlocator.engine.options, torch; p = torch.nn.Linear(2, 2); "
        "o = nanlocator.LocatingOptimizer(torch.optim.SGD(p.parameters(), 0.1), p); "
        "p(torch.ones(1, 2)).sum().backward(); o.step(); print(nanlocator.__file__, nanlocator.__version__)"
    )
    printed = run(sys.executable, "-c", code, env=environment, cwd=tmp_path)
    assert str(packages) in printed
    assert printed.split()[-1] in run(prefix / "bin" / "nanlocator", "version")
    shown = run(prefix / "bin" / "nanlocator", "map", "show", tmp_path / "nanlocator_run" / "a0")
    assert "weight" in shown and "bias" in shown

    bad_step = (
        "import nanlocator, torch; p = torch.nn.Linear(2, 2); "
        "o = nanlocator.LocatingOptimizer(torch.optim.SGD(p.parameters(), 0.1), p, on_bad='report')\n"
        "def closure():\n    o.zero_grad(); loss = (p(torch.ones(1, 2)) * 0).log().sum(); loss.backward()\n"
        "    return loss\n"
        "o.step(closure); print(o.verdicts[0]['origins'][0]['bundle'])"
    )
    bundle = run(sys.executable, "-c", bad_step, env=environment, cwd=tmp_path).split()[-1]
    (folder,) = (tmp_path / "nanlocator_run").glob(f"a*/{bundle}")
    command = [str(prefix / "bin" / "nanlocator"), "replay", str(folder)]
    replayed = subprocess.run(command, capture_output=True, text=True)
    assert replayed.returncode == 1, replayed.stderr  # bad again
    assert "deterministic_undefined" in replayed.stdout
