"""``on_finding``: what rank 0 does with a verdict, and that nothing of it changes the training."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import nanlocator
from nanlocator.engine.on_finding import OnFinding

LOOP = """
import os
import shlex
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 4)).mean()
    if step == 1:
        loss = torch.sqrt(loss * 0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RANKS = LOOP.replace(
    "model = torch.nn", 'torch.distributed.init_process_group("gloo")\nmodel = torch.nn'
).replace("optimizer =", "model = torch.nn.parallel.DistributedDataParallel(model)\noptimizer =")


def bad_step(**options):
    """Returns the error of a bad second step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer, **options)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
            for step in range(3):
                loss = model(torch.randn(8, 4)).mean()
                (torch.sqrt(loss * 0) if step == 1 else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watch.remove()
    return raised.value


def words_of(program):
    """A command of this Python."""
    return f"{sys.executable} -c '{program}'"


# ---- the two forms ------------------------------------------------------------------------------


def test_a_function_gets_the_verdict_on_disk_before_the_step_raises():
    told = []
    error = bad_step(on_finding=lambda path: told.append((path, json.loads(path.read_text()))))
    [(path, verdict)] = told
    assert isinstance(path, Path) and path.is_absolute() and path.name == "verdict.json"
    assert verdict["decision"] == error.verdict["decision"]
    assert verdict["decision"]["kind"] == "DO_NOT_RESTART"


def test_a_command_gets_the_path_as_its_last_word():
    bad_step(on_finding=words_of('import sys, shutil; shutil.copy(sys.argv[1], "copy.json")'))
    assert json.loads(Path("copy.json").read_text())["version"] == 3


def test_a_command_gets_the_path_in_place_of_braces_and_no_shell_reads_it(monkeypatch):
    program = 'import sys, json; json.dump(sys.argv[1:], open("words.json", "w"))'
    monkeypatch.setenv("NANLOCATOR_ON_FINDING", words_of(program) + " --verdict={} '$HOME;' last")
    bad_step(output_dir="a folder")
    verdict = str(Path("a folder/a0/verdict.json").absolute())
    assert json.loads(Path("words.json").read_text()) == [f"--verdict={verdict}", "$HOME;", "last"]


def test_a_job_that_goes_on_tells_each_finding():
    told = []
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer, on_bad="skip", on_finding=told.append)
    for step in range(4):
        loss = model(torch.randn(8, 4)).mean()
        (torch.sqrt(loss * 0) if step in (1, 2) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.remove()
    assert len(told) == len(watch.verdicts) == 2


# ---- nothing of it changes the training ---------------------------------------------------------


def leave(_):
    sys.exit(7)


def fail(_):
    raise OSError("no route to the pager")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (fail, "OSError: no route to the pager"),
        (leave, "SystemExit: 7"),
        (words_of("import sys; sys.exit(3)"), "ended with status 3"),
        (words_of("import os; os.kill(os.getpid(), 9)"), "was ended by signal 9"),
        ("no_such_program_of_nanlocator", "FileNotFoundError"),
        ("/", "PermissionError"),
    ],
)
def test_a_failure_is_one_line_and_the_verdict_is_raised_as_without(action, said, capfd):
    without = bad_step(output_dir="without").verdict
    capfd.readouterr()
    error = bad_step(on_finding=action)
    lines = [line for line in capfd.readouterr().err.splitlines() if "nanlocator: on_finding: " in line]
    assert len(lines) == 1 and said in lines[0], lines
    assert error.verdict["decision"] == without["decision"]
    assert len(error.verdict["origins"]) == len(without["origins"])


def test_a_command_is_killed_with_its_children_after_its_time(capfd):
    program = (
        "import subprocess, sys, time, os; "
        'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3); open(\\"late\\", \\"w\\")"]); '
        'open("begun", "w"); time.sleep(60)'
    )
    begin = time.monotonic()
    OnFinding(shlex.join([sys.executable, "-c", program]), seconds=1.5)(Path("verdict.json"))
    assert time.monotonic() - begin < 10
    assert "was killed after 1.5 s; training is not affected" in capfd.readouterr().err
    assert Path("begun").exists()
    time.sleep(3)
    assert not Path("late").exists()


def test_a_function_that_does_not_return_is_left_behind(capfd):
    begin = time.monotonic()
    OnFinding(lambda path: time.sleep(8), seconds=0.5)(Path("verdict.json"))
    assert time.monotonic() - begin < 4
    assert "has not returned in 0.5 s and is left behind" in capfd.readouterr().err


def test_a_command_is_neither_followed_nor_the_author_of_torchruns_record(monkeypatch):
    monkeypatch.setenv("NANLOCATOR", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")
    program = 'import json, os; json.dump(dict(os.environ), open("environment.json", "w"))'
    OnFinding(words_of(program))(Path("verdict.json"))
    passed = json.loads(Path("environment.json").read_text())
    assert {"NANLOCATOR", "TORCHELASTIC_ERROR_FILE"}.isdisjoint(passed) and "PATH" in passed


@pytest.mark.parametrize("value", ["", "   ", "one 'open quote", 7])
def test_what_is_neither_function_nor_command_is_wrong_use(value):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(nanlocator.UsageError, match=r"on_finding=.* cannot be read"):
        nanlocator.watch(model, torch.optim.SGD(model.parameters()), on_finding=value)


# ---- among ranks, and the status of the process -------------------------------------------------


def launched(folder, text, *words, **variables):
    (folder / "program.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *words, "program.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_under_torchrun_rank_0_alone_runs_it_to_its_end_and_the_other_waits(tmp_path):
    program = (
        "import os, time; time.sleep(3); "
        'open("told." + os.environ["RANK"], "a").write("x"); raise SystemExit(5)'
    )
    errors = tmp_path / "errors"
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(errors))
    done = launched(tmp_path, RANKS, *words, "-m", "nanlocator", NANLOCATOR_ON_FINDING=words_of(program))
    assert done.returncode == 1, done.stderr  # torchrun's own, for every failure of a worker
    assert [file.name for file in tmp_path.glob("told.*")] == ["told.0"], done.stderr
    assert (tmp_path / "told.0").read_text() == "x"
    assert done.stderr.count("on_finding: ") == 1 and "ended with status 5" in done.stderr
    # torchrun's summary and its error file have the status and the block.
    assert "exitcode  : 93" in done.stderr
    recorded = [json.loads(file.read_text()) for file in errors.rglob("error.json")]
    assert recorded and all("  restart NO |" in each["message"]["message"] for each in recorded)


def test_a_launched_script_ends_with_the_status_of_the_decision(tmp_path):
    done = launched(tmp_path, LOOP, "-m", "nanlocator")
    assert done.returncode == 93, done.stderr
    assert done.stderr.count("  restart NO |") == 1
    assert "nanlocator.NonFiniteGradientError: nanlocator ERROR[" in done.stderr
    caught = LOOP.replace("    optimizer.step()", "    try: optimizer.step()\n    except Exception: pass")
    assert launched(tmp_path, caught, "-m", "nanlocator").returncode == 0
    own = LOOP.replace("loss.backward()", "raise SystemExit(4)")
    assert launched(tmp_path, own, "-m", "nanlocator").returncode == 4


@pytest.mark.parametrize(
    ("decision", "status"),
    [
        ({"kind": "RESTART_AS_IS", "traced": False}, 90),
        ({"kind": "EXCLUDE", "traced": False}, 91),
        ({"kind": "SKIP_BATCH", "traced": False}, 92),
        ({"kind": "DO_NOT_RESTART", "traced": False}, 93),
        ({"kind": "OLDER_CHECKPOINT", "traced": False}, 94),
        ({"kind": "RESTART_AS_IS", "traced": True}, 95),
        ({"kind": "OLDER_CHECKPOINT", "traced": True}, 95),
        (None, 1),
        ({"kind": "OF_A_LATER_VERSION"}, 1),
    ],
)
def test_each_decision_has_its_status_and_the_documents_have_it(decision, status):
    assert nanlocator.NonFiniteGradientError("text", {"decision": decision}).exit_status == status
    text = (Path(__file__).resolve().parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    row = "traced" if decision and decision.get("traced") else (decision or {}).get("kind")
    if status != 1:
        assert f"\n| {status} | `{row}`" in text
