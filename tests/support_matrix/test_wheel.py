"""tools/wheel, without building one: the chosen nvcc, its GPUs, and the messages."""

import os
import subprocess
from pathlib import Path

import pytest
import wheel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """An nvcc of this version in CUDA_HOME; none elsewhere."""

    def plant(release):
        nvcc = tmp_path / release / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
        return nvcc.parents[1]

    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(wheel, "SYSTEM_NVCC", tmp_path / "none")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return plant


@pytest.mark.parametrize(
    ("release", "fits"), [("12.8", True), ("12.4", True), ("13.0", False), ("11.8", False)]
)
def test_nvcc_is_of_torchs_major_version(plant, release, fits):
    home = plant(release)
    assert wheel.nvcc_of_this_machine("12.8") == (wheel.Nvcc(home, release) if fits else None)


def test_from_cuda_13_on_pip_has_an_nvcc():
    assert wheel.packages_of_toolkit("12.8") == wheel.packages_of_toolkit(None) == []
    assert "nvidia-cuda-nvcc==13.0.*" in wheel.packages_of_toolkit("13.0")


@pytest.mark.parametrize(
    ("release", "architectures"),
    [
        ("13.0", "80-real;90-real;100-real;120"),
        ("12.8", "80-real;90-real;100-real;120"),
        ("12.4", "80-real;90"),
    ],
)
def test_kernels_are_for_what_this_nvcc_knows_with_ptx_of_the_newest(release, architectures):
    nvcc = wheel.Nvcc(Path("/cuda"), release)
    assert f"-DCMAKE_CUDA_ARCHITECTURES={architectures}" in wheel.cmake_arguments(nvcc, None)
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in wheel.cmake_arguments(nvcc, "90")
    assert "-DNANLOCATOR_CUDA=OFF" in wheel.cmake_arguments(None, None)


def test_a_line_says_why_there_are_no_kernels():
    assert wheel.why_no_kernels(None) == "this torch has no CUDA"
    assert "CUDA 12.8; set CUDA_HOME to a toolkit of CUDA 12" in wheel.why_no_kernels("12.8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--python", "3"], "3 is no version such as 3.10"),
        (["--torch", "new"], "new is no version such as 2.8"),
        (["--cuda", "12"], "invalid choice"),
    ],
)
def test_wrong_use_is_one_line(arguments, said):
    done = subprocess.run([ROOT / "tools" / "wheel", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_a_python_that_is_not_here_is_one_line():
    done = subprocess.run(
        [ROOT / "tools" / "wheel", "--python", "3.99"], capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no Python 3.99" in done.stderr
