"""The command and the function: exit codes, JSON, text, progress, deadlines."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import trained
from safetensors.torch import save_file

import nanlocator
from nanlocator import check_checkpoint
from nanlocator.check_checkpoint import sources
from nanlocator.check_checkpoint.program import main
from nanlocator.check_checkpoint.text import text_of

COMMAND = Path(__file__).resolve().parents[2] / "build" / "release" / "bin" / "nanlocator"


def run(*arguments, command=(sys.executable, "-m", "nanlocator.check_checkpoint")):
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def checkpoints(tmp_path):
    """A run with a good and a bad checkpoint."""
    model, optimizer = trained()
    for number, value in ((1, 0.5), (2, math.nan)):
        folder = tmp_path / "run" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        model[1].weight.data[2, 3] = value
        save_file(model.state_dict(), folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return tmp_path / "run"


def test_the_exit_codes_are_those_of_the_help(checkpoints, capsys):
    assert main([str(checkpoints / "checkpoint-1")]) == 0
    assert "safe to load" in capsys.readouterr().out
    assert main([str(checkpoints)]) == 1
    out = capsys.readouterr().out
    assert "checkpoint-2: do not load it: the weights hold NaN or Inf" in out
    assert "finite    weights no, optimizer yes" in out
    assert "1.weight  float32 [8, 8]  in model.safetensors (weights)" in out and "the first at [2, 3]" in out
    os.truncate(checkpoints / "checkpoint-1" / "optimizer.pt", 100)
    assert main([str(checkpoints / "checkpoint-1")]) == 3
    assert "not known to be safe" in capsys.readouterr().out
    assert main([str(checkpoints / "no_such")]) == 2
    assert main([str(checkpoints), "--alone", "--compare", str(checkpoints)]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_all_names_the_newest_that_is_safe(checkpoints, capsys):
    assert main([str(checkpoints), "--all"]) == 1
    assert f"newest that is safe to load: {checkpoints / 'checkpoint-1'}" in capsys.readouterr().out


def test_json_has_what_the_text_says(checkpoints, capsys):
    assert main([str(checkpoints), "--json", "--parameter", "0.bias"]) == 1
    report = json.loads(capsys.readouterr().out)
    (checkpoint,) = report["checkpoints"]
    assert (report["version"], report["safe"], report["exit_code"]) == (1, False, 1)
    assert checkpoint["contents"] == {"weights": "bad", "optimizer": "finite"}
    (finding,) = checkpoint["findings"]
    assert (finding["name"], finding["statistics"]["first_bad"]) == ("1.weight", [2, 3])
    (selected,) = checkpoint["selected"]
    model, _ = trained()
    assert selected["statistics"]["absmax"] == pytest.approx(float(model[0].bias.detach().abs().max()))


@pytest.mark.skipif(not COMMAND.is_file(), reason="needs the command")
def test_the_command_and_the_module_are_one_program(checkpoints):
    text = [
        run(checkpoints, command=command).stdout
        for command in [(COMMAND, "check-checkpoint"), (sys.executable, "-m", "nanlocator.check_checkpoint")]
    ]
    assert "do not load it" in text[0]
    assert [line for line in text[0].splitlines() if "  read " not in line] == [
        line for line in text[1].splitlines() if "  read " not in line
    ]
    module = run("--help")
    assert module.returncode == 0 and module.stderr == "" and "--compare OTHER" in module.stdout
    assert run("--help", command=(COMMAND, "check-checkpoint")).stdout == module.stdout
    assert run(checkpoints, "--wrong").returncode == 2


def test_the_module_imports_nothing_from_the_folder_of_a_checkpoint(checkpoints):
    (checkpoints / "safetensors.py").write_text("open('executed', 'w')")
    (checkpoints / "nanlocator.py").write_text("open('executed', 'w')")
    done = subprocess.run(
        [COMMAND, "check-checkpoint", "."], cwd=checkpoints, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and not (checkpoints / "executed").exists()


def test_the_name_is_the_function_whatever_is_imported(checkpoints):
    import nanlocator.check_checkpoint.report

    assert nanlocator.check_checkpoint is check_checkpoint and callable(nanlocator.check_checkpoint)


def test_wrong_arguments_raise(checkpoints):
    with pytest.raises(nanlocator.UsageError, match="which"):
        check_checkpoint(checkpoints, which="some")
    with pytest.raises(nanlocator.UsageError, match="deadline_s"):
        check_checkpoint(checkpoints, deadline_s=-1)


def test_a_missing_path_is_in_the_report(tmp_path):
    report = check_checkpoint(tmp_path / "no_such")
    assert report.exit_code == 3 and "no such file" in report.problem and report.is_safe is None


def slowly(monkeypatch, seconds_of):
    """Each read waits for as long as `seconds_of` its file's label says."""
    read = sources.File.read_into

    def read_into(self, buffer, offset):
        time.sleep(seconds_of(self.label, len(buffer)))
        read(self, buffer, offset)

    monkeypatch.setattr(sources.File, "read_into", read_into)


