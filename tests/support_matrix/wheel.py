"""Builds a wheel for one torch and one Python: the extension, the two commands and the CUDA kernels.

examples:
  tools/wheel                          for the torch and Python of tools/setup, into dist/
  tools/wheel --torch 2.8 --python 3.10
  tools/wheel --check                  then installs it into a bare virtual environment without a compiler on
                                       PATH, and locates, replays and reports a fault there
  tools/wheel --architectures 90       kernels for Hopper only
  tools/wheel --cuda none              no kernels: GPU tensors take the slow path

  pip install dist/nanlocator-*+torch2.11-cp311-*.whl     in any environment: no compiler, no root

The kernels are for sm_80 and sm_90, from CUDA 12.8 on also for sm_100 and sm_120, with PTX of the newest for
later GPUs. Their nvcc must have torch's major version of CUDA. --cuda auto uses that of CUDA_HOME, PATH or
/usr/local/cuda, else, from CUDA 13 on, pip's packages (--cuda packages always uses these). If none fits, the
wheel has no kernels, and a line says so. The wheel fits systems whose glibc and libstdc++ are at least as new
as this machine's.

Exit status: 0 the wheel is there, 1 something failed, 2 wrong use.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import environments
from cells import ROOT, SMOKE_TESTS, Cell, pins, python_version, torch_version, versions_of
from work import CommandFailed, fresh, last_lines, run_program, work

SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")
BUILD_TOOLS = ["cmake>=3.25,<4", "setuptools"]


def main() -> int:
    arguments = parse_arguments()
    cell = Cell(*versions_of(arguments.torch, arguments.python), "pytorch")
    python = environments.find_python(cell.python)
    if python is None:
        print(
            f"tools/wheel: no Python {cell.python} on PATH or among pyenv's, with its headers",
            file=sys.stderr,
        )
        return 1
    print(f"wheel for torch {cell.torch}, Python {cell.python}", flush=True)
    try:
        with environments.alone("tools/wheel"):
            environment = environments.with_torch(cell, python)
            wheel = build(environment, arguments)
        print(f"  {wheel}  ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)
        if arguments.check:
            check(wheel, python, environment.logs / "wheel-check.log")
            print("  in a bare environment: a fault is named, replayed and reported")
    except CommandFailed as error:
        print(f"{last_lines(error.log)}\ntools/wheel: {error}", file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/wheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", metavar="X", type=torch_version, help=f"default: {pins()['torch']}")
    parser.add_argument(
        "--python", metavar="P", type=python_version, help="default: the matrix's for this torch"
    )
    parser.add_argument("--cuda", choices=["auto", "packages", "none"], default="auto", help="default: auto")
    parser.add_argument(
        "--architectures", metavar="LIST", help="as CMAKE_CUDA_ARCHITECTURES: 90 or '80-real;90'"
    )
    parser.add_argument("--output", metavar="FOLDER", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument(
        "--check", action="store_true", help="try it in a bare environment (downloads torch again)"
    )
    return parser.parse_args()


# ---- building -------------------------------------------------------------------------------------------


def build(environment: environments.Environment, arguments: argparse.Namespace) -> Path:
    log = fresh(environment.logs / "wheel.log")
    cuda = None if arguments.cuda == "none" else cuda_of_torch(environment.python)
    nvcc = nvcc_of_this_machine(cuda) if cuda and arguments.cuda == "auto" else None
    packages = [] if nvcc else packages_of_toolkit(cuda)
    # In its own environment, so that torch's stays unchanged.
    name = f"build-tools-{environment.logs.parent.name}{'-nvcc' if packages else ''}"
    tools = environments.made_once(
        environments.PLACE / name,
        lambda folder: work(
            "build tools",
            [*environments.pip(environment.python), "--target", folder, *BUILD_TOOLS, *packages],
            log,
        ),
    )
    if packages:
        nvcc = Nvcc(tools / "nvidia" / f"cu{major(cuda)}", cuda)
    if nvcc:
        print(f"  kernels: nvcc {nvcc.version}{' of pip' if packages else ''}", flush=True)
    elif arguments.cuda != "none":
        print(f"  no kernels: {why_no_kernels(cuda)}", flush=True)
    paths = [str(tools / "bin"), str(environment.python.parent), os.environ["PATH"]]
    variables = environment.variables | {
        "CMAKE_ARGS": " ".join(cmake_arguments(nvcc, arguments.architectures)),
        "PYTHONPATH": str(tools),
        "PATH": os.pathsep.join(paths),
    }
    if nvcc:
        variables["CUDA_HOME"] = str(nvcc.home)
    for left in (ROOT / "build").glob("lib.*"):  # setuptools keeps files that are no longer in the sources
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory() as folder:
        command = [environment.python, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps"]
        work("wheel", [*command, "--no-build-isolation", "--wheel-dir", folder, ROOT], log, variables)
        (made,) = Path(folder).glob("*.whl")
        arguments.output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, arguments.output))


@dataclasses.dataclass(frozen=True)
class Nvcc:
    home: Path  # of the toolkit
    version: str  # 13.0


def major(version: str) -> int:
    return int(version.split(".")[0])


def cuda_of_torch(python: Path) -> str | None:
    """The "13.0" that this torch was built with; None for a torch without CUDA."""
    code = "import torch; print(torch.version.cuda or '')"
    return (
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        or None
    )


def nvcc_of_this_machine(cuda: str) -> Nvcc | None:
    """An nvcc whose kernels can run with a torch that was built with this CUDA."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home, "bin", "nvcc") for home in homes if home]
    candidates += [Path(on_path)] if (on_path := shutil.which("nvcc")) else []
    for nvcc in (*candidates, SYSTEM_NVCC):
        if nvcc.exists():
            said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"release (\d+\.\d+)", said)
            if version and major(version[1]) == major(cuda):
                return Nvcc(nvcc.resolve().parents[1], version[1])
    return None


