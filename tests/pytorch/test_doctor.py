"""``nanlocator doctor``: an environment, a script that is not run, and what is wrong with either."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanlocator import doctor
from nanlocator.hooks import points

NANLOCATOR = Path(__file__).resolve().parents[2] / "build" / "release" / "bin" / "nanlocator"


def run(*arguments, command=(sys.executable, "-m", "nanlocator.doctor"), **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NANLOCATOR_")}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env={**environment, **variables}
    )


def test_here_all_is_well_and_the_script_is_read_and_not_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nopen('was_run', 'w')\n")
    folder = tmp_path / "runs" / "first"
    result = run("--json", script, NANLOCATOR_OUTPUT_DIR=str(folder))
    report = json.loads(result.stdout)
    assert (result.returncode, report["problems"], result.stderr) == (0, [], "")
    assert report["script"]["attaches"] == "nanlocator.watch"
    assert report["self_test"]["found"] == {
        "cause": "bad_weight",
        "module": "head",
        "parameter": "head.weight",
    }
    assert report["run_directory"]["path"] == str(folder) and not folder.exists()
    assert {row["place"] for row in report["points"]} == {point.place for point in points.TABLE}
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_what_is_wrong_is_said_with_what_to_do():
    result = run(NANLOCATOR_ON_BAD="explode")
    assert result.returncode == 1
    assert "problem: " in result.stdout and "on_bad is 'explode'" in result.stdout and "do: " in result.stdout
    assert "\033[" not in result.stdout


def test_wrong_use_ends_with_2_and_help_has_examples():
    assert run("no_such.py").returncode == 2
    assert run("--no-such").returncode == 2
    result = run("--help")
    assert result.returncode == 0 and "nanlocator doctor train.py" in result.stdout


@pytest.mark.skipif(not NANLOCATOR.is_file(), reason="needs the command")
def test_the_command_hands_over():
    result = run("doctor", "no_such.py", command=(str(NANLOCATOR),))
    assert result.returncode == 2 and "no_such.py cannot be read" in result.stderr
    assert "SCRIPT.py" in run("doctor", "--help", command=(str(NANLOCATOR),)).stdout


def test_a_point_that_is_lost_is_named_with_what_is_not_seen(monkeypatch):
    lost = points.Point("torch.nn:Module", "no_such", ("attach",), "calls of modules")
    monkeypatch.setattr(points, "TABLE", [lost])
    problems = []
    report = {
        "versions": doctor.versions(),
        "build": doctor.build([]),
        "gpus": [],
        "points": doctor.points_here(problems),
        "run_directory": {},
        "self_test": {"passed": True, "seconds": 2.0},
        "problems": problems,
    }
    text = doctor.text_of(report, verbose=False)
    assert "torch.nn.Module.no_such" in text and "not seen: calls of modules" in text
    assert len(problems) == 1 and "2.6 to 2.15" in problems[0]["do"]


def test_a_self_test_that_finds_nothing_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_planted_fault", lambda folder: {})
    problems = []
    assert not doctor.self_test(problems)["passed"]
    assert "found nothing" in problems[0]["problem"]


@pytest.mark.parametrize(
    ("text", "attaches"),
    [
        ("import torch", "nanlocator.watch"),
        ("from transformers import Trainer", "nanlocator.watch"),
        ("import deepspeed, torch", "nanlocator.deepspeed"),
        ("from megatron.core import parallel_state\nimport deepspeed", "nanlocator.megatron"),
        ("import beside", "nanlocator.deepspeed"),
        ("import nanlocator\nnanlocator.watch(model, optimizer)", "nothing"),
        ("from nanlocator import LocatingOptimizer as Locating\nLocating(optimizer, model)", "nothing"),
        ("import torch\nqueue.watch(1)", "nanlocator.watch"),
        ("print()", "nothing"),
    ],
)
def test_what_attaches_follows_from_what_a_script_imports(tmp_path, text, attaches):
    (tmp_path / "beside.py").write_text("import torch\nimport deepspeed\nimport train\n")
    script = tmp_path / "train.py"
    script.write_text(text)
    assert doctor.attachment_to(script)["attaches"] == attaches
