"""The scripts of real trainers, unedited, under NANLOCATOR=1: nothing changes in a healthy one, and the fault
of a bad one is located."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from expected import FAULTS
from ranks import RankServer
from strategy_ranks import TRAINERS

import nanlocator

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = Path(__file__).parents[2] / ".setup" / "trainers" / "bin" / "python"  # tools/setup makes it
PACKAGE = Path(nanlocator.__file__).parents[1]  # where nanlocator.pth is, too
_server = RankServer("trainer_imports", "torch._dynamo")
# Of each script one fault in the model and one in the loss; NANLOCATOR_TEST_ALL_FAULTS=1: all of them.
CASES = [
    (script, fault)
    for script, faults in FAULTS.items()
    for number, fault in enumerate(faults)
    if number == 0 or fault == "loss" or os.environ.get("NANLOCATOR_TEST_ALL_FAULTS")
]


@pytest.fixture(autouse=True)
def needs_packages():
    if not PYTHON.exists():
        pytest.skip(f"the trainers' packages are not installed: tools/setup makes {PYTHON}")


# The rest import what one of these imports, in the same order.
IN_AN_INTERPRETER = {
    *("plain_loop", "hf_trainer", "trl_sft", "accelerate_loop", "lightning_trainer", "lightning_fabric"),
    *("peft_lora", "verl_style"),
}


def environment(fault, variables):
    Path("sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(PACKAGE)!r})\n")
    Path("token").write_text("0" * 32)
    return {
        "RAY_AUTH_TOKEN_PATH": str(Path("token").absolute()),  # else it makes one in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(map(str, [os.getcwd(), PACKAGE, SCRIPTS])),
        "OMP_NUM_THREADS": "1",
        "FAULT": fault,
        **variables,
    }


def run(script, fault="none", **variables):
    """In a process that has imported the trainers before. What starts workers: in an interpreter."""
    if script == "verl_style":
        return run_interpreter(script, fault, **variables)
    set_variables = environment(fault, variables)
    set_variables["PYTHONPATH"] += f"{os.pathsep}{TRAINERS}"
    return _server.run_python(SCRIPTS / f"{script}.py", **set_variables)


def run_interpreter(script, fault="none", **variables):
    return subprocess.run(
        [PYTHON, SCRIPTS / f"{script}.py"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment(fault, variables)},
    )


def results(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("losses:", "weights:"))]


@pytest.mark.parametrize("script", FAULTS)
def test_a_healthy_script_computes_the_same_bits(script):
    alone = run(script)
    start = run_interpreter if script in IN_AN_INTERPRETER else run
    watched = start(script, NANLOCATOR="1", NANLOCATOR_RERUN="always")
    assert len(results(alone)) == 2
    assert results(watched) == results(alone)
    assert "attached to" in watched.stderr
    assert "other bits" not in watched.stderr and "not executed again" not in watched.stderr


@pytest.mark.parametrize(("script", "fault"), CASES)
def test_the_fault_of_a_script_is_located(script, fault):
    run(script, fault, NANLOCATOR="1", NANLOCATOR_OUTPUT_DIR=str(Path("run").absolute()))
    verdict = json.loads(Path("run/a0/verdict.json").read_text())
    expected = FAULTS[script][fault]
    origin = verdict["origins"][0]
    if expected.operator is None:  # it happened once: nothing to name but that
        assert origin["cause"] in ("not_reproduced", "memory_corruption")
        assert verdict["rerun"]["reproduced"] is False
        return
    assert expected.operator in (origin["operator"].split(".")[0], origin.get("forward_operator"))
    assert origin["phase"] == expected.phase
    assert (origin["module"] or "").endswith(expected.module or "")
    guilty = [
        number
        for number, line in enumerate((SCRIPTS / f"{script}.py").read_text().splitlines(), 1)
        if line.endswith(f"# the fault: {fault}")
    ]
    assert origin["code"]["line"] in guilty