def test_when_the_time_is_up_what_is_known_is_returned(tmp_path, monkeypatch):
    """A file system that no longer answers: the optimizer's file does not come."""
    weights = {"a": torch.tensor([math.nan]), "b": torch.ones(3)}
    torch.save({"model": weights}, tmp_path / "model.pt")
    torch.save(
        {"state": {0: {"exp_avg": torch.ones(3_000_000)}}, "param_groups": []}, tmp_path / "optimizer.pt"
    )
    slowly(monkeypatch, lambda label, length: 30 if label == "optimizer.pt" and length > 1 << 20 else 0)
    began = time.monotonic()
    report = check_checkpoint(tmp_path, deadline_s=2)
    assert time.monotonic() - began < 4
    (checkpoint,) = report.checkpoints
    assert not checkpoint.complete and report.exit_code == 1
    assert [each.tensor.name for each in checkpoint.findings] == ["model.a"]
    assert checkpoint.contents == {"weights": "bad", "optimizer": "unknown"}
    assert "the time was up" in text_of(report)
    known = (len(checkpoint.findings), checkpoint.bytes_read)
    time.sleep(0.5)
    assert known == (len(checkpoint.findings), checkpoint.bytes_read)  # the report is the caller's


def test_a_file_system_that_never_answers_costs_no_more_than_the_deadline(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    slowly(monkeypatch, lambda label, length: 30)
    began = time.monotonic()
    report = check_checkpoint(tmp_path / "a.pt", deadline_s=0.5)
    assert time.monotonic() - began < 3
    assert report.exit_code == 3 and report.checkpoints[0].contents["weights"] == "unknown"
    assert not any(
        thread.name.startswith("nanlocator") and not thread.daemon for thread in threading.enumerate()
    )


def test_an_error_of_the_file_system_leaves_only_its_tensors_unread(tmp_path, monkeypatch):
    save_file({"a": torch.tensor([math.inf])}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3_000_000)}, tmp_path / "2.safetensors")
    read = sources.File.read_into

    def read_into(self, buffer, offset):
        if self.label == "2.safetensors" and offset > 1 << 20:
            raise sources.UnreadError(f"cannot be read at byte {offset}: Input/output error")
        read(self, buffer, offset)

    monkeypatch.setattr(sources.File, "read_into", read_into)
    report = check_checkpoint(tmp_path)
    (checkpoint,) = report.checkpoints
    assert report.exit_code == 1 and [each.tensor.name for each in checkpoint.findings] == ["a"]
    (unread,) = checkpoint.unread
    assert unread.what == "b" and "Input/output error" in unread.reason


def test_progress_counts_to_the_end(tmp_path):
    torch.save({f"w{number}": torch.ones(1_500_000) for number in range(4)}, tmp_path / "a.pt")
    seen = []
    check_checkpoint(tmp_path / "a.pt", on_progress=seen.append)
    assert len(seen) > 4 and seen[-1].bytes_read == seen[-1].bytes_in_all == 24_000_000
    assert [each.bytes_read for each in seen] == sorted(each.bytes_read for each in seen)
