"""``nanlocator doctor``: checks whether nanlocator works here, and what it would attach to a script.

The script is read, not run. tools/command/doctor_options.hpp has the options.
"""

import ast
import contextlib
import io
import json
import os
import platform
import shutil
import site
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanlocator
from nanlocator import _C, _build_info
from nanlocator.engine.options import resolve_options
from nanlocator.hooks import points

_FRAMEWORKS = (
    "megatron-core",
    "deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "triton",
)
# Calls by which a script sets up nanlocator itself.
_OWN = ("watch", "LocatingOptimizer", "NanLocatorCallback", "install")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. --help and wrong options end the program."""
    options = _C.parse_doctor(sys.argv[1:] if arguments is None else arguments)
    report: dict[str, Any] = {}
    if options.script:
        try:
            report["script"] = attachment_to(Path(options.script))
        except (OSError, SyntaxError, ValueError) as error:
            problem = f"{options.script} cannot be read as a Python script: {error}"
            print(f"nanlocator: {problem}; see nanlocator doctor --help", file=sys.stderr)
            return 2
    problems: list[dict[str, str]] = []
    with _quiet():
        report = {
            "versions": versions(),
            "build": build(problems),
            "gpus": gpus(problems),
            "points": points_here(problems),
            "hook": hook(),
            **report,
            "run_directory": run_directory(problems),
            "self_test": self_test(problems),
            "problems": problems,
        }
    print(json.dumps(report, indent=1) if options.json else text_of(report, verbose=options.verbose))
    return 1 if problems else 0


# --- checks ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """None: not installed."""
    return {
        "nanlocator": nanlocator.__version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
        **{name: points.version_of(name) or None for name in _FRAMEWORKS},
    }


def build(problems: list[dict[str, str]]) -> dict[str, Any]:
    if torch.version.cuda and not _build_info.CUDA:
        problem = "nanlocator was built without CUDA kernels: GPU tensors are scanned on the slow path"
        problems.append({"problem": problem, "do": "rebuild it where nvcc is installed (docs/install.md)"})
    return {name: value for name, value in vars(_build_info).items() if name.isupper()}


def gpus(problems: list[dict[str, str]]) -> list[str]:
    try:
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    except RuntimeError as error:
        problems.append({"problem": f"the GPUs cannot be used: {error}", "do": "check nvidia-smi"})
        return []


def hook() -> str | None:
    """The file that makes NANLOCATOR=1 attach to a script that is not edited; None: it has no effect."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    files = (Path(folder, "nanlocator.pth") for folder in folders)
    return next((str(file) for file in files if file.is_file()), None)