def packages_of_toolkit(cuda: str | None) -> list[str]:
    """nvcc and its dependencies as pip's packages. Those of CUDA 12 contain no nvcc."""
    if cuda is None or major(cuda) < 13:
        return []
    return [
        f"nvidia-{name}=={cuda}.*" for name in ("cuda-nvcc", "cuda-crt", "cuda-runtime", "cuda-cccl", "nvvm")
    ]


def why_no_kernels(cuda: str | None) -> str:
    if cuda is None:
        return "this torch has no CUDA"
    return f"this torch is made with CUDA {cuda}; set CUDA_HOME to a toolkit of CUDA {major(cuda)}"


def cmake_arguments(nvcc: Nvcc | None, architectures: str | None) -> list[str]:
    if nvcc is None:
        return ["-DNANLOCATOR_RELOCATABLE=ON", "-DNANLOCATOR_CUDA=OFF"]
    has_blackwell = tuple(map(int, nvcc.version.split("."))) >= (12, 8)
    usual = "80-real;90-real;100-real;120" if has_blackwell else "80-real;90"
    chosen = f"-DCMAKE_CUDA_ARCHITECTURES={architectures or usual}"
    return ["-DNANLOCATOR_RELOCATABLE=ON", "-DNANLOCATOR_CUDA=ON", chosen]


# ---- a bare environment ---------------------------------------------------------------------------------


def check(wheel: Path, python: Path, log: Path) -> None:
    """Installs the wheel like a user, and runs the matrix's smoke test with nothing else on PATH."""
    fresh(log)
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        work("bare environment", [python, "-m", "venv", venv], log)
        own = venv / "bin" / "python"
        work("installing the wheel", [*environments.pip(own), wheel, "numpy", "pytest"], log)
        left_out = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV")
        variables = {name: value for name, value in os.environ.items() if name not in left_out}
        variables |= {"PATH": str(venv / "bin"), "PYTHONNOUSERSITE": "1"}
        tests = [ROOT / test for test in SMOKE_TESTS["pytorch"]]
        work("smoke test", [own, "-m", "pytest", "-q", "--rootdir", ROOT, *tests], log, variables)


if __name__ == "__main__":
    run_program(main)
