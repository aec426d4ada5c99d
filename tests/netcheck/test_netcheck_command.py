"""`nanlocator netcheck`, the command: what a person types, sees and gets as exit status."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import run_netcheck

from nanlocator.netcheck import run

COMMAND = shutil.which("nanlocator")
pytestmark = pytest.mark.skipif(COMMAND is None, reason="the nanlocator command is not on PATH")


def netcheck(*options: str) -> subprocess.CompletedProcess[str]:
    python_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [COMMAND, "netcheck", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": python_first, "OMP_NUM_THREADS": "1"},
    )


def test_a_wrong_option_ends_with_2_before_any_rank_starts():
    run = netcheck("--nproc-per-node", "2", "--tensor-parallel", "2")
    assert (run.returncode, run.stdout) == (2, "")
    assert "unknown option --tensor-parallel; see nanlocator netcheck --help" in run.stderr
    assert "netcheck: start" not in run.stderr


def test_help_is_the_checks_and_has_an_example():
    run = netcheck("--help")
    assert run.returncode == 0
    assert "nanlocator netcheck --nproc-per-node 8" in run.stdout


def test_healthy_ranks_end_with_0_and_the_familiar_lines():
    ((code, said, errors),) = run_netcheck("--nproc-per-node", "2", "--quick")
    assert code == 0, errors
    assert "is OK (global rank: 0/2)" in said
    assert "is OK (global rank: 1/2)" in said
    assert "verdict: healthy (2 ranks, gloo" in said


def test_a_finding_ends_with_1_and_json_is_one_object():
    run = netcheck("--nproc_per_node=2", "--quick", "--json", "--inject", "skew", "--rank", "1")
    assert run.returncode == 1, run.stderr
    assert json.loads(run.stdout)["verdict"] == "version skew"


def test_standard_output_is_kept_for_the_verdict(capfd):
    before = os.dup(1)
    try:
        kept = run._keep_stdout()
        os.write(1, b"a library's line\n")  # gloo before torch 2.11, NCCL_DEBUG=INFO
        os.write(kept, b"{}\n")
    finally:
        os.dup2(before, 1)
    assert capfd.readouterr() == ("{}\n", "a library's line\n")