def points_here(problems: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Every row of the register. Imports the frameworks that are installed."""
    states = {each: each.state() for each in points.TABLE}
    for package in dict.fromkeys(
        each.package for each, state in states.items() if state is points.State.LOST
    ):
        tested = points.TESTED.get(package, "")
        problems.append(
            {
                "problem": f"{package} {points.version_of(package)} lacks functions that nanlocator patches",
                "do": (f"use a tested version ({tested})" if tested else "report it")
                + "; until then a verdict's coverage says what is not seen",
            }
        )
    return [
        {"place": each.place, "package": each.package, "state": state.value, "lost": each.lost}
        for each, state in states.items()
    ]


def run_directory(problems: list[dict[str, str]]) -> dict[str, Any]:
    try:
        options = resolve_options({}, "watch")
    except nanlocator.Error as error:
        problems.append(
            {"problem": str(error), "do": "correct or unset the variable NANLOCATOR_... that has this value"}
        )
        return {}
    folder = Path(options.output_dir).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        problems.append(
            {
                "problem": f"findings cannot be written: this user has no write access to {existing}",
                "do": "set NANLOCATOR_OUTPUT_DIR to a writable folder",
            }
        )
    elif free < options.bundle_bytes:
        problems.append(
            {
                "problem": f"only {_size(free)} are free in {existing}, but the bundles of one rank may take "
                f"{_size(options.bundle_bytes)}",
                "do": "free some space, choose another folder (NANLOCATOR_OUTPUT_DIR), or allow fewer bytes "
                "(NANLOCATOR_BUNDLE_BYTES)",
            }
        )
    return {"path": str(folder), "free_bytes": free, "bundle_bytes": options.bundle_bytes}


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.embed(x)))


def self_test(problems: list[dict[str, str]]) -> dict[str, Any]:
    """A healthy step of a tiny model, then one with a NaN in a weight: the verdict must name it."""
    begin = time.monotonic()
    found: dict[str, Any] = {}
    failure = ""
    generator = torch.random.get_rng_state()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = _planted_fault(folder)
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        torch.random.set_rng_state(generator)
    expected = {"cause": "bad_weight", "module": "head", "parameter": "head.weight"}
    if not failure and found != expected:
        failure = f"it found {found or 'nothing'} instead of {expected}"
    if failure:
        problems.append(
            {
                "problem": f"the self-test failed: {failure}",
                "do": "reinstall nanlocator for this torch (docs/install.md); if it still fails, report it "
                "with the output of nanlocator doctor --json",
            }
        )
    seconds = round(time.monotonic() - begin, 1)
    return {"passed": not failure, "found": found, "failure": failure, "seconds": seconds}


def _planted_fault(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _Tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer, output_dir=folder, on_bad="report", level="grads")
    try:
        for step in range(2):
            if step == 1:
                with torch.no_grad():
                    model.head.weight[1, 2] = float("nan")
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and watch.verdicts:
                raise RuntimeError("a healthy step got a verdict")
        origins = [origin for verdict in watch.verdicts for origin in verdict["origins"]]
        return {name: origins[0].get(name) for name in ("cause", "module", "parameter")} if origins else {}
    finally:
        watch.remove()


# --- what would attach to a script -----------------------------------------------------------------------


def attachment_to(script: Path) -> dict[str, str]:
    """What ``python -m nanlocator`` would attach, judged by the imports of the script and its neighbours."""
    imported, own = _read(script, set())
    roots = {name.partition(".")[0] for name in imported}
    megatron = sorted(name for name in imported if name.startswith(("megatron.core", "megatron.training")))
    if own:
        attaches, why = "nothing", f"the script itself calls {', '.join(sorted(own))}"
    elif megatron:
        attaches, why = (
            "nanlocator.megatron",
            f"it imports {megatron[0]}; installed when its optimizer is created",
        )
    elif "deepspeed" in roots:
        attaches, why = "nanlocator.deepspeed", f"installed in {points.INITIALIZE.place}"
    elif "torch" in roots or roots & {"transformers", "accelerate", "lightning", "pytorch_lightning", "trl"}:
        attaches = "nanlocator.watch"
        why = "attached at the first call of a module that an optimizer trains"
    else:
        attaches, why = (
            "nothing",
            "neither the script nor a module in its folder imports torch or a framework",
        )
    start = f"python -m nanlocator {script}" if attaches != "nothing" else ""
    return {"path": str(script), "attaches": attaches, "why": why, "start": start}


def _read(file: Path, seen: set[Path]) -> tuple[set[str], set[str]]:
    """The imports of ``file`` and of modules in its folder, and their calls that set up nanlocator."""
    seen.add(file)
    imported: set[str] = set()
    own: set[str] = set()
    ours: set[str] = set()  # local names of such functions
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if node.module.partition(".")[0] == "nanlocator":
                ours |= {alias.asname or alias.name for alias in node.names if alias.name in _OWN}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_attribute = called.startswith("nanlocator.") and called.rpartition(".")[2] in _OWN
            if is_attribute or called in ours:
                own.add(called)
        imported.update(names)
        for name in names:
            beside = file.parent / f"{name.partition('.')[0]}.py"
            if beside not in seen and beside.is_file():
                with contextlib.suppress(SyntaxError, ValueError, OSError):
                    more, more_own = _read(beside, seen)
                    imported |= more
                    own |= more_own
    return imported, own


# --- output ----------------------------------------------------------------------------------------------


def text_of(report: dict[str, Any], *, verbose: bool) -> str:
    bold, red, green, plain = ("\033[1m", "\033[31m", "\033[32m", "\033[0m") if _has_colors() else ("",) * 4
    lines: list[str] = []

    def row(name: str, text: str) -> None:
        lines.append(f"{bold}{name:<14}{plain}{text}")

    there = {name: version for name, version in report["versions"].items() if version}
    row("versions", ", ".join(f"{name} {version}" for name, version in there.items()))
    made = report["build"]
    kernels = f"CUDA kernels by nvcc {made['CUDA_COMPILER_VERSION']}" if made["CUDA"] else "no CUDA kernels"
    row("built for", f"torch {made['TORCH_VERSION']}, Python {made['PYTHON_VERSION']}, {kernels}")
    row("GPUs", ", ".join(report["gpus"]) or "none")
    counts = Counter(each["state"] for each in report["points"])
    row("points", ", ".join(f"{number} {state}" for state, number in counts.items()))
    for each in report["points"]:
        if verbose or each["state"] == points.State.LOST.value:
            lines.append(f"{'':14}{each['state']:<22} {each['place']}")
        if each["state"] == points.State.LOST.value:
            lines.append(f"{'':16}not seen: {each['lost']}")
    row("NANLOCATOR=1", report.get("hook") or "no effect: nanlocator.pth, which pip installs, is missing")
    if script := report.get("script"):
        row("script", f"{script['path']}: {script['attaches']} ({script['why']})")
        if script["start"]:
            lines.append(f"{'':14}{script['start']}")
    if directory := report["run_directory"]:
        row("run directory", f"{directory['path']}, {_size(directory['free_bytes'])} free")
    test = report["self_test"]
    outcome = "passed: the planted NaN was found in head.weight" if test["passed"] else "FAILED"
    row("self-test", f"{outcome}, {test['seconds']} s")
    for each in report["problems"]:
        lines += ["", f"{red}problem:{plain} {each['problem']}", f"     do: {each['do']}"]
    if not report["problems"]:
        lines += ["", f"{green}All is well.{plain}"]
    return "\n".join(lines)


def _has_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the output of frameworks that are imported, and the self-test's verdict, which the engine writes
    to the process's stderr."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.dup2(nowhere.fileno(), 2)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
