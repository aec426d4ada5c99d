"""Several gloo ranks with torch's DistributedDataParallel: they agree, or each reports why not."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import excuse, run_ranks
from torch import nn

import nanlocator


def make(rank, **options):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, nanlocator.LocatingOptimizer(optimizer, model, output_dir="run", **options)


def backward(model, rank, step=0):
    torch.manual_seed(100 * step + rank)
    model.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()


def all_stop(rank, world_size):
    model, optimizer = make(rank)
    for step in range(3):
        backward(model, rank, step)
        if (rank, step) == (1, 2):
            model.module[0].weight.grad[5, 1] = float("nan")  # after the reduction, on this rank only
        try:
            optimizer.step()
        except nanlocator.NonFiniteGradientError as error:
            return step, error.verdict


def test_one_bad_rank_stops_all_with_the_same_verdict(tmp_path):
    results = run_ranks(3, all_stop)
    assert [step for step, _ in results] == [2, 2, 2]
    verdicts = [verdict for _, verdict in results]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    (origin,) = verdicts[0]["origins"]
    assert origin["coordinates"]["rank"] == 1
    assert (origin["parameter"], origin["tensor"]["first_bad_index"]) == ("0.weight", [5, 1])
    assert (origin["phase"], verdicts[0]["silent_ranks"]) == ("grad_reduced", [])
    files = {path.name for path in Path("run/a0").iterdir()}
    assert {"verdict.json", "ledger_tp0pp0dp1.jsonl", "param_manifest_tp0pp0dp2.json"} <= files
    page = Path("run/a0/report.html").read_text()
    assert "NaN in the gradients of rank 1" in page


def report_and_go_on(rank, world_size):
    model, optimizer = make(rank, on_bad="report")
    for step in range(5):
        backward(model, rank, step)
        if step in (1, 3):
            model.module[1].bias.grad[0] = float("inf")
            optimizer.clip_grad_norm(1e9)
            for p in model.parameters():
                p.grad.zero_()
        optimizer.step()
    return [v["iteration"] for v in optimizer.verdicts], all(p.isfinite().all() for p in model.parameters())


def test_report_lists_every_finding_on_every_rank():
    assert run_ranks(2, report_and_go_on) == [([2, 4], True)] * 2


def differing_options(rank, world_size):
    make(rank, on_bad="stop" if rank == 0 else "report")


def test_options_that_differ_are_refused_on_every_rank_alike():
    results = run_ranks(2, differing_options)
    assert results[0] == results[1]
    name, text = results[0]
    assert name == "AgreementError"
    assert "on_bad" in text and "stop" in text and "report" in text


def one_rank_does_not_install(rank, world_size):
    # All ranks make the flag's group; then rank 1 does something else.
    if rank == 1:
        torch.distributed.new_group()
        time.sleep(6)
        return "elsewhere"
    start = time.monotonic()
    try:
        make_without_ddp(gather_deadline=0.3)  # ranks have ten times that to install
    except nanlocator.AgreementError as error:
        return str(error), time.monotonic() - start


def make_without_ddp(**options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, nanlocator.LocatingOptimizer(optimizer, model, output_dir="run", **options)


def test_a_rank_that_does_not_install_is_named_after_the_deadline():
    (text, waited), other = run_ranks(2, one_rank_does_not_install)
    assert other == "elsewhere"
    assert "rank 1" in text or "ranks 1" in text
    assert waited < 40


def killed_between_flag_and_gathering(rank, world_size):
    model, optimizer = make(rank, gather_deadline=2.0)
    backward(model, rank)
    model.module[0].bias.grad[2] = float("nan")
    if rank == 1:
        agree_and_die(optimizer._driver.locator)
    start = time.monotonic()
    try:
        optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict, time.monotonic() - start


def agree_and_die(locator):
    """Dies after the agreement on the finding, instead of concluding."""
    locator.begin_step(1)
    locator.start_agreement()
    locator.finish_agreement()
    excuse(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_a_silent_rank_in_a_partial_verdict():
    results = run_ranks(3, killed_between_flag_and_gathering)
    assert results[1] is None
    for verdict, waited in (results[0], results[2]):
        assert verdict["status"] == "partial"
        assert verdict["silent_ranks"] == [1]
        assert waited < 40
    assert Path("run/a0/verdict.json").exists()


def unwritable_on_one_rank(rank, world_size):
    Path(f"machine{rank}").mkdir()
    os.chdir(f"machine{rank}")
    if rank == 1:
        Path("run").write_text("in the way")
    torch.distributed.barrier()
    make_without_ddp(gather_deadline=10.0)


def test_a_directory_that_only_one_rank_cannot_write_fails_on_all_ranks():
    results = run_ranks(2, unwritable_on_one_rank)
    assert all(name in ("AgreementError", "IoError") for name, _ in results), results


def communicator_by_name(rank, world_size):
    from nanlocator import _C

    group = torch.distributed.new_group()
    store = torch.distributed.distributed_c10d._get_default_store()
    by_name = _C.Communicator.from_group_name(group.group_name, store, "by_name")
    try:
        _C.Communicator.from_group_name("nobody", store, "nobody")
    except nanlocator.UsageError as error:
        return by_name.rank, by_name.size, "nobody" in str(error)


def test_a_communicator_finds_its_group_by_name():
    assert run_ranks(2, communicator_by_name) == [(0, 2, True), (1, 2, True)]


@pytest.mark.parametrize("world_size", [2])
def test_healthy_ranks_write_nothing(world_size):
    assert run_ranks(world_size, healthy) == [[]] * world_size
    assert not list(Path("run/a0").glob("ledger*")) and not Path("run/a0/verdict.json").exists()


def healthy(rank, world_size):
    model, optimizer = make(rank, check_params=True)
    for step in range(20):
        backward(model, rank, step)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    return optimizer.verdicts
