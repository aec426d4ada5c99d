"""A rank fails in the re-run of a bad step: the verdict still has the first pass's findings, and no rank
waits forever, over gloo and over a group that waits like NCCL's.

NANLOCATOR_TEST_REPETITIONS (default 0: a sample, once): number of tries of each failure, of every kind in
every pass on every rank.
"""

import ctypes
import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from ranks import excuse, run_ranks

from nanlocator import LocatingOptimizer, NonFiniteGradientError
from nanlocator.engine.driver import Adapter

DEADLINE = 0.5
GUILTY = 1
BACKENDS = ("gloo", "patient")
REPETITIONS = int(os.environ.get("NANLOCATOR_TEST_REPETITIONS", "0"))

# The passes of the re-run of a step with this fault; test_a_rerun_makes_these_passes checks the engine.
PLANS = {
    "persistent": ("rerun", "constant_memory", "modules"),
    "transient": ("rerun", "nan_memory", "control"),
    "transfer": ("rerun", "serialised", "modules"),
    "thread": ("rerun", "reordered", "modules"),
    "compiled": ("eager", "compiled", "compiled", "modules"),
}
# Each kind of pass: the first fault that has it, and the number of the closure's call; 1 is the step itself.
PASSES: dict[str, tuple[str, int]] = {}
for _fault, _plan in PLANS.items():
    for _call, _name in enumerate(_plan, 2):
        PASSES.setdefault(_name, (_fault, _call))

ERRORS = {
    "raised": MemoryError("planted"),
    "out_of_memory": torch.OutOfMemoryError("planted"),
}
if hasattr(torch, "AcceleratorError"):  # from torch 2.8 on
    ERRORS["accelerator"] = torch.AcceleratorError("planted")
# Agreements of the step with the first fault: one on whether it is bad, the others between re-run passes.
FLAGS = 9
HANGS = ("hangs", "hangs_with_the_gil", "hangs_at_the_end")


def fail(kind, victim):
    Path("failed").touch()
    if kind in ERRORS:
        raise ERRORS[kind]
    excuse(victim)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hangs_with_the_gil":
        ctypes.PyDLL(None).sleep(1000)
    else:
        time.sleep(1000)


def die_at_flag(number):
    """Flag 0 is the install's, 1 the step's own. Over gloo, which does not count: at the re-run's first."""
    if dist.get_backend() == "patient":
        import patient_group

        patient_group.die_at_flag(1 + number)
    else:
        Adapter.has_compiled_parts = lambda adapter: os.kill(os.getpid(), signal.SIGKILL)


def bad_loss(fault, call, loss):
    """The loss with the fault's effect in this call of the closure."""
    if fault == "persistent" or (fault == "transient" and call == 1):
        return loss * torch.log(loss.detach() * 0)
    is_eager = torch._dynamo.eval_frame._stance.stance == "force_eager"
    if fault in ("transfer", "thread") or (fault == "compiled" and not is_eager):
        return loss * torch.log(loss.detach() * 0 - 1)
    return loss


def use_beside_others(fault):
    """Races that no pass depends on: a sum is read during its reduction, a thread writes a buffer."""
    if fault == "transfer":
        buffer = torch.ones(4)
        work = dist.all_reduce(buffer, async_op=True)
        buffer.mul(2)
        work.wait()
    elif fault == "thread":
        buffer = torch.ones(4)
        thread = threading.Thread(target=lambda: buffer.fill_(1.0))
        thread.start()
        time.sleep(0.15)
        buffer.mul(2)
        thread.join()


def train(rank, world_size, fault, victim=None, failing_call=0, kind="", last_flag=None):
    """The verdict, and the number of the closure's calls. The victim dies at the flag `last_flag`."""
    torch.manual_seed(0)
    if fault == "compiled":  # the state after torch.compile
        torch._dynamo.utils.counters["frames"]["ok"] = 1
    if last_flag is not None and rank == victim:
        die_at_flag(last_flag)
    model = torch.nn.Linear(4, 4)
    optimizer = LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, output_dir="run", gather_deadline=DEADLINE
    )
    if victim == 0 and (kind == "killed" or last_flag is not None):
        time.sleep(1.5)  # connections to the Store, which it hosts, are made in the second after the install
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        fails = rank == victim and calls == failing_call
        optimizer.zero_grad()
        if fails and kind != "hangs_at_the_end":
            fail(kind, victim)
        dist.all_reduce(torch.ones(1))
        use_beside_others(fault)
        loss = model(torch.ones(2, 4)).square().mean()
        if rank == GUILTY:
            loss = bad_loss(fault, calls, loss)
        loss.backward()
        if fails:
            fail(kind, victim)
        return loss

    try:
        optimizer.step(closure)
    except NonFiniteGradientError as error:
        if victim is None:
            return error.verdict, calls
        raise
    finally:
        if rank == 0 and victim is not None:
            excuse(*range(world_size))


