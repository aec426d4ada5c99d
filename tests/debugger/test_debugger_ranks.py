"""DebugUnderflowOverflow on several gloo ranks: one sees an overflow, all end, and each names that rank."""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_programs, run_ranks
from torch import nn
from transformers import debug_utils as original

from nanlocator.debugger import ranks as ranks_of_debugger
from nanlocator.transformers import DebugUnderflowOverflow

BATCHES = 400


class Sums(nn.Module):
    """Like SyncBatchNorm, which gloo does not support: the mean over all ranks."""

    def forward(self, x):
        mean = x.mean().detach().float()
        dist.all_reduce(mean)
        return x - mean.to(x.dtype) / dist.get_world_size()


def model_for(training):
    torch.manual_seed(0)
    middle = Sums() if training == "sync_bn" else nn.ReLU()
    layers = [nn.Linear(8, 8), middle, nn.Linear(8, 8)]
    return nn.Sequential(*layers).to(torch.bfloat16 if training == "sync_bn" else torch.float16)


def watched_by_ours(model, folder):
    return DebugUnderflowOverflow(model, output_dir=folder).remove


def watched_by_the_original(model, folder):
    original.DebugUnderflowOverflow(model)
    return lambda: None


def train_watched(rank, size, port, folder, training, bad_rank, watch):
    """`training`: "ddp" exchanges gradients in backward; "sync_bn" sums over the ranks in the middle of the
    forward; "alone" enters no collective after its start. On `bad_rank` the third batch overflows."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=600),  # run_programs detects a rank that waits for it
    )
    model = model_for(training)
    remove = watch(model, folder)
    trained = nn.parallel.DistributedDataParallel(model) if training == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dtype = next(model.parameters()).dtype
    for batch in range(BATCHES):
        x = torch.ones(4, 8, dtype=dtype)
        if rank == bad_rank and batch == 2:
            # Itself finite: the first linear layer makes infinities of it.
            x *= torch.finfo(dtype).max
            model[0].weight.data.fill_(1)
        trained(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if training == "alone":
            time.sleep(0.02)
    remove()
    dist.destroy_process_group()
    print(f"rank {rank} has trained", flush=True)


@pytest.mark.parametrize(
    ("size", "training", "bad_rank"),
    [
        (2, "ddp", 1),
        (2, "ddp", 0),  # holds the Store
        (4, "ddp", 2),
        (2, "sync_bn", 1),
        (4, "alone", 3),
    ],
)
def test_all_ranks_end_in_seconds_and_name_the_one_that_saw_something(tmp_path, size, training, bad_rank):
    folder = str(tmp_path / "run")
    results = run_programs(size, train_watched, folder, training, bad_rank, watched_by_ours)
    found = rf"rank {bad_rank} \(host \S+\) detected inf/nan in batch_number=2: 0 Linear: output has infs"
    for rank, (code, _, stderr) in enumerate(results):
        assert code == 1, (rank, stderr)
        # After torch's prefix; Triton's extension prints its own last words.
        error = re.findall(r"^\[rank\d\]: (.*)", stderr, flags=re.M)
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
    # Rank 0's terminal has any rank's report; the other terminals have nothing.
    assert "\nDetected inf/nan during batch_number=2\nLast " in results[0][1]
    assert all(stdout == "" for _, stdout, _ in results[1:])


def test_the_original_leaves_the_other_ranks_without_a_word(tmp_path):
    results = run_programs(2, train_watched, str(tmp_path), "ddp", 1, watched_by_the_original)
    (_, _, other), (_, stdout, _) = results
    assert "Connection closed by peer" in other and "detected" not in other
    assert "Detected inf/nan during batch_number=2" in stdout


def test_a_healthy_training_ends_well_and_writes_nothing(tmp_path):
    results = run_programs(2, train_watched, str(tmp_path / "run"), "ddp", 7, watched_by_ours)
    for rank, (code, stdout, stderr) in enumerate(results):
        assert (code, stdout) == (0, f"rank {rank} has trained\n"), stderr
    assert not (tmp_path / "run").exists()


def go_on_after_two_findings(rank, size, folder):
    """Every rank catches the error twice; the second finding is another rank's."""
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


def test_ranks_that_go_on_are_notified_of_the_next_finding_too(tmp_path):
    of_0, of_1 = run_ranks(2, go_on_after_two_findings, str(tmp_path))
    assert ["on another rank" in error for error in of_0] == [True, False]
    assert ["on another rank" in error for error in of_1] == [False, True]
    assert "rank 0 (host" in of_1[1] and "Linear: " in of_1[1]
    assert "Stopped during batch_number=" in (tmp_path / "debug_rank0.txt").read_text()


def test_a_store_that_cannot_be_shared_is_reported(monkeypatch):
    class OwnStore(dist.Store):
        """A framework's Store, in Python."""

    monkeypatch.setattr(ranks_of_debugger.dist.distributed_c10d, "_get_default_store", OwnStore)
    monkeypatch.setattr(ranks_of_debugger.dist, "get_backend", lambda: "mpi")
    with pytest.raises(RuntimeError, match=r"backend mpi.*Initialise it with an init_method"):
        ranks_of_debugger._own_connection()


def trace_a_batch(rank, size, folder):
    model = nn.Linear(2, 2)
    with DebugUnderflowOverflow(model, trace_batch_nums=[0], output_dir=folder):
        model(torch.full((1, 2), rank + 1.0))


def test_each_rank_traces_into_its_own_file(tmp_path):
    run_ranks(2, trace_a_batch, str(tmp_path))
    for rank in range(2):
        text = (tmp_path / f"debug_rank{rank}.txt").read_text()
        assert "*** Starting batch number=0 ***" in text
        assert f"{rank + 1.0:8.2e} {rank + 1.0:8.2e} input[0]" in text
