"""The command `nanlocator netcheck`: its arguments, output and exit status."""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import run_netcheck

from nanlocator.netcheck import run
from nanlocator.netcheck.options import parse

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


@pytest.mark.parametrize("command", [["netcheck", "--quick"], ["replay", "BUNDLE", "--trust"]])
def test_without_the_package_one_line_says_what_to_install_and_help_is_help(command, tmp_path):
    def done(*words, **variables):
        return subprocess.run(
            [tmp_path / "nanlocator", *words], capture_output=True, text=True, env={"PATH": "", **variables}
        )

    shutil.copy(COMMAND, tmp_path)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    (tmp_path / "python").chmod(0o700)
    missing = done(*command)
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert "needs the Python package nanlocator" in missing.stderr and "install it" in missing.stderr
    (tmp_path / "packages" / "nanlocator").mkdir(parents=True)
    (tmp_path / "packages" / "nanlocator" / "__init__.py").write_text("raise ImportError('of another torch')")
    misfit = done(*command, PYTHONPATH=str(tmp_path / "packages"))
    assert misfit.returncode == 2 and "(of another torch)" in misfit.stderr
    assert "Traceback" not in misfit.stderr
    helped = done(command[0], "--help")
    assert (helped.returncode, helped.stderr) == (0, "") and command[-1] in helped.stdout


def test_help_of_the_module_is_that_of_the_command():
    module = subprocess.run(
        [sys.executable, "-m", "nanlocator.netcheck", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert (module.returncode, module.stdout) == (0, netcheck("--help").stdout), module.stderr


@pytest.mark.parametrize(
    "option, wrong, expected",
    [
        ("--max-bytes", "much", "8 to 64G"),
        ("--dtypes", "fp32,fp8", "fp8 is not one of fp32"),
        ("--nproc-per-node", "all", "a number, auto, gpu or cpu"),
        ("--deadline", "0", "seconds from 1 to 3600"),
        ("--inject", "corrupted", "(did you mean corrupt?)"),
        ("--inject", "corrupt", "--inject and --rank must be given together"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_what_is_expected(option, wrong, expected):
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()) as said:
        parse([option, wrong])
    assert ended.value.code == 2
    assert said.getvalue().startswith("nanlocator: --") and expected in said.getvalue()
    assert said.getvalue().endswith("; see nanlocator netcheck --help\n")


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
