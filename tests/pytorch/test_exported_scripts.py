"""Bundles of custom operators and of Triton's kernels, executed again in processes that know neither the
model nor, of the exported script, nanlocator."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import RankServer, run_python

import nanlocator
from nanlocator import _C
from nanlocator.calls.kernel_calls import KernelCallRecord, _import_kernel

BUILD = Path(_C.__file__).parents[2]
_without_triton = RankServer("torch")  # whose import reads the environment, of which a bundle has its own

# A registration gives `planted`, which is NaN for negative numbers, and what a caller imports.
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

# As torch.library's own functions register it: no line of this file is known to the dispatcher.
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

LOADED = f"""
import torch

torch.ops.load_library({str(BUILD / "tests" / "planted_operators.so")!r})


def planted(x):
    return x + torch.ops.planted_operators.root(x.detach())
"""

IMPORTED = f"""
import sys
import torch

sys.path.append({str(BUILD / "tests")!r})
import planted_operators


def planted(x):
    return x + torch.ops.planted_operators.root(x.detach())
"""

DERIVED = f"""
import torch

torch.ops.load_library({str(BUILD / "tests" / "planted_operators.so")!r})


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    return gradient / (2 * ctx.saved_tensors[0])


torch.library.register_autograd("planted_operators::root", _backward, setup_context=_setup)


def planted(x):
    return torch.ops.planted_operators.root(x)
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


REGISTRATIONS = {"custom_op": CUSTOM_OP, "Library": DEFINED, "define": DEFINED_BY_FUNCTIONS}


def registered_by(*usual):
    """Each way; those beside the `usual` are combinations of what other tests run."""
    marks = {kind: [] if kind in usual else pytest.mark.exhaustive for kind in REGISTRATIONS}
    cases = [pytest.param(text, id=kind, marks=marks[kind]) for kind, text in REGISTRATIONS.items()]
    return pytest.mark.parametrize("text", cases)


def trained(files, **variables):
    """Runs train.py of ``files`` in a folder of its own; its operator and the bundle."""
    for name, text in files.items():
        path = Path("project", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = run_python("train.py", cwd="project", **variables)
    assert done.returncode == 0, done.stderr
    (bundle,) = Path("project").glob("nanlocator_run/*/bundles/*")
    return done.stdout.split()[-1], bundle.absolute()


def registrations(bundle):
    return json.loads((bundle / "bundle.json").read_text())["operator_call"]["registered_by"]


def replayed(bundle, *options, **variables):
    """In a folder that has nothing."""
    Path("elsewhere").mkdir(exist_ok=True)
    return _without_triton.run_python(
        "-m", "nanlocator.replay", bundle, *options, cwd="elsewhere", **variables
    )


def interpreter(*command, cwd, **variables):
    command, environment = [sys.executable, *map(str, command)], os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)


def exported(bundle, argument, *, start=run_python, **variables):
    """Runs the exported script where there is no nanlocator."""
    Path("alone").mkdir(exist_ok=True)
    Path("alone/script.py").write_text(_C.export_python(bundle))
    Path("alone/nanlocator.py").write_text("raise ImportError('a script needs no nanlocator')")
    return start("script.py", argument, cwd="alone", PYTHONPATH="", **variables)


def exported_operator(bundle, start=run_python):
    done = exported(bundle, bundle / "tensors.safetensors", start=start)
    assert done.returncode == 0 and "nan" in done.stdout, done.stderr


def refusal(bundle):
    """Of this process, in which the operator is not registered either."""
    with pytest.raises((nanlocator.UnsupportedError, nanlocator.FormatError)) as raised:
        nanlocator.replay.run(bundle)
    return str(raised.value)


def is_bad_again(done):
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    return report["recorded"][0]["nan"] > 0 and report["is_bit_exact"]


def needs(text):
    if "planted_operators" in text and not (BUILD / "tests" / "planted_operators.so").exists():
        pytest.skip("planted_operators.so is built with the C++ tests")


