"""Programs that check their loss themselves and then end or leave the step: the verdict explains the loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_programs, run_python

PROGRAM = """
import math, sys
import torch, nanlocator

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch = nanlocator.watch(model, optimizer)

def criterion(output):
    return torch.log(output - 100).mean() if {is_bad} and step == 3 else output.mean()

def train(step):
    loss = criterion(model(torch.randn(8, 4)))
    if {before_backward} and step == 3:
        {stop}
    optimizer.zero_grad()
    loss.backward()
    if not {before_backward} and step == 3:
        {stop}
    optimizer.step()

for step in range(1, 5):
    train(step)
"""
ENDS = {
    "raises": "raise FloatingPointError('Loss became infinite or NaN')",
    "asserts": "assert torch.isfinite(loss), 'NaN'",
    "exits": "print('Loss is nan, stopping training'), sys.exit(1)",
}


def interpreter(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100)


def run(end, *, is_bad=True, before_backward=True, extra="", start=run_python):
    text = PROGRAM.format(stop=end, is_bad=is_bad, before_backward=before_backward)
    Path("train.py").write_text(text + extra)
    done = start("train.py")
    found = sorted(Path().glob("nanlocator_run/*/verdict.json"))
    return done, [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize(
    ("end", "start"), [("raises", interpreter), ("asserts", run_python), ("exits", run_python)]
)
def test_a_loss_that_the_program_finds_bad_is_explained_before_it_ends(end, start):
    done, verdicts = run(ENDS[end], start=start)
    assert done.returncode == 1
    (origin,) = verdicts[0]["origins"]
    assert (origin["operator"], origin["cause"]) == ("aten::log", "operator_undefined")
    assert origin["code"]["text"].startswith("return torch.log(output - 100)")
    assert verdicts[0]["iteration"] == 3 and verdicts[0]["rerun"]["reproduced"] is True
    assert done.stderr.count("step 3: LEAVE IT DOWN") == 1
    assert "could not be scanned" not in done.stderr


@pytest.mark.parametrize(
    ("end", "before_backward"), [("raises", True), ("exits", True), ("asserts", True), ("raises", False)]
)
def test_a_program_that_ends_in_a_healthy_step_is_told_nothing(end, before_backward):
    end = ENDS[end].replace("torch.isfinite(loss)", "False")
    done, verdicts = run(end, is_bad=False, before_backward=before_backward)
    assert (done.returncode, verdicts) == (1, [])
    assert "step 3" not in done.stderr and "could not be scanned" not in done.stderr


def test_gradients_that_nobody_has_scanned_are_scanned_before_the_end():
    done, verdicts = run(ENDS["raises"], before_backward=False)
    assert done.returncode == 1
    (origin,) = verdicts[0]["origins"]
    assert (origin["operator"], verdicts[0]["iteration"]) == ("aten::log", 3)


def test_after_remove_and_an_interrupt_nothing_is_scanned():
    _, verdicts = run(f"watch.remove(); {ENDS['raises']}")
    assert verdicts == []
    _, verdicts = run("raise KeyboardInterrupt", start=interpreter)
    assert verdicts == []


def test_a_loop_that_is_left_with_a_bad_loss_is_explained_at_the_programs_end():
    loop = """
for step in range(3, 5):
    loss = criterion(model(torch.randn(8, 4)))
    if torch.isnan(loss):
        break
print("done")
"""
    done, verdicts = run("return", extra=loop)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert verdicts[-1]["origins"][0]["operator"] == "aten::log"


def test_an_evaluation_with_gradients_is_no_step_of_training():
    evaluation = """
model.eval()
loss = torch.log(model(torch.randn(8, 4)) - 100).mean()
"""
    done, verdicts = run("return", is_bad=False, extra=evaluation)
    assert (done.returncode, verdicts) == (0, [])


def test_logits_that_are_masked_with_minus_inf_are_no_finding():
    masked = """
logits = model(torch.randn(8, 4)).masked_fill(torch.ones(8, 1, dtype=torch.bool), -math.inf)
raise ValueError("of something else")
"""
    done, verdicts = run("return", is_bad=False, extra=masked)
    assert (done.returncode, verdicts) == (1, [])


LEAVES = """
import math
import torch, nanlocator

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch = nanlocator.watch(model, optimizer, on_bad="report")

def loss_of(step):
    loss = model(torch.randn(8, 4)).mean()
    return torch.log(loss - 100) if {is_bad} and step == 3 else loss

{loop}
print([verdict["iteration"] for verdict in watch.verdicts])
"""
LOOPS = {
    "continues": """
for step in range(1, 6):
    optimizer.zero_grad()
    loss = loss_of(step)
    if {check}:
        continue
    loss.backward()
    optimizer.step()
""",
    "zeroes and continues": """
