"""Every patch of foreign code is a row of nanlocator.hooks.points, and each row is valid here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from nanlocator.hooks import points

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "integrations" / "nanlocator"
DEEPSPEED = ROOT / ".setup" / "deepspeed"

# Code that sets foreign attributes and is no patch: state that a re-run restores, our own marks and objects.
SETS_ATTRIBUTES = {
    "hooks/patches.py": "the one place that patches",
    "state/communication_hooks.py": "what the program registered with its own hook, as it was",
    "state/switches.py": "switches of parallel modules, as the program had set them",
    "megatron/state.py": "counters of the re-run machine, as they were",
    "engine/options.py": "our own options",
    "engine/locator.py": "the mark of an optimizer or engine that is watched",
    "sharding/shards.py": "our own coordinates",
}
# What the interpreter sets for the program that it runs and its error; so does a launcher.
OF_SYS = {"sys.argv", "sys.last_type", "sys.last_value", "sys.last_traceback"}
# Names of the table that are assigned without a row.
ASSIGNS = {("debugger/autocast.py", "forward"): "a partial that can be pickled with its module"}


def modules():
    return {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}


def problems_of(path, text):
    """Patches in this module without a row."""
    tree = ast.parse(text)
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not (getattr(node, "module", None) or "").startswith("nanlocator")
        for alias in node.names
    }
    named = {point.attribute for point in points.TABLE}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "setattr" and path not in SETS_ATTRIBUTES:
                yield f"{path}:{node.lineno} calls setattr"
            if node.func.id in ("replace", "Point") and not path.startswith("hooks/"):
                yield f"{path}:{node.lineno} calls {node.func.id}: use Patches and a row of points"
            if node.func.id == "Patches" and ast.unparse(node.args[0]) != "__name__":
                yield f"{path}:{node.lineno} subscribes for another module"
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ():
            if not isinstance(target, ast.Attribute):
                continue
            owner = ast.unparse(target.value)
            is_foreign = owner.partition(".")[0] in imported
            is_point = owner != "self" and target.attr in named and (path, target.attr) not in ASSIGNS
            if (is_foreign and ast.unparse(target) not in OF_SYS) or is_point:
                yield f"{path}:{node.lineno} sets {ast.unparse(target)}"


def test_code_of_others_is_patched_by_the_register_alone():
    found = [each for path, file in modules().items() for each in problems_of(path, file.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.nn.Module.to = None",
        "from torch.nn.utils import clip_grad\nclip_grad.clip_grad_norm_ = None",
        "def f(engine):\n    engine.backward = None",
        "def f(module):\n    setattr(module, 'forward', None)",
        "from nanlocator.hooks.patches import replace\nreplace(object, 'name', None)",
        "from nanlocator.hooks.patches import Patches\nPatches('nanlocator.loops.watch')",
        "from nanlocator.hooks.points import Point\nPoint('torch', 'save', (), '')",
    ],
)
def test_a_patch_without_a_row_is_found(line):
    assert list(problems_of("loops/watch.py", line))


def test_subscribers_of_a_row_exist_and_every_row_has_one():
    known = {path.removesuffix(".py").replace("/", ".") for path in modules()}
    assert {by for point in points.TABLE for by in point.needed_by} <= known
    assert all(point.needed_by and point.lost and not point.lost.endswith(".") for point in points.TABLE)
    assert len({(point.owner, point.attribute) for point in points.TABLE}) == len(points.TABLE)


def test_every_row_holds_here_or_is_of_another_version():
    """With the versions that the suite runs with (docs/support.md)."""
    expected = {points.State.HOLDS, points.State.NOT_DUE, points.State.NOT_INSTALLED}
    of_objects = {  # made by the program, or not in a Python package
        "extension modules.functions",
        "megatron.training.training.setup_model_and_optimizer",
        "megatron.core.transformer.module.GraphableMegatronModule.cuda_graphs",
    }
    found = {point.place: point.state() for point in points.TABLE if point.package != "deepspeed"}
    wrong = {place: state for place, state in found.items() if state not in expected}
    assert wrong == dict.fromkeys(of_objects, points.State.PER_OBJECT)


def test_every_row_of_deepspeed_holds():
    """In its own process: other packages behave differently if they find DeepSpeed."""
    if not (DEEPSPEED / "deepspeed").is_dir():
        pytest.skip("needs what tools/setup fetches into .setup/deepspeed")
    program = (
        "import os, sys\n"
        "os.environ |= {'DS_ACCELERATOR': 'cpu', 'DS_BUILD_OPS': '0'}\n"
        f"sys.path.append({str(DEEPSPEED)!r})\n"
        "from nanlocator.hooks import points\n"
        "rows = [point for point in points.TABLE if point.package == 'deepspeed']\n"
        "print([point.place for point in rows if point.state() is not points.State.HOLDS], len(rows))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1].startswith("[] 1"), result.stdout + result.stderr


def test_a_version_decides_which_rows_are_due(monkeypatch):
    monkeypatch.setattr(points, "version_of", lambda package: "2.13.1")
    assert not points.PROCESS_GROUP["_allgather_base"].is_due()
    assert points.PROCESS_GROUP["all_gather_single"].is_due()
    monkeypatch.setattr(points, "version_of", lambda package: "2.12.0a0+cu130")
    assert points.PROCESS_GROUP["_allgather_base"].is_due()
    assert not points.PROCESS_GROUP["all_gather_single"].is_due()
