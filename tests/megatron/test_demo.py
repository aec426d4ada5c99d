"""tools/demo shows what it promises, and offers every fault."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "tools" / "demo.py"


def demo(*arguments, directory, pool):
    environment = {**os.environ, **pool.environment}
    return subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_demonstration_names_rank_module_and_operator_and_executes_it_again(pool, tmp_path):
    result = demo("--steps", "4", directory=tmp_path, pool=pool)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "conclusion: deterministic_undefined" in result.stdout
    assert "\033" not in result.stdout  # colours only on a terminal
    assert (tmp_path / "nanlocator_run" / "a0" / "verdict.json").exists()


def test_the_demonstration_names_the_fault_that_escapes_megatrons_norm(pool, tmp_path):
    two_ranks = ("--pp", "1", "--dp", "1")
    result = demo(
        *("--fault", "tp_duplicated_layernorm", "--steps", "4", *two_ranks), directory=tmp_path, pool=pool
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing to see." in result.stdout


def test_the_healthy_demonstration_is_bit_identical(pool, tmp_path):
    result = demo("--healthy", "--steps", "4", "--pp", "1", "--tp", "1", directory=tmp_path, pool=pool)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NO " not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "tp_duplicated_layernorm", "--tp", "1"],
        ["--fault", "nonsense"],
        ["--dp", "8"],
        ["--steps", "1"],
    ],
)
def test_wrong_use_ends_with_two_before_anything_is_started(pool, tmp_path, arguments):
    result = demo(*arguments, directory=tmp_path, pool=pool)
    assert result.returncode == 2
    assert "error:" in result.stderr


def test_the_demonstration_offers_faults_that_there_are(pool, tmp_path):
    def faults(script):
        text = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True).stdout
        return {line.split()[0] for line in text.split("faults:\n")[1].splitlines() if line.strip()}

    assert faults(DEMO) <= faults(ROOT / "examples" / "megatron_gpt" / "run_training.py")