for step in range(1, 6):
    loss = loss_of(step)
    if {check}:
        optimizer.zero_grad()
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "returns": """
def train(step):
    model.zero_grad()
    loss = loss_of(step)
    if {check}:
        return
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

for step in range(1, 6):
    train(step)
""",
}
CHECKS = {
    "item": "not math.isfinite(loss.item())",
    "float": "not math.isfinite(loss)",
    "isnan": "torch.isnan(loss)",
    "isfinite": "not torch.isfinite(loss).all()",
    "no_grad": "(loss.detach() != loss.detach()).any()",
}


def leave(loop, *, is_bad=True):
    """The program's output, and its verdicts."""
    Path("train.py").write_text(LEAVES.format(loop=loop, is_bad=is_bad))
    done = run_python("train.py")
    assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in Path().glob("nanlocator_run/*/verdict.json")]
    return done.stdout, found


@pytest.mark.parametrize(
    ("loop", "check"),
    [*((loop, "item") for loop in LOOPS), *(("returns", check) for check in list(CHECKS)[1:])],
)
def test_a_loss_that_the_program_finds_bad_is_explained_though_it_leaves_the_step(loop, check):
    printed, (verdict,) = leave(LOOPS[loop].format(check=CHECKS[check]))
    assert printed == "[3]\n"
    (origin,) = verdict["origins"]
    assert (origin["operator"], origin["cause"]) == ("aten::log", "operator_undefined")
    assert origin["code"]["text"].startswith("return torch.log(loss - 100)")
    assert verdict["rerun"]["reproduced"] is True


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_that_is_left_with_a_finite_loss_is_no_finding(loop):
    loop = LOOPS[loop].format(check="loss.item() > -100 and step == 3")
    assert leave(loop, is_bad=False) == ("[]\n", [])


def test_a_number_that_is_read_and_not_differentiated_beside_the_loss_is_no_finding():
    """The mean of a task without samples, which the program itself leaves out."""
    tasks = """
for step in range(1, 6):
    optimizer.zero_grad()
    losses = [model(torch.randn(8, 4))[:samples].mean() for samples in (4, 0, 2)]
    total = sum(loss for loss in losses if not torch.isnan(loss))
    total.backward()
    optimizer.step()
"""
    assert leave(tasks, is_bad=False) == ("[]\n", [])


def test_numbers_for_the_log_of_a_step_that_is_over_are_no_finding():
    """The mean of an absent class, read after the update; its tensor lives into the next step."""
    logged = """
for step in range(1, 6):
    hidden = model[0](torch.randn(8, 4))
    if torch.rand(1).item() < 0.5:
        hidden = hidden * 0.9
    optimizer.zero_grad()
    each = model[2](hidden).square()
    each.mean().backward()
    early = each[each < -1].mean()
    optimizer.step()
    log = [early, each[each < -1].mean()]
    print([value.item() for value in log][:0])
    {zero}
"""
    for zero in ("", "optimizer.zero_grad()"):
        assert leave(logged.format(zero=zero), is_bad=False) == ("[]\n" * 6, [])


def one_leaves_the_step(rank, world_size, port):
    import math

    import torch
    import torch.distributed as dist

    model, optimizer = watched_on_ranks(rank, world_size, port, gather_deadline=4)
    for step in range(1, 5):
        optimizer.zero_grad()
        output = model(torch.randn(8, 4))
        loss = torch.log(output - 100).mean() if step == 2 and rank == 1 else output.mean()
        all_are_finite = torch.tensor(float(math.isfinite(loss)))
        dist.all_reduce(all_are_finite, dist.ReduceOp.MIN)
        if not all_are_finite:
            continue
        loss.backward()
        optimizer.step()


def test_among_several_ranks_one_line_names_the_rank_whose_loss_was_bad():
    results = run_programs(2, one_leaves_the_step)
    assert [code for code, _, _ in results] == [0, 0]
    assert ["a loss of rank 1 is NaN or Inf" in errors for _, _, errors in results] == [False, True]
    assert not list(Path().glob("nanlocator_run/*/verdict*.json"))


def watched_on_ranks(rank, world_size, port, gather_deadline):
    """A model and its optimizer, the same on each rank."""
    import torch
    import torch.distributed as dist

    import nanlocator

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nanlocator.watch(model, optimizer, gather_deadline=gather_deadline)
    return model, optimizer


