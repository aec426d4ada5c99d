"""`python -m nanlocator.megatron script.py`: an unedited script with nanlocator on its model.

The script's `megatron.training` is a small one of this test around real Megatron-Core, which only the
script's folder has.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from ranks import run_python

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "megatron_gpt"
pytestmark = pytest.mark.megatron

TRAINING = """
import datetime, sys
sys.path.append({example!r})
from gpt_training import Trainer, TrainingConfig
from faults import attach, make_fault
import torch.distributed as dist

def setup_model_and_optimizer(config):
    trainer = Trainer(config)
    return trainer.model_chunks, trainer.optimizer, trainer

def pretrain(steps, faults, rank_1_raises):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    config = TrainingConfig(hidden=32, sequence=16, num_microbatches=2, layers=2)
    _, optimizer, trainer = setup_model_and_optimizer(config)
    attach([make_fault(**fault) for fault in faults], trainer)
    if rank_1_raises and dist.get_rank() == 1:
        trainer.train(1)
        raise ValueError("no data in shard 7")
    trainer.train(steps)
    dist.destroy_process_group()
    return optimizer
"""

# Bound by name before any call, like in Megatron-LM's own package.
PRETRAIN = """
import json, os, sys
from megatron.training import pretrain
if os.environ["RANK"] == "0":
    print(json.dumps([__name__, sys.argv, sys.path[0]]), flush=True)
fault = {"name": "main_grad_element", "rank": 1, "iteration": 2, "value": float("nan")}
optimizer = pretrain(3, [fault] if "--fault" in sys.argv else [], "--raise" in sys.argv)
if os.environ["RANK"] == "0":
    print("trained 3 steps", hasattr(optimizer, "_nanlocator"))
"""


@pytest.fixture
def project(tmp_path):
    """A folder with pretrain.py and its own training package."""
    package = tmp_path / "project" / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .training import pretrain\n")
    (package / "training.py").write_text(TRAINING.format(example=str(EXAMPLE)))
    (tmp_path / "project" / "pretrain.py").write_text(PRETRAIN)
    return tmp_path / "project"


@pytest.fixture
def launch(pool, tmp_path):
    """Runs the launcher in an empty folder; `ranks`: under torchrun."""

    def run(*arguments, ranks=None, launched_by="nanlocator.megatron", **environment):
        folder = tmp_path / "elsewhere"
        recorded = tmp_path / "recorded"
        for each in (folder, recorded):
            each.mkdir(exist_ok=True)
        command = ["-m", launched_by, *map(str, arguments)]
        variables = {**pool.environment, "OMP_NUM_THREADS": "1", **environment}
        if ranks is None:
            return run_python(*command, cwd=folder, **variables)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        # torchrun copies the error file of the root cause to its own.
        variables["TORCHELASTIC_ERROR_FILE"] = str(recorded / "error.json")
        return subprocess.run(
            [sys.executable, *launcher, *command],
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=180,
        )

    return run


def root_cause(result):
    """The part of torchrun's final summary about the rank that failed first."""
    return result.stderr.partition("Root Cause (first observed failure):")[2]


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_nan_in_an_unedited_script_stops_it_with_one_verdict(project, launch, tmp_path):
    run = tmp_path / "run"
    result = launch(
        *("--output-dir", run, "--level", "grads", "--rerun", "no"),
        *(project / "pretrain.py", "--fault", "--level", "script's own", "--", "-h"),
        ranks=2,
    )
    assert result.returncode == 1, result.stderr
    name, argv, first_path = json.loads(result.stdout.splitlines()[0])
    assert name == "__main__"
    assert argv == [str(project / "pretrain.py"), "--fault", "--level", "script's own", "--", "-h"]
    assert first_path == str(project)
    verdict = json.loads((run / "a0" / "verdict.json").read_text())
    (origin,) = verdict["origins"]
    assert (verdict["iteration"], origin["coordinates"]["rank"]) == (2, 1)
    status = json.loads((run / "a0" / "status.json").read_text())
    assert (status["state"], status["iteration"], status["silent_ranks"]) == ("stopped", 2, [])
    # The block is printed once; every rank's traceback and torchrun's summary show its first line.
    headline = "NonFiniteGradientError: nanlocator ERROR["
    assert result.stderr.count("  restart ") == 1, result.stderr
    assert headline in root_cause(result), result.stderr
    for rank in (0, 1):
        assert f"[rank{rank}]: nanlocator.{headline}" in result.stderr, result.stderr
    recorded = json.loads((tmp_path / "recorded" / "error.json").read_text())
    assert "  restart " in recorded["message"]["message"]
    assert "trained 3 steps" not in result.stdout
    for noise in ("Connection reset", "Connection closed", "has not answered"):
        assert noise not in result.stderr, result.stderr


