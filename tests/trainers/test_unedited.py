"""The scripts of real trainers, unedited, under NANLOCATOR=1: healthy runs do not change, and each fault is
located."""

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
PACKAGE = Path(nanlocator.__file__).parents[1]  # also has nanlocator.pth
_server = RankServer("trainer_imports", "torch._dynamo")
# One fault of each script, so that each kind is born in the model and in the loss of a loop, a Trainer and
# Lightning; the others differ only in the formula.
USUAL_FAULTS = {
    "plain_loop": ("norm", "loss"),
    "gan": ("loss",),
    "torchtune_style": ("sqrt",),
    "hf_trainer": ("loss", "once"),
    "trl_sft": ("norm",),
    "trl_dpo": ("log",),
    "trl_grpo": ("loss",),
    "accelerate_loop": ("norm",),
    "lightning_trainer": ("loss",),
    "lightning_fabric": ("log",),
    "peft_lora": ("norm",),
    "verl_style": ("loss",),  # in Ray's worker
}
CASES = [
    pytest.param(script, fault, marks=() if fault in USUAL_FAULTS[script] else pytest.mark.exhaustive)
    for script, faults in FAULTS.items()
    for fault in faults
]


@pytest.fixture(autouse=True)
def needs_packages():
    if not PYTHON.exists():
        pytest.skip(f"the trainers' packages are not installed: tools/setup makes {PYTHON}")


# Run in a new interpreter: one each of the scripts that import only torch, transformers' Trainer and
# Lightning. Ray's script does so with its fault.
IN_AN_INTERPRETER = {"plain_loop", "trl_sft", "lightning_trainer"}
IN_AN_INTERPRETER_TOO = ("hf_trainer", "accelerate_loop", "lightning_fabric", "peft_lora", "verl_style")


def environment(fault, variables):
    Path("sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(PACKAGE)!r})\n")
    Path("token").write_text("0" * 32)
    return {
        "RAY_AUTH_TOKEN_PATH": str(Path("token").absolute()),  # otherwise Ray makes one in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(map(str, [os.getcwd(), PACKAGE, SCRIPTS])),
        "OMP_NUM_THREADS": "1",
        "FAULT": fault,
        **variables,
    }


def run(script, fault="none", **variables):
    """Runs in a process that has already imported the trainers; also does the work of Ray's worker."""
    set_variables = environment(fault, variables)
    set_variables["PYTHONPATH"] += f"{os.pathsep}{TRAINERS}"
    arguments = ["--local"] if script == "verl_style" else []
    return _server.run_python(SCRIPTS / f"{script}.py", *arguments, **set_variables)


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


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("script", "start"),
    [
        *((script, run_interpreter if script in IN_AN_INTERPRETER else run) for script in FAULTS),
        *(pytest.param(s, run_interpreter, marks=pytest.mark.exhaustive) for s in IN_AN_INTERPRETER_TOO),
    ],
)
def test_a_healthy_script_computes_the_same_bits(script, start):
    alone = run(script)
    watched = start(script, NANLOCATOR="1", NANLOCATOR_RERUN="always")
    assert len(results(alone)) == 2
    assert results(watched) == results(alone)
    assert "attached to" in watched.stderr
    assert "other bits" not in watched.stderr and "not executed again" not in watched.stderr


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("script", "fault"), CASES)
def test_the_fault_of_a_script_is_located(script, fault):
    start = run_interpreter if (script, fault) == ("verl_style", "loss") else run
    start(script, fault, NANLOCATOR="1", NANLOCATOR_OUTPUT_DIR=str(Path("run").absolute()))
    verdict = json.loads(Path("run/a0/verdict.json").read_text())
    expected = FAULTS[script][fault]
    origin = verdict["origins"][0]
    if script == "verl_style":  # it looks at the norm and leaves the update out: nothing runs once more
        assert verdict["job"]["is_discarded"] and origin["cause"] == "unknown"
        assert verdict["rerun"]["done"] is False
        return
    if expected.operator is None:  # it happened once: there is nothing else to name
        assert origin["cause"] in ("not_reproduced", "memory_corruption", "unknown")
        assert verdict["rerun"]["reproduced"] is False
        return
    assert expected.operator in (origin["operator"].split(".")[0], origin.get("forward_operator"))
    assert origin["phase"] == expected.phase
    assert (origin["module"] or "").endswith(expected.module or "")
    file = SCRIPTS / Path(origin["code"]["file"]).name
    assert file.stem in (script, "tiny_llama")
    guilty = file.read_text().splitlines()[origin["code"]["line"] - 1]
    assert guilty.endswith(f"# the fault: {fault}")