@registered_by("custom_op")
def test_an_operator_of_a_module_is_replayed_and_exported_by_that_module(text):
    operator, bundle = trained(
        {"my_ops.py": text, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    assert operator == "planted::root"
    (found,) = registrations(bundle)
    assert (found["module"], found["file"]) == ("my_ops", str(Path("project/my_ops.py").absolute()))
    assert is_bad_again(replayed(bundle, "--json"))
    exported_operator(bundle)
    assert "registered by the module my_ops, which must be importable" in Path("alone/script.py").read_text()


@registered_by("define")
def test_elsewhere_the_statements_that_register_it_are_run_where_that_is_allowed(text):
    """The module that holds them is gone, and so is all else of it."""
    files = {"pkg/__init__.py": "", "pkg/helpers.py": "", "pkg/my_ops.py": f"from . import helpers\n{text}"}
    _, bundle = trained(files | {"train.py": "import torch\nfrom pkg.my_ops import planted\n" + TRAINING})
    shutil.rmtree("project/pkg")
    said = refusal(bundle)
    assert said.startswith("planted::root is not registered here. pkg.my_ops registered it and cannot be")
    assert "registration.py: if you trust where the bundle is from, --allow-source executes that" in said
    assert is_bad_again(replayed(bundle, "--json", "--allow-source"))
    exported_operator(bundle)


@registered_by("custom_op", "Library", "define")
def test_of_a_program_only_what_registers_the_operator_runs_again(text):
    operator, bundle = trained({"train.py": text + TRAINING})
    assert operator == "planted::root"
    (found,) = registrations(bundle)
    assert found["module"] == "__main__"
    source = (bundle / found["source"]).read_text()
    assert "sqrt" in source and "Linear" not in source and "randn" not in source
    assert is_bad_again(replayed(bundle, "--json"))
    Path("project/train.py").unlink()
    assert "it is the program that was run, and" in refusal(bundle)
    assert is_bad_again(replayed(bundle, "--json", "--allow-source"))
    exported_operator(bundle)


@pytest.mark.parametrize(
    ("text", "module"), [(LOADED, None), (IMPORTED, "planted_operators")], ids=["loaded", "imported"]
)
def test_an_operator_of_a_library_is_replayed_and_exported_by_that_library(text, module):
    needs(text)
    operator, bundle = trained({"train.py": text + TRAINING})
    assert operator == "planted_operators::root"
    (found,) = registrations(bundle)
    assert (found["module"], Path(found["file"]).name) == (module, "planted_operators.so")
    assert is_bad_again(replayed(bundle, "--json"))
    exported_operator(bundle)


def test_a_derivative_in_python_is_registered_beside_the_library_of_its_operator():
    needs(DERIVED)
    _, bundle = trained(
        {"my_ops.py": DERIVED, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    library, module = registrations(bundle)
    assert (Path(library["file"]).name, module["module"]) == ("planted_operators.so", "my_ops")
    source = (bundle / module["source"]).read_text()
    assert "register_autograd" in source and "load_library" not in source
    assert is_bad_again(replayed(bundle, "--json"))
    exported_operator(bundle)


def changed(bundle, **registration):
    path = bundle / "bundle.json"
    content = json.loads(path.read_text())
    content["operator_call"]["registered_by"][0] |= registration
    path.write_text(json.dumps(content))


def test_what_a_bundle_says_of_files_is_not_trusted_beyond_an_import():
    _, bundle = trained(
        {"my_ops.py": DEFINED, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    planted = "open('executed', 'w').close()"
    (bundle / "evil.py").write_text(planted)
    (bundle / "registration.py").write_text(planted)

    def said_of(**registration):
        changed(bundle, **registration)
        return refusal(bundle)

    assert "evil.py is a file of the bundle" in said_of(module="evil", file=f"{bundle}/evil.py")
    assert "evil.py is a file of the bundle" in said_of(module="__main__", file=f"{bundle}/evil.py")
    assert "No module named 'nowhere_ops'" in said_of(module="nowhere_ops", file="/nowhere/nowhere_ops.py")
    assert "/nowhere/libops.so is not here" in said_of(module=None, file="/nowhere/libops.so")
    assert "expected an absolute path" in said_of(module="evil", file="../evil.py")
    assert "is no name of a module" in said_of(module="evil; import os", file=None)
    (bundle / "json.py").write_text(planted)
    of_the_command = subprocess.run(["nanlocator", "replay", "."], cwd=bundle, capture_output=True, text=True)
    assert of_the_command.returncode == 2
    (bundle / "json.py").unlink()
    changed(bundle, module="evil", file=None)
    in_the_bundle = run_python("-m", "nanlocator.replay", bundle, cwd=bundle)
    assert in_the_bundle.returncode == 2 and "among the bundle's own files" in in_the_bundle.stderr
    assert not list(Path().rglob("executed"))


def test_a_script_holds_nothing_of_a_bundle_as_code():
    _, bundle = trained(
        {"my_ops.py": DEFINED, "train.py": "import torch\nfrom my_ops import planted\n" + TRAINING}
    )
    path = bundle / "bundle.json"
    content = json.loads(path.read_text())
    content["versions"]["torch"] = '2\n"""\nopen("executed", "w")\n"""'
    content["settings"]["autocast"] = 'cpu bfloat16), open("executed", "w'
    path.write_text(json.dumps(content))
    exported_operator(bundle, interpreter)
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
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
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
# A name that is not the function's own: the kernel cannot be written down by itself.
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


# One of each launcher, one with and one without its source.
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
    done = exported(bundle, bundle, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    counted = {line.split()[0]: int(line.split(") ")[1].split()[0]) for line in done.stdout.splitlines()}
    assert counted["x"] == 0 and counted["y"] > 0, done.stdout


@pytest.mark.parametrize("name", ["plain", "autotuned"])
def test_the_source_in_a_bundle_is_executed_where_that_is_allowed_and_nowhere_else(name):
    """The module is mended after the run: what replays is the module, or with consent what ran then."""
    bundle = trained_with_kernel(name, TRITON_PLANTED="then")
    path = Path("project/my_kernels.py")
    path.write_text(
        path.read_text().replace("root(tl.load(x + at, mask=mask), LEAST)", "tl.load(x + at, mask=mask)")
    )
    mended = replayed(
        bundle, TRITON_PLANTED="then", PYTHONPATH=f"{os.environ.get('PYTHONPATH')}:{path.parent.absolute()}"
    )
    assert (mended.returncode, "not_bad_again" in mended.stdout) == (0, True), mended.stderr
    assert "the environment's" not in mended.stdout
    allowed = replayed(bundle, "--allow-source", "--json", TRITON_OTHER="1")
    report = json.loads(allowed.stdout)
    assert allowed.returncode == 1 and report["conclusion"] not in ("not_bad_again", "not_replayed")
    assert report["environment"] == [
        {"name": "TRITON_OTHER", "recorded": None, "here": "1"},
        {"name": "TRITON_PLANTED", "recorded": "then", "here": None},
    ]
    shutil.rmtree("project/__pycache__", ignore_errors=True)
    for file in ("my_kernels.py", "helpers.py"):
        Path("project", file).unlink()
    refused = replayed(bundle)
    assert refused.returncode == 2 and "--allow-source executes that" in refused.stderr
    said = replayed(bundle, "--allow-source", TRITON_PLANTED="now")
    assert "the environment's TRITON_PLANTED was 'then' in training and is 'now' here" in said.stdout


@pytest.mark.parametrize(
    ("module", "entry", "launcher"),
    [
        ("os", "system", "function"),
        ("posix", "system", "function"),
        ("subprocess", "run", "function"),
        ("torch", "load", "function"),
        ("torch._C", "_cuda_synchronize", "function"),
        ("subprocess", "os", "triton"),
        ("os", "system", "triton"),
    ],
)
def test_what_a_bundle_calls_a_kernel_is_executed_only_where_it_is_one(module, entry, launcher, tmp_path):
    record = KernelCallRecord("planted::kernel", launcher, module, entry, "")
    with pytest.raises(nanlocator.UnsupportedError, match=r"is no (function of an ext|kernel of Triton)"):
        _import_kernel(record, tmp_path, None)


def test_no_file_from_beside_a_bundle_is_imported_as_a_kernel(tmp_path, monkeypatch):
    bundle = tmp_path / "bundles" / "step1-forward-rank0"
    other = tmp_path / "bundles" / "step2-forward-rank0"
    for folder in (bundle, other):
        folder.mkdir(parents=True)
        (folder / "bundle.json").write_text("{}")
        (folder / "kernel.py").write_text("raise SystemExit('executed')")
    for file in (bundle / "kernel.py", other / "kernel.py", "kernel.py", "bundles/../kernel.py"):
        record = KernelCallRecord("planted::kernel", "triton", "nowhere", "kernel", str(file))
        with pytest.raises(nanlocator.UnsupportedError, match="lies beside the bundle"):
            _import_kernel(record, bundle, None)
    monkeypatch.syspath_prepend(bundle)
    with pytest.raises(nanlocator.UnsupportedError, match="among the bundle's own files"):
        _import_kernel(KernelCallRecord("planted::kernel", "triton", "kernel", "kernel", ""), bundle, None)
