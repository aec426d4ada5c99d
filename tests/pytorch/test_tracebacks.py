"""A program that ends with an error prints its own traceback, as without nanlocator, and the verdict once."""

import json
import os
import re
import subprocess
import sys

import pytest

import nanlocator

LOOP = """
import os
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.chdir(os.path.dirname(__file__))


def train():
    for step in range(3):
        loss = model(torch.randn(8, 4)).mean()
        if step == 1:
            loss = torch.sqrt(loss * 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


train()
"""
RANKS = LOOP.replace(
    "model = torch.nn", 'torch.distributed.init_process_group("gloo")\nmodel = torch.nn'
).replace("optimizer =", "model = torch.nn.parallel.DistributedDataParallel(model)\noptimizer =")
OWN_ERROR = """
import torch


class Strict(torch.nn.Linear):
    def forward(self, data):
        if data.sum() > 100:
            raise ValueError("too large")
        return super().forward(data)


model = Strict(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
model(torch.full((1, 2), 99.0)).sum().backward()
"""


@pytest.fixture
def printed(tmp_path):
    """Writes a program and runs it after these words; returns its standard error."""

    def run(text, *words, status=1):
        (tmp_path / "program.py").write_text(text, encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words, "program.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr

    return run


def frames_in(text):
    return re.findall(r'File "(.*?)", line \d+, in (.*)', text)


def is_ours(file):
    return file.startswith(os.path.dirname(nanlocator.__file__) + os.sep)


def test_a_verdict_ends_in_the_programs_own_line_and_is_printed_once(printed, tmp_path):
    text = printed(LOOP, "-m", "nanlocator", status=93)  # of the verdict's decision
    program = str(tmp_path / "program.py")
    assert frames_in(text) == [(program, "<module>"), (program, "train")]
    after = text.partition("Traceback")[2]
    assert "optimizer.step()\nnanlocator.NonFiniteGradientError: nanlocator ERROR[" in after
    assert "The verdict is printed above; it is also in nanlocator_run/a0/verdict.json" in after
    assert text.count("  restart ") == 1


def test_an_error_of_the_program_is_printed_and_recorded_as_without_us(printed, tmp_path, monkeypatch):
    def traceback_in(text):
        return re.sub(r"^nanlocator: attached.*\n", "", text, flags=re.MULTILINE)

    alone = printed(OWN_ERROR)
    assert "ValueError: too large" in alone
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert traceback_in(printed(OWN_ERROR, "-m", "nanlocator")) == alone
    recorded = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert recorded.strip() == alone.strip()


def test_a_syntax_error_is_printed_as_without_us(printed):
    alone = printed("def f(:\n")
    assert "SyntaxError" in alone
    assert (
        printed("def f(:\n", "-m", "nanlocator")
        .replace("nanlocator: attached to nothing: no optimizer was created\n", "")
        .endswith(alone)
    )


def test_an_error_of_our_own_keeps_its_frames(printed):
    text = printed("import nanlocator\nnanlocator.watch(None, None)\n")
    files = [file for file, _ in frames_in(text)]
    assert is_ours(files[-1])


@pytest.mark.slow
def test_every_rank_and_torchruns_summary_show_the_programs_own_lines(printed, tmp_path):
    errors = tmp_path / "errors"
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(errors))
    text = printed(RANKS, *words, "--module", "nanlocator")
    assert not any(is_ours(file) for file, _ in frames_in(text))
    assert text.count("  restart ") == 1
    program = str(tmp_path / "program.py")
    recorded = [json.loads(path.read_text()) for path in errors.rglob("error.json")]
    assert recorded
    for record in recorded:
        stack = record["message"]["extraInfo"]["py_callstack"]
        own = [] if sys.version_info >= (3, 11) else frames_in(stack)[:1]  # the handled error's, in 3.10
        assert frames_in(stack) == [*own, (program, "<module>"), (program, "train")]
        assert "  restart " in record["message"]["message"]