def one_of_two(rank, world_size, port, ranks_with_bad_loss):
    import math
    import time

    import torch

    model, optimizer = watched_on_ranks(rank, world_size, port, gather_deadline=4)
    for step in range(1, 4):
        if step == 2:
            time.sleep(2)  # every monitor is connected
        output = model(torch.randn(8, 4))
        is_bad = step == 2 and rank in ranks_with_bad_loss
        loss = torch.log(output - 100).mean() if is_bad else output.mean()
        if not math.isfinite(loss.item()):
            raise FloatingPointError("Loss became infinite or NaN")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_of_several_ranks_one_that_ends_says_what_its_loss_was():
    results = run_programs(2, one_of_two, [1])
    assert [code for code, _, _ in results] == [1, 1]
    assert "ERROR[" in results[1][2] and " in the loss on rank " in results[1][2]
    verdict = json.loads(Path("nanlocator_run/a0/verdict_rank1.json").read_text())
    (origin,) = verdict["origins"]
    assert (origin["phase"], origin["candidates"], verdict["status"]) == ("loss", [1], "partial")
    assert any("FloatingPointError" in note for note in verdict["notes"])
    assert "ended by FloatingPointError" in results[0][2]


def test_several_ranks_that_all_end_locate_it_together():
    results = run_programs(2, one_of_two, [0, 1])
    assert [code for code, _, _ in results] == [1, 1]
    assert ["ERROR[log_negative]" in errors for _, _, errors in results] == [True, False]
    verdict = json.loads(Path("nanlocator_run/a0/verdict.json").read_text())
    (origin,) = verdict["origins"]
    assert (origin["detail"], origin["candidates"], verdict["status"]) == (
        "log_of_negative",
        [0, 1],
        "located",
    )


def killed(rank, world_size, port):
    import os
    import signal
    import time

    import torch

    model, optimizer = watched_on_ranks(rank, world_size, port, gather_deadline=2)
    for step in range(1, 4):
        if step == 2:
            time.sleep(2)  # every monitor is connected
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_where_all_others_end_at_once_by_their_transfers_errors_the_lost_rank_is_named():
    codes = [code for code, _, _ in run_programs(2, killed)]
    assert codes == [1, -9]
    verdict = json.loads(Path("nanlocator_run/a0/verdict_rank0.json").read_text())
    assert (verdict["status"], verdict["silent_ranks"], verdict["origins"]) == ("partial", [1], [])


# The last rank ends by itself in the step in which another's batch is bad: the step cannot be re-run.
def ends_alone(rank, world_size, port, end, bad_rank=0):
    import os
    import signal
    import time

    import torch

    sys.stderr = open("job.err", "a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    model, optimizer = watched_on_ranks(rank, world_size, port, gather_deadline=4)
    for step in range(1, 4):
        x = torch.ones(8, 4)
        if step == 2:
            time.sleep(2)  # every monitor is connected
            x[2, 3] = float("inf") if rank == bad_rank else 1.0
        model(x).mean().backward()
        if step == 2 and rank == world_size - 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("tokens")
        optimizer.step()
        optimizer.zero_grad()


def decision_beside(end):
    """That of the verdict, and the log."""
    Path("job.err").write_text("[rank1]: NameError: of an earlier attempt\n")
    run_programs(2, ends_alone, end)
    return json.loads(Path("nanlocator_run/a0/verdict.json").read_text())["decision"], Path(
        "job.err"
    ).read_text()


def test_an_error_of_a_rank_that_ends_beside_a_finding_decides():
    decision, log = decision_beside("raises")
    assert (decision["kind"], decision["ended_rank"]) == ("DO_NOT_RESTART", 1)
    assert "ended with: KeyError: 'tokens'" in " ".join(log.split())
    assert "IS SILENT" not in log  # in the dying rank's own block, either


def test_those_that_lose_the_same_rank_tell_one_story():
    run_programs(3, ends_alone, "raises", 1)
    for rank in (0, 1):
        verdict = json.loads(Path(f"nanlocator_run/a0/verdict_rank{rank}.json").read_text())
        (origin,) = verdict["origins"]
        assert (origin["candidates"], verdict["silent_ranks"]) == ([1], [2])
    log = " ".join(Path("job.err").read_text().split())
    # Rank 1 may have to end before rank 0's collective fails; then it tells what it knows itself.
    assert log.count("nanlocator ERROR[") + log.count("rank 0 prints the verdict") == 3, log
    assert "in the gradient of weight on rank 1 on " in log


def test_a_rank_that_was_killed_is_known_from_the_log_once_the_launcher_has_listed_it():
    decision, log = decision_beside("killed")
    assert (decision["kind"], decision["traced"], decision["ended_rank"]) == ("RESTART_AS_IS", True, None)
    assert "FIRST nanlocator next (RANK 1 ON " in log
    with open("job.err", "a") as file:  # as torchrun ends
        file.write("[0]:\n  host      : a17\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n")
    plan = interpreter("-m", "nanlocator.next_steps", "nanlocator_run/a0").stdout
    assert "rank 1 ended with: exit code -9" in plan
    assert "NANLOCATOR_LEVEL=operators" not in plan
