"""A rank fails in the re-run of a bad step: what the first pass has seen is in the verdict all the same.

NANLOCATOR_TEST_REPETITIONS (default 1): how often each failure is tried.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import excuse, run_ranks

from nanlocator import LocatingOptimizer

DEADLINE = 1.0
GUILTY = 1
REPETITIONS = int(os.environ.get("NANLOCATOR_TEST_REPETITIONS", "1"))


def a_rank_fails(rank, world_size, kind, victim, failing_call, is_transient):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, output_dir="run", gather_deadline=DEADLINE
    )
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        if rank == victim and calls == failing_call:
            if kind == "killed":
                excuse(victim)
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("planted")
        dist.all_reduce(torch.ones(1))
        loss = model(torch.ones(2, 4)).square().mean()
        if rank == GUILTY and (calls == 1 or not is_transient):
            loss = loss * torch.log(loss.detach() * 0)
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    finally:
        if rank == 0:
            excuse(*range(world_size))


def verdicts_on_disk():
    """Of rank 0 and, where ranks concluded alone, theirs; verdict.json is the latest of them."""
    folder = Path("run", "a0")
    paths = [*folder.glob("verdict*.json"), *folder.glob("verdicts/*.json")]
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("repetition", range(REPETITIONS))
@pytest.mark.parametrize(
    ("failing_call", "is_transient"), [(2, False), (3, False), (3, True)], ids=["rerun", "modules", "control"]
)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["raised", "killed"])
def test_a_failure_in_the_rerun_costs_no_evidence(kind, victim, failing_call, is_transient, repetition):
    results = run_ranks(3, a_rank_fails, kind, victim, failing_call, is_transient)
    if kind == "killed":
        assert results[victim] is None
    else:
        assert results[victim][0] in ("MemoryError", "NonFiniteGradientError"), results
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in survivors:
        # The last: gloo's, in the collective in which it waited for a rank that ended.
        assert results[rank][0] in ("NonFiniteGradientError", "AgreementError", "RuntimeError"), results
    ledgers = "".join(path.read_text() for path in Path("run", "a0").glob("ledger_*.jsonl"))
    assert '"first_bad"' in ledgers
    verdicts = verdicts_on_disk()
    assert any(GUILTY in origin["candidates"] for verdict in verdicts for origin in verdict["origins"])
    told = json.dumps(verdicts) + str(results)
    if kind == "killed":
        assert f"rank {victim}" in told or f"Rank {victim}" in told
    else:
        assert "planted" in told
