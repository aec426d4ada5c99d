"""DebugUnderflowOverflow on several gloo ranks: one sees an overflow, all end, each says who it was."""

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import run_ranks

from nanlocator.transformers import ranks as ranks_of_debugger

SCRIPT = Path(__file__).with_name("debugged_ranks.py")
DEADLINE = 120.0  # seconds; the group's own time-out is 600, so a rank that waits for it is found out


def train(folder, size, training, bad_rank, tool=SCRIPT):
    """(exit code, stdout, stderr) of each rank. Kills what still runs at the deadline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(size), str(port), str(folder), training, str(bad_rank)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(tool), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    end = time.monotonic() + DEADLINE
    try:
        texts = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.parametrize(
    ("size", "training", "bad_rank"),
    [
        (2, "ddp", 1),
        (2, "ddp", 0),  # which holds the Store
        (4, "ddp", 2),
        (2, "sync_bn", 1),
        (4, "alone", 3),
    ],
)
def test_all_ranks_end_in_seconds_and_name_the_one_that_saw_something(tmp_path, size, training, bad_rank):
    results = train(tmp_path / "run", size, training, bad_rank)
    found = rf"rank {bad_rank} \(host \S+\) detected inf/nan in batch_number=2: 0 Linear: output has infs"
    for rank, (code, _, stderr) in enumerate(results):
        assert code == 1, (rank, stderr)
        error = re.sub(r"^\[rank\d\]: ", "", stderr.strip(), flags=re.M).splitlines()  # torch's prefix
        if rank == bad_rank:
            assert error[-1].startswith("ValueError: DebugUnderflowOverflow: inf/nan detected, aborting as")
            assert f"This is rank {rank} of {size}" in error[-1]
        else:
            assert re.search(found, error[-1]), (rank, stderr)
            if training == "alone":
                assert error[-1].startswith("ValueError: DebugUnderflowOverflow: inf/nan detected on another")

    text = (tmp_path / "run" / f"debug_rank{bad_rank}.txt").read_text()
    assert re.match(rf"# rank {bad_rank} of {size} \(host \S+\), process \d+, \d{{4}}-", text)
    assert "\nDetected inf/nan during batch_number=2\nLast " in text and "0 Linear\n" in text
    # Rank 0's terminal has the report, whoever made it; the others' have nothing.
    assert "\nDetected inf/nan during batch_number=2\nLast " in results[0][1]
    assert all(stdout == "" for _, stdout, _ in results[1:])


def test_the_original_leaves_the_other_ranks_without_a_word(tmp_path):
    script = tmp_path / "original.py"
    ours = SCRIPT.read_text()
    theirs = ours.replace("from nanlocator.transformers import", "from transformers.debug_utils import")
    theirs = theirs.replace("(model, output_dir=folder)", "(model)").replace("debugger.remove()", "pass")
    assert theirs.count("output_dir") == 0 and "nanlocator" not in theirs
    script.write_text(theirs)
    (_, _, other), (_, stdout, _) = train(tmp_path, 2, "ddp", 1, script)
    assert "Connection closed by peer" in other and "detected" not in other
    assert "Detected inf/nan during batch_number=2" in stdout


def test_a_healthy_training_ends_well_and_writes_nothing(tmp_path):
    for rank, (code, stdout, stderr) in enumerate(train(tmp_path / "run", 2, "ddp", 7)):
        assert (code, stdout) == (0, f"rank {rank} has trained\n"), stderr
    assert not (tmp_path / "run").exists()


def go_on_after_two_findings(rank, size, folder):
    """Every rank catches the error, twice; the second is another rank's."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from nanlocator.transformers import DebugUnderflowOverflow

    model = nn.Linear(2, 2)
    debugger = DebugUnderflowOverflow(model, output_dir=folder)
    errors = []
    for bad_rank in (1, 0):
        end = time.monotonic() + 30
        bad = torch.full((1, 2), float("nan")) if rank == bad_rank else torch.ones(1, 2)
        while time.monotonic() < end:
            try:
                model(bad)
            except ValueError as error:
                errors.append(str(error))
                break
        dist.barrier()
    model(torch.ones(1, 2))
    debugger.remove()
    return errors


def test_ranks_that_go_on_are_told_of_the_next_finding_too(tmp_path):
    of_0, of_1 = run_ranks(2, go_on_after_two_findings, str(tmp_path))
    assert ["on another rank" in error for error in of_0] == [True, False]
    assert ["on another rank" in error for error in of_1] == [False, True]
    assert "rank 0 (host" in of_1[1] and "Linear: " in of_1[1]
    assert "Stopped during batch_number=" in (tmp_path / "debug_rank0.txt").read_text()


def test_a_store_that_cannot_be_shared_is_told(monkeypatch):
    monkeypatch.setattr(ranks_of_debugger.dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(ranks_of_debugger.dist, "get_backend", lambda: "mpi")
    with pytest.raises(RuntimeError, match=r"backend mpi.*Initialise it with an init_method"):
        ranks_of_debugger._own_connection()


def trace_a_batch(rank, size, folder):
    import torch
    from torch import nn

    from nanlocator.transformers import DebugUnderflowOverflow

    model = nn.Linear(2, 2)
    with DebugUnderflowOverflow(model, trace_batch_nums=[0], output_dir=folder):
        model(torch.full((1, 2), rank + 1.0))


def test_each_rank_traces_into_its_own_file(tmp_path):
    run_ranks(2, trace_a_batch, str(tmp_path))
    for rank in range(2):
        text = (tmp_path / f"debug_rank{rank}.txt").read_text()
        assert "*** Starting batch number=0 ***" in text
        assert f"{rank + 1.0:8.2e} {rank + 1.0:8.2e} input[0]" in text