def test_the_launcher_of_any_script_chooses_megatrons_integration(project, launch, tmp_path):
    run = tmp_path / "run"
    result = launch(
        *("--output-dir", run, "--rerun", "no", project / "pretrain.py", "--fault"),
        ranks=2,
        launched_by="nanlocator",
    )
    assert result.returncode == 1, result.stderr
    verdict = json.loads((run / "a0" / "verdict.json").read_text())
    assert (verdict["iteration"], verdict["origins"][0]["coordinates"]["rank"]) == (2, 1)
    assert json.loads((run / "a0" / "run.json").read_text())["integration"] == "megatron"
    assert "attached to" not in result.stderr


def test_a_healthy_script_ends_as_without_the_launcher(project, launch, tmp_path):
    result = launch(project / "pretrain.py", ranks=2, NANLOCATOR_LEVEL="grads", NANLOCATOR_OUTPUT_DIR="logs")
    assert result.returncode == 0, result.stderr
    assert "trained 3 steps True" in result.stdout
    assert "installed on nothing" not in result.stderr
    written = {path.name for path in (tmp_path / "elsewhere/logs/a0").iterdir()}
    assert {name for name in written if not name.startswith("param_")} == {"run.json"}
    assert not list((tmp_path / "recorded").iterdir())


def test_the_others_and_torchrun_tell_of_the_exception_that_ended_a_rank(project, launch, tmp_path):
    run = tmp_path / "run"
    result = launch("--output-dir", run, "--level", "grads", project / "pretrain.py", "--raise", ranks=2)
    assert result.returncode == 1
    status = json.loads((run / "a0" / "status.json").read_text())
    assert (status["state"], status["silent_ranks"]) == ("rank_lost", [1]), result.stderr
    for file in ("verdict.json", "verdict_rank0.json"):
        verdict = json.loads((run / "a0" / file).read_text())
        assert (verdict["status"], verdict["silent_ranks"], verdict["origins"]) == ("partial", [1], [])
        assert verdict["notes"][0].startswith("rank 1 (dp1, host ")
        assert verdict["notes"][0].endswith(") ended by ValueError: no data in shard 7 (in iteration 1).")
    assert not (run / "a0" / "verdict_rank1.json").exists()
    assert "ended by ValueError: no data in shard 7 (in iteration 1); see " in result.stderr
    assert "ValueError: no data in shard 7" in root_cause(result), result.stderr
    assert 'raise ValueError("no data in shard 7")' in root_cause(result)  # with its line in the script


def test_a_loop_of_ones_own_gets_it_from_get_megatron_optimizer(launch, tmp_path):
    text = f"""
import sys
sys.path.append({str(EXAMPLE)!r})
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from gpt_training import Trainer, TrainingConfig
trainer = Trainer(TrainingConfig(hidden=32, sequence=16, num_microbatches=2))
print("installed", hasattr(trainer.optimizer, "_nanlocator"))
"""
    result = launch("--level", "grads", script(tmp_path, text))
    assert result.returncode == 0, result.stderr
    assert "installed True" in result.stdout


@pytest.mark.parametrize(
    ("text", "code", "in_stderr"),
    [
        ("import sys; sys.exit(3)", 3, "installed on nothing"),
        ("raise ValueError('of the script')", 1, "ValueError: of the script"),
        ("pass", 0, "installed on nothing"),
    ],
)
def test_exit_code_and_traceback_are_the_scripts(launch, tmp_path, text, code, in_stderr):
    result = launch(script(tmp_path, text))
    assert result.returncode == code
    assert in_stderr in result.stderr
    if code == 1:
        assert f'File "{tmp_path / "script.py"}", line 1' in result.stderr


def test_an_option_wins_over_its_variable_and_the_others_are_left_alone(launch, tmp_path):
    text = "import os; print({k: v for k, v in sorted(os.environ.items()) if k.startswith('NANLOCATOR_')})"
    options = ("--on-bad", "skip", "--no-check-params", "--gather-deadline", "7.5", "--max-incidents", "2")
    result = launch(
        *options,
        script(tmp_path, text),
        NANLOCATOR_ON_BAD="report",
        NANLOCATOR_CHECK_PARAMS="1",
        NANLOCATOR_RERUN="0",
    )
    assert eval(result.stdout) == {
        "NANLOCATOR_CHECK_PARAMS": "0",
        "NANLOCATOR_GATHER_DEADLINE": "7.5",
        "NANLOCATOR_MAX_INCIDENTS": "2",
        "NANLOCATOR_ON_BAD": "skip",
        "NANLOCATOR_RERUN": "0",
    }


def test_wrong_use_explains_itself(launch, tmp_path):
    missing = launch("no_such_script.py")
    assert missing.returncode == 2 and "no_such_script.py" in missing.stderr
    wrong = launch("--on-bad", "explode", "script.py")
    assert wrong.returncode == 2 and "recover" in wrong.stderr
    shown = launch("--help")
    assert shown.returncode == 0
    assert "torchrun --nproc-per-node 8 -m nanlocator.megatron" in shown.stdout
    assert "[NANLOCATOR_GATHER_DEADLINE]" in shown.stdout