@pytest.mark.parametrize("fault", PLANS)
def test_a_rerun_makes_these_passes(fault):
    variants = {"eager", "constant_memory", "nan_memory", "serialised", "reordered", "compiled"}
    plan = PLANS[fault]
    for verdict, calls in run_ranks(3, train, fault):
        rerun = verdict["rerun"]
        assert calls == 1 + len(plan)
        assert [each["variant"] for each in rerun["variants"]] == [name for name in plan if name in variants]
        assert rerun["reproduced"] == (plan[-1] == "modules")


def flags_of_a_step(rank, world_size):
    import patient_group

    train(rank, world_size, "persistent")
    return patient_group.flags() - 1  # one at the install


def test_a_step_agrees_so_often():
    assert run_ranks(3, flags_of_a_step, backend="patient") == [FLAGS] * 3


def pairwise(cases):
    """A small subset of ``cases`` with every pair of values that any case has."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    cases = random.Random(0).sample(cases, len(cases))
    left = set().union(*map(pairs, cases))
    while left:
        case = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(case)
        yield case


def failures() -> list:
    """(backend, kind, name of the pass, victim)."""
    quick = [*itertools.product(BACKENDS, (*ERRORS, "killed"), PASSES, range(3))]
    slow = [*itertools.product(BACKENDS, HANGS, PASSES, range(3))]
    if REPETITIONS:
        return (quick + slow) * REPETITIONS
    # Each kind of pass that a program's code can end or hang in differently.
    places = ("rerun", "constant_memory", "modules", "control", "serialised", "reordered")
    victims = (0, 1, 2, 1, 2, 0, 2, 0, 1)
    errors, deaths, hangs = (
        [*zip(itertools.cycle(BACKENDS), itertools.cycle(kinds), of, victims, strict=False)]
        for kinds, of in ((ERRORS, PASSES), (["killed"], places), (HANGS, places))
    )
    usual = [*errors, *deaths, *hangs[: len(HANGS)]]  # it takes ten deadlines to detect a hang
    others = [case for case in (*pairwise(quick), *hangs) if case not in usual]
    return usual + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in others]


def verdicts_on_disk():
    """Rank 0's verdicts, and those of ranks that concluded alone; verdict.json is the latest."""
    folder = Path("run", "a0")
    paths = [*folder.glob("verdict*.json"), *folder.glob("verdicts/*.json")]
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("backend", "kind", "place", "victim"), failures())
def test_a_failure_in_the_rerun_costs_no_evidence(backend, kind, place, victim):
    fault, failing_call = PASSES[place]
    for _ in range(3):  # on a busy machine a rank may seem lost before its failure
        shutil.rmtree("run", ignore_errors=True)
        results = run_ranks(3, train, fault, victim, failing_call, kind, backend=backend)
        if Path("failed").exists():
            break
    if kind in ERRORS:
        assert results[victim] == (type(ERRORS[kind]).__name__, "planted")
    else:
        assert results[victim] is None
    assert_evidence_is_kept(results, backend, victim)
    said = json.dumps(verdicts_on_disk()) + str(results)
    if kind in ERRORS:
        assert "planted" in said
    else:
        assert f"rank {victim}" in said or f"Rank {victim}" in said


def deaths_at_flags() -> list:
    """(backend, flag, victim), from the first flag of the re-run on."""
    every = [*itertools.product(["patient"], range(2, FLAGS + 1), range(3))]
    every += itertools.product(["gloo"], [2], range(3))
    if REPETITIONS:
        return every * REPETITIONS
    return [("patient", 2, 0), ("patient", 4, 2), ("patient", FLAGS, 1), ("gloo", 2, 2)]


@pytest.mark.parametrize(("backend", "last_flag", "victim"), deaths_at_flags())
def test_a_death_between_two_passes_costs_no_evidence(backend, last_flag, victim):
    begun = time.monotonic()
    results = run_ranks(3, train, "persistent", victim, 0, "", last_flag, backend=backend)
    assert time.monotonic() - begun < 30  # the group's own time-out is 60 s
    assert results[victim] is None
    assert_evidence_is_kept(results, backend, victim)
    assert f"rank {victim}" in json.dumps(verdicts_on_disk()) + str(results)
    if last_flag > 2 and victim == 2:  # also the traced pass's findings
        assert any(
            origin["operator"] == "aten::log" for each in verdicts_on_disk() for origin in each["origins"]
        )


def assert_evidence_is_kept(results, backend, victim):
    for rank in {0, 1, 2} - {victim}:
        if backend == "gloo" and results[rank] is None:
            continue  # gloo cannot be aborted: the guard has ended the process
        # RuntimeError is gloo's, from the collective in which it waited for a rank that ended.
        assert results[rank][0] in ("NonFiniteGradientError", "AgreementError", "RuntimeError"), results
    ledgers = "".join(path.read_text() for path in Path("run", "a0").glob("ledger_*.jsonl"))
    assert '"first_bad"' in ledgers
    assert any(
        GUILTY in origin["candidates"] for verdict in verdicts_on_disk() for origin in verdict["origins"]
    )
