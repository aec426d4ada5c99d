"""Builds the extension and the `nanlocator` command with CMake. The metadata is in pyproject.toml.

The extension must be built against the Torch that it will run with, so install with
    pip install . --no-build-isolation
in the environment that has Torch.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    import setuptools.command.bdist_wheel  # noqa: F401  (part of setuptools since 70.1)
except ImportError:
    try:
        import wheel  # noqa: F401
    except ImportError:
        sys.exit("building nanlocator needs setuptools 70.1 or newer: pip install --upgrade 'setuptools<82'")

SOURCE = Path(__file__).parent.resolve()
BUILD = Path("build") / "pip"  # relative: setuptools wants data files inside the source tree


def minor_of_torch() -> str | None:
    """The "2.11" of the torch that the extension is built against: it fits no other. None if nothing is
    built."""
    try:
        return ".".join(metadata.version("torch").split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


def project_version() -> str:
    return re.search(r"project\(nanlocator VERSION ([\d.]+)", (SOURCE / "CMakeLists.txt").read_text())[1]


class CMakeBuild(build_ext):
    def run(self) -> None:
        if not shutil.which("cmake"):
            sys.exit("nanlocator is built with CMake 3.25 or newer, and there is no cmake on PATH")
        configure = [
            "cmake", "--fresh", "-S", SOURCE, "-B", BUILD,  # the last build may have been for another Torch
            "-DCMAKE_BUILD_TYPE=Release",
            "-DCMAKE_UNITY_BUILD=ON",
            f"-DPython3_EXECUTABLE={sys.executable}",
            "-DNANLOCATOR_TESTS=OFF",
            "-DNANLOCATOR_BENCHMARKS=OFF",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True)
        jobs = str(os.cpu_count() or 1)
        environment = {"CCACHE_BASEDIR": str(SOURCE), **os.environ}  # reuses objects of other builds
        targets = ["nanlocator_python", "nanlocator_command", "nanlocator_replay"]
        subprocess.run(
            ["cmake", "--build", BUILD, "-j", jobs, "--target", *targets], check=True, env=environment
        )
        is_editable = getattr(self, "editable_mode", False) or self.inplace
        package = (SOURCE / "integrations" if is_editable else Path(self.build_lib)) / "nanlocator"
        package.mkdir(parents=True, exist_ok=True)
        if not is_editable:
            shutil.copy(SOURCE / "integrations" / "nanlocator.pth", self.build_lib)
        for name in ("_C.so", "_build_info.py"):
            shutil.copy(BUILD / "python" / "nanlocator" / name, package / name)


class Project(Distribution):
    # setuptools calls this when it installs data files beside an editable package (editable_wheel.py).
    has_data = Distribution.has_data_files


# CMAKE_ARGS=-DNANLOCATOR_DEBUGGER=OFF also leaves out that room's Python.
left_out = re.findall(r"-DNANLOCATOR_(NETCHECK|DEBUGGER)=OFF", os.environ.get("CMAKE_ARGS", ""))

torch = minor_of_torch()

setup(
    version=project_version() + (f"+torch{torch}" if torch else ""),
    install_requires=[f"torch=={torch}.*" if torch else "torch>=2.6,<2.16"],
    packages=find_packages(
        "integrations",
        include=["nanlocator*"],
        exclude=[f"nanlocator.{room.lower()}*" for room in left_out],
    ),
    package_dir={"": "integrations"},
    py_modules=["nanlocator_autoload", "nanlocator_after_import", "nanlocator_pytest"],
    package_data={"nanlocator": ["py.typed", "*.pyi", "calls/kernel_signatures.txt"]},
    ext_modules=[Extension("nanlocator._C", sources=[])],  # makes the wheel platform-specific
    distclass=Project,
    cmdclass={"build_ext": CMakeBuild},
    data_files=[("bin", [str(BUILD / "bin" / name) for name in ("nanlocator", "nanlocator-replay")])],
)
