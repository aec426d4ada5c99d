"""Bundles of custom operators and of Triton's kernels, executed again in processes without the model; an
exported script runs without nanlocator too."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from replayed_bundles import BUILD, CUSTOM_OP, TRAINING, edited, exported, interpreter, replayed, trained

import nanlocator
from nanlocator import _C

DEFINED = """
import numpy
import torch

library = torch.library.Library("planted", "DEF")
library.define("root(Tensor x, *, float by) -> Tensor")


def _root(x, *, by):
    return torch.from_numpy(numpy.sqrt(x.numpy() * by))


library.impl("root", _root, "CPU")


def planted(x):
    return x + torch.ops.planted.root(x.detach(), by=2.0)
"""

# Registered by torch.library's own functions: the dispatcher knows no line of this file.
DEFINED_BY_FUNCTIONS = """
import numpy
import torch

NAMESPACE = "planted"
torch.library.define(f"{NAMESPACE}::root", "(Tensor x) -> Tensor")


@torch.library.impl(f"{NAMESPACE}::root", "cpu")
def _root(x):
    return torch.from_numpy(numpy.sqrt(x.numpy()))


def planted(x):
    return x + torch.ops.planted.root(x.detach())
"""

LOADED = """
import os
import torch

torch.ops.load_library(os.path.abspath("planted_operators.so"))


def planted(x):
    return x + torch.ops.planted_operators.root(x.detach())
"""

IMPORTED = """
import torch
import planted_operators


def planted(x):
    return x + torch.ops.planted_operators.root(x.detach())
"""

DERIVED = """
import os
import torch

torch.ops.load_library(os.path.join(os.path.dirname(os.path.abspath(__file__)), "planted_operators.so"))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    return gradient / (2 * ctx.saved_tensors[0])


torch.library.register_autograd("planted_operators::root", _backward, setup_context=_setup)


def planted(x):
    return torch.ops.planted_operators.root(x)
"""

REGISTRATIONS = {"custom_op": CUSTOM_OP, "Library": DEFINED, "define": DEFINED_BY_FUNCTIONS}


def registered_by(*usual):
    """All ways to register; those not in `usual` combine features that other tests run."""
    marks = {kind: [] if kind in usual else pytest.mark.exhaustive for kind in REGISTRATIONS}
    cases = [pytest.param(text, id=kind, marks=marks[kind]) for kind, text in REGISTRATIONS.items()]
    return pytest.mark.parametrize("text", cases)


def registrations(bundle):
    return json.loads((bundle / "bundle.json").read_text())["operator_call"]["registered_by"]


def exported_operator(bundle, *options, **where):
    tensors = bundle / "tensors.safetensors"
    done = exported(bundle, tensors, *options, **where)
    assert done.returncode == 0 and "nan" in done.stdout, done.stderr


def refused_export(bundle):
    """The error of an exported script that does not load the bundle's code."""
    done = exported(bundle, bundle / "tensors.safetensors")
    assert done.returncode == 1 and "nan" not in done.stdout
    return done.stderr


def refusal(bundle):
    """The error of a replay in this process, in which the operator is not registered either."""
    with pytest.raises((nanlocator.UnsupportedError, nanlocator.FormatError)) as raised:
        nanlocator.replay.run(bundle)
    return str(raised.value)


def is_bad_again(done):
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    return report["recorded"][0]["nan"] > 0 and report["is_bit_exact"]


@pytest.fixture
def planted_operators():
    """Copies the library into the program's folder."""
    built = BUILD / "tests" / "planted_operators.so"
    if not built.exists():
        pytest.skip("planted_operators.so is built with the C++ tests")
    Path("project").mkdir()
    shutil.copy(built, "project")


