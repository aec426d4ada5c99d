"""Makes the environment of a cell: a virtual environment and a build for each torch and Python, and for each
version of a framework a folder in front of them on the path. They are made once and kept in build/matrix."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cells import ROOT, Cell, pins
from work import fresh, work

PLACE = ROOT / "build" / "matrix"
MEGATRON_REPOSITORY = "https://github.com/NVIDIA/Megatron-LM.git"
MEGATRON_IMPORTS = ["einops", "packaging"]  # beside torch and NumPy
TARGETS = ["nanlocator_python", "nanlocator_command", "nanlocator_replay", "nanlocator_planted_kernels"]
# A Python that can make an environment and has the headers to build an extension.
_IS_WHOLE = """
import ensurepip, pathlib, sys, sysconfig, venv
there = (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
sys.exit(not there or "%d.%d" % sys.version_info[:2] != sys.argv[1])
"""


@dataclasses.dataclass(frozen=True)
class Environment:
    python: Path  # the interpreter of the virtual environment
    build: Path
    logs: Path
    overlay: Path | None = None  # the framework's folder
    note: str = ""  # the commit of a branch's name

    @property
    def variables(self) -> dict[str, str]:
        """For the tests, without the user's own site-packages and PYTHONPATH."""
        paths = [self.build / "python", *filter(None, [self.overlay])]
        programs = [str(self.build / "bin"), str(self.python.parent), os.environ.get("PATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PATH": os.pathsep.join(programs),
            "PYTHONNOUSERSITE": "1",
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def alone(program: str) -> Iterator[None]:
    """Waits for another run in this checkout, which uses the same folders."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{program}: waiting for another run in this checkout ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- Python ---------------------------------------------------------------------------------------------


def find_python(version: str, home: Path | None = None) -> Path | None:
    """python3.X on PATH, else pyenv's newest 3.X; None if none works."""
    candidates = [Path(found)] if (found := shutil.which(f"python{version}")) else []
    versions = (home or Path.home()) / ".pyenv" / "versions"
    candidates += sorted(versions.glob(f"{version}.*/bin/python{version}"), key=_patch_version, reverse=True)
    return next((python for python in candidates if is_whole(python, version)), None)


def is_whole(python: Path, version: str) -> bool:
    """pyenv's shims are on PATH also for Pythons that are not selected, and then fail."""
    done = subprocess.run([python, "-c", _IS_WHOLE, version], capture_output=True)
    return done.returncode == 0


def _patch_version(python: Path) -> int:
    numbers = re.findall(r"\d+", python.parents[1].name)
    return int(numbers[2]) if len(numbers) > 2 else 0


# ---- torch and the build --------------------------------------------------------------------------------


def prepare(
    cell: Cell, python: Path, jobs: int, megatron_repository: str = MEGATRON_REPOSITORY
) -> Environment:
    """Returns this cell's environment, which it makes if needed. Raises CommandFailed."""
    if is_default(cell):
        environment = set_up(cell, python, TARGETS)
    else:
        environment = separate(cell, python)
        build(environment, jobs)
    return with_framework(environment, cell, megatron_repository)


def with_torch(cell: Cell, python: Path) -> Environment:
    """A virtual environment with the cell's torch, without a build. Raises CommandFailed."""
    return set_up(cell, python, ["--python-only"]) if is_default(cell) else separate(cell, python)


def is_default(cell: Cell) -> bool:
    """Whether .venv and build/release, which tools/setup makes, fit this cell."""
    if not (cell.torch == pins()["torch"] and cell.python == "3.11"):
        return False
    there = ROOT / ".venv" / "bin" / "python"
    return not there.exists() or is_whole(there, cell.python)


def set_up(cell: Cell, python: Path, arguments: list[str]) -> Environment:
    logs = PLACE / f"torch{cell.torch}-python{cell.python}" / "logs"
    command = [ROOT / "tools" / "setup", *arguments]
    work("setting up", command, fresh(logs / "setup.log"), os.environ | {"PYTHON": str(python)})
    return Environment(ROOT / ".venv" / "bin" / "python", ROOT / "build" / "release", logs)


def separate(cell: Cell, python: Path) -> Environment:
    folder = PLACE / f"torch{cell.torch}-python{cell.python}"
    environment = Environment(folder / "venv" / "bin" / "python", folder / "build", folder / "logs")
    install(environment, python, requirements_of(cell))
    return environment


def requirements_of(cell: Cell) -> list[str]:
    """Requirements of the build and the tests besides the framework. NumPy and safetensors are the newest for
    this Python."""
    fixed = pins()
    torch = cell.torch if cell.torch.count(".") == 2 else f"{cell.torch}.*"
    names = ("ninja", "nlohmann_json", "pytest", "pytest-xdist", "jsonschema")
    return [f"torch=={torch}", "numpy", "safetensors", *(f"{name}=={fixed[name]}" for name in names)]


def install(environment: Environment, python: Path, requirements: list[str]) -> None:
    venv = environment.python.parents[1]
    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:16]
    stamp = venv / f"installed-{digest}"
    if stamp.exists():
        return
    shutil.rmtree(venv, ignore_errors=True)
    log = fresh(environment.logs / "environment.log")
    work("virtual environment", [python, "-m", "venv", venv], log)
    work(f"installing {requirements[0]}", [*pip(environment.python), *requirements], log)
    stamp.touch()


def build(environment: Environment, jobs: int) -> None:
    """Runs always: ninja finds in a moment that all is up to date."""
    variables = environment.variables | {"CCACHE_BASEDIR": str(ROOT)}  # as in tools/setup
    log = fresh(environment.logs / "build.log")
    configure = [
        *("cmake", "-S", ROOT, "-B", environment.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
        "-DCMAKE_UNITY_BUILD=ON",
        f"-DPython3_EXECUTABLE={environment.python}",
        *("-DNANLOCATOR_BENCHMARKS=OFF", "-DNANLOCATOR_CUDA=OFF"),
    ]
    if not (environment.build / "build.ninja").exists():
        work("configuration", configure, log, variables)
    work(
        "build",
        ["cmake", "--build", environment.build, "-j", str(jobs), "--target", *TARGETS],
        log,
        variables,
    )


def pip(python: Path) -> list[str | Path]:
    # Bytecode is compiled at a module's first import: most of torch's modules are never imported.
    return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]


def made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """The folder, which is filled if it does not exist; an interrupted fill starts again."""
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        fill(unfinished)
        unfinished.rename(folder)
    return folder


# ---- frameworks -----------------------------------------------------------------------------------------


def with_framework(environment: Environment, cell: Cell, megatron_repository: str) -> Environment:
    """The same environment with the folder of the cell's framework in front."""
    is_there = environment.build == ROOT / "build" / "release" and pins().get(cell.framework) == cell.version
    if cell.framework == "pytorch" or is_there:
        return environment
    log = fresh(environment.logs / f"{cell.framework}-{cell.version}.log")
    if not cell.is_from_registry:
        overlay, note = megatron_of_repository(environment, cell.version, megatron_repository, log)
        return dataclasses.replace(environment, overlay=overlay, note=note)
    name = f"{cell.framework}-{cell.version}-python{cell.python}"
    overlay = made_once(
        PLACE / "frameworks" / name, lambda folder: install_framework(environment, cell, folder, log)
    )
    return dataclasses.replace(environment, overlay=overlay)


def install_framework(environment: Environment, cell: Cell, folder: Path, log: Path) -> None:
    command = [*pip(environment.python), "--target", folder]
    wanted = f"{cell.framework}=={cell.version}"
    label = f"installing {cell.framework_name}"
    if cell.framework == "megatron-core":  # some releases require packages that they do not import
        work(label, [*command, "--no-deps", wanted, *MEGATRON_IMPORTS], log)
    else:  # accelerate requires torch, which would be installed a second time
        work(label, [*command, wanted, "psutil"], log)
        work(label, [*command, "--no-deps", f"accelerate=={pins()['accelerate']}"], log)


def megatron_of_repository(
    environment: Environment, ref: str, repository: str, log: Path
) -> tuple[Path, str]:
    """The sources of a branch or tag, and its commit. No test uses the part that pip would compile, the
    helpers of its data sets."""
    clone = PLACE / "Megatron-LM.git"
    git = ["git", "-C", clone]
    if not clone.exists():
        work("git", ["git", "init", "--quiet", "--bare", clone], log)
    work(f"fetching {ref} of Megatron-LM", [*git, "fetch", "--depth", "1", repository, ref], log)
    read = {"capture_output": True, "text": True, "check": True}
    commit = subprocess.run([*git, "rev-parse", "FETCH_HEAD^{commit}"], **read).stdout.strip()
    info = subprocess.run([*git, "show", f"{commit}:megatron/core/package_info.py"], **read).stdout
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", info, re.MULTILINE))
    note = f"{version}, {commit[:8]}"

    def fill(folder: Path) -> None:
        archive = folder / "megatron.tar"
        work("git", [*git, "archive", "--format=tar", "--output", archive, commit, "megatron"], log)
        shutil.unpack_archive(archive, folder)
        archive.unlink()
        command = [*pip(environment.python), "--no-deps", "--target", folder, *MEGATRON_IMPORTS]
        work(f"installing {' and '.join(MEGATRON_IMPORTS)}", command, log)
        about = folder / f"megatron_core-{version}.dist-info"  # importlib.metadata reads the version there
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")

    return made_once(PLACE / "frameworks" / f"megatron-core-{commit[:12]}", fill), note