@registered_by("custom_op")
def test_an_operator_of_a_module_is_replayed_and_exported_by_the_modules_name(text):
    operator, bundle = trained(
        {"my_ops.py": text, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    assert operator == "planted::root"
    (found,) = registrations(bundle)
    assert (found["module"], found["file"]) == ("my_ops", str(Path("project/my_ops.py").absolute()))
    assert is_bad_again(replayed(bundle, "--json", importing_from="project"))
    exported_operator(bundle, importing_from="project")
    assert "registered by the module my_ops, which must be importable" in Path("alone/script.py").read_text()


@registered_by("define")
def test_elsewhere_the_statements_that_register_it_are_run_where_that_is_allowed(text, own_folder):
    """The whole package with their module is gone."""
    files = {"pkg/__init__.py": "", "pkg/helpers.py": "", "pkg/my_ops.py": f"from . import helpers\n{text}"}
    _, bundle = trained(files | {"train.py": "import torch\nfrom pkg.my_ops import planted\n" + TRAINING})
    shutil.rmtree("project/pkg")
    assert refusal(bundle) == (
        "planted::root is not registered here. pkg.my_ops registered it but was not loaded: "
        "ModuleNotFoundError: No module named 'pkg' (the current folder is not searched), and "
        f"{own_folder}/project/pkg/my_ops.py is not on this machine. The bundle contains registration.py: "
        "none of that was loaded. Install the package that provides pkg; or if you trust where the bundle "
        "came from: "
        f"nanlocator replay {bundle} --trust (in Python: trust=True)"
    )
    assert is_bad_again(replayed(bundle, "--json", "--trust"))
    assert f"--trust loads '{bundle}/registration.py'" in refused_export(bundle)
    exported_operator(bundle, "--trust")


@registered_by("custom_op", "Library", "define")
def test_of_a_program_only_what_registers_the_operator_runs_again(text, own_folder):
    operator, bundle = trained({"train.py": text + TRAINING})
    assert operator == "planted::root"
    (found,) = registrations(bundle)
    assert found["module"] == "__main__"
    source = (bundle / found["source"]).read_text()
    assert "sqrt" in source and "Linear" not in source and "randn" not in source
    assert "it is the training script itself. The bundle names" in refusal(bundle)
    assert is_bad_again(replayed(bundle, "--json", "--trust"))
    exported_operator(bundle, "--trust")
    (bundle / found["source"]).unlink()
    edited(bundle, without_source)
    assert is_bad_again(replayed(bundle, "--json", "--trust"))
    Path("project/train.py").unlink()
    assert "it is the training script itself, and" in refusal(bundle)


def without_source(content):
    (registration,) = content["operator_call"]["registered_by"]
    del content["files"][registration["source"]]
    registration["source"] = None


@pytest.mark.parametrize(
    ("text", "module"), [(LOADED, None), (IMPORTED, "planted_operators")], ids=["loaded", "imported"]
)
def test_an_operator_of_a_library_is_replayed_and_exported_by_that_library(
    text, module, own_folder, planted_operators
):
    operator, bundle = trained({"train.py": text + TRAINING})
    assert operator == "planted_operators::root"
    (found,) = registrations(bundle)
    assert (found["module"], Path(found["file"]).name) == (module, "planted_operators.so")
    if module:
        assert is_bad_again(replayed(bundle, "--json", importing_from="project"))
        exported_operator(bundle, importing_from="project")
    else:
        said = refusal(bundle)
        assert "only its file is known, no module. The bundle names" in said and "--load FILE.so" in said
        assert is_bad_again(replayed(bundle, "--json", "--load", found["file"]))
    assert is_bad_again(replayed(bundle, "--json", "--trust"))
    assert "planted_operators::root is not registered. --trust loads" in refused_export(bundle)
    exported_operator(bundle, "--trust")


def test_a_derivative_in_python_is_registered_beside_the_library_of_its_operator(
    own_folder, planted_operators
):
    _, bundle = trained(
        {"my_ops.py": DERIVED, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    library, module = registrations(bundle)
    assert (Path(library["file"]).name, module["module"]) == ("planted_operators.so", "my_ops")
    source = (bundle / module["source"]).read_text()
    assert "register_autograd" in source and "load_library" not in source
    by_name = replayed(bundle, "--json", importing_from="project")
    assert is_bad_again(by_name) and by_name.stderr == ""  # the module has loaded the library
    assert is_bad_again(replayed(bundle, "--json", "--trust"))
    exported_operator(bundle, importing_from="project")
    exported_operator(bundle, "--trust")


def test_a_script_holds_nothing_of_a_bundle_as_code():
    _, bundle = trained(
        {"my_ops.py": DEFINED, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    path = bundle / "bundle.json"
    content = json.loads(path.read_text())
    content["versions"]["torch"] = '2\n"""\nopen("executed", "w")\n"""'
    content["settings"]["autocast"] = 'cpu bfloat16), open("executed", "w'
    path.write_text(json.dumps(content))
    exported_operator(bundle, start=interpreter, importing_from="project")
    assert not list(Path().rglob("executed"))
    content["operator_call"]["operator"] = 'planted::root, open("executed", "w")'
    path.write_text(json.dumps(content))
    with pytest.raises(nanlocator.UnsupportedError, match="its recorded schema"):
        _C.export_python(bundle)


def test_the_command_takes_a_custom_operator_to_python_and_says_what_is_missing_without():
    if not (BUILD / "bin" / "nanlocator-replay").exists():
        pytest.skip("nanlocator-replay was not built")
    _, bundle = trained(
        {"my_ops.py": DEFINED, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    command = [BUILD / "bin" / "nanlocator", "replay", bundle, "--this-device-only"]
    environment = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path('project').absolute()}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 1 and "conclusion:" in done.stdout, done.stderr
    alone = subprocess.run([BUILD / "bin" / "nanlocator-replay", bundle], capture_output=True, text=True)
    assert alone.returncode == 2
    assert "my_ops registered it: `python -m nanlocator.replay` imports that" in alone.stderr
    shown = subprocess.run(
        [BUILD / "bin" / "nanlocator", "bundle", "show", bundle], capture_output=True, text=True
    )
    assert f"registered by my_ops, {Path('project/my_ops.py').absolute()}" in shown.stdout


# ---- Triton's kernels ----

HELPERS = """
import triton
import triton.language as tl


@triton.jit
def root(x, LEAST: tl.constexpr):
    return tl.sqrt(x) + LEAST
"""

KERNELS = {
    "plain": """
import triton
import triton.language as tl
from helpers import root

LEAST = tl.constexpr(0.0)


@triton.jit
def kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(y + at, root(tl.load(x + at, mask=mask), LEAST), mask=mask)


def launch(x, y):
    kernel[(triton.cdiv(x.numel(), 8),)](x, y, x.numel(), BLOCK=8)
""",
    "autotuned": """
import triton
import triton.language as tl
from helpers import root


@triton.autotune(configs=[triton.Config({"BLOCK": 8}, num_warps=2)], key=["count"])
@triton.heuristics({"LEAST": lambda arguments: 0.0})
@triton.jit
def kernel(x, y, count, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(y + at, root(tl.load(x + at, mask=mask), LEAST), mask=mask)


def launch(x, y):
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
""",
}
# A name that differs from the function's: the kernel's source cannot be written as a module.
KERNELS |= {
    f"{name} without source": text.replace("import root", "import root as square_root").replace(
        "root(tl.load", "square_root(tl.load"
    )
    for name, text in list(KERNELS.items())
}

LAUNCHING = """
import torch
from my_kernels import launch


def planted(x):
    y = torch.empty_like(x)
    launch(x.detach(), y)
    return x + y
"""


def trained_with_kernel(name, **variables):
    pytest.importorskip("triton")
    files = {"helpers.py": HELPERS, "my_kernels.py": KERNELS[name], "train.py": LAUNCHING + TRAINING}
    operator, bundle = trained(files, TRITON_INTERPRET="1", **variables)
    assert operator == "triton::kernel"
    return bundle


# One per launcher, one with and one without source.
USUAL = ("autotuned", "plain without source")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.exhaustive) for name in KERNELS]
)
def test_a_kernel_of_triton_runs_by_the_exported_script(name):
    bundle = trained_with_kernel(name)
    call = json.loads((bundle / "bundle.json").read_text())["kernel_call"]
    assert (call["module"], call["launcher"], call["source"]) == (
        "my_kernels",
        "triton",
        None if "without" in name else "kernel.py",
    )
    done = exported(bundle, bundle, importing_from="project", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    counted = {line.split()[0]: int(line.split(") ")[1].split()[0]) for line in done.stdout.splitlines()}
    assert counted["x"] == 0 and counted["y"] > 0, done.stdout


@pytest.mark.parametrize("name", ["plain", "autotuned"])
def test_the_source_in_a_bundle_is_executed_where_that_is_allowed_and_nowhere_else(name, own_folder):
    """The module is fixed after the run: a replay runs the fixed module, or with consent the old code."""
    bundle = trained_with_kernel(name, TRITON_PLANTED="then")
    path = Path("project/my_kernels.py")
    path.write_text(
        path.read_text().replace("root(tl.load(x + at, mask=mask), LEAST)", "tl.load(x + at, mask=mask)")
    )
    mended = replayed(bundle, importing_from="project", TRITON_PLANTED="then")
    assert (mended.returncode, "not_bad_again" in mended.stdout) == (0, True), mended.stderr
    assert "the variable" not in mended.stdout
    allowed = replayed(bundle, "--trust", "--json", TRITON_OTHER="1")
    report = json.loads(allowed.stdout)
    assert allowed.returncode == 1 and report["conclusion"] not in ("not_bad_again", "not_replayed")
    assert report["environment"] == [
        {"name": "TRITON_OTHER", "recorded": None, "here": "1"},
        {"name": "TRITON_PLANTED", "recorded": "then", "here": None},
    ]
    for argument, has_bad in (((), False), (("--trust",), True)):
        script = exported(bundle, bundle, *argument, importing_from="project", TRITON_INTERPRET="1")
        assert (re.search(r"^y .* [1-9]\d* NaN", script.stdout, re.M) is not None) == has_bad, script.stderr
    shutil.rmtree("project/__pycache__", ignore_errors=True)
    for file in ("my_kernels.py", "helpers.py"):
        Path("project", file).unlink()
    refused = replayed(bundle)
    assert refused.returncode == 2 and "The bundle contains kernel.py: none of that was" in refused.stderr
    script = exported(bundle, bundle, TRITON_INTERPRET="1")
    assert script.returncode == 1 and f"--trust loads '{bundle}/kernel.py'" in script.stderr
    said = replayed(bundle, "--trust", TRITON_PLANTED="now")
    assert "the variable TRITON_PLANTED was 'then' in training but is 'now' here" in said.stdout
