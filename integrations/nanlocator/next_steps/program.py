"""The command ``nanlocator next``. tools/command/next_options.hpp has its options."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nanlocator import _C
from nanlocator.next_steps import checkpoints, slurm
from nanlocator.next_steps.plan import Plan, Seen, plan_of, utc
from nanlocator.next_steps.run import Run, read_run

__all__ = ["look", "main"]

_SECONDS = 60.0  # for reading checkpoints


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 nothing left to do, 1 steps are left, 2 nothing that it can plan by. --help
    and wrong options end the program."""
    options = _C.parse_next(sys.argv[1:] if arguments is None else arguments)
    try:
        run = read_run(Path(options.run))
    except (_C.FormatError, OSError) as error:
        print(f"nanlocator: {_C.printable(str(error))}", file=sys.stderr)
        return 2
    plan = plan_of(look(run, _SECONDS if options.deadline is None else options.deadline))
    if options.json:
        print(json.dumps({**plan.to_json(), "as_of": utc(time.time())}))
    else:
        print(text_of(plan, time.time()), end="")
    return 1 if plan.steps else 0


def look(run: Run, seconds: float) -> Seen:
    """``seconds``: for reading checkpoints."""
    seen = Seen(run, has_slurm=slurm.is_here())
    launch = run.launch
    if seen.has_slurm and launch.get("scheduler") == "slurm" and launch.get("job_id"):
        seen.job = slurm.look_at(str(launch["job_id"]))
    _look_at_endings(seen)
    decision = run.decision
    if seen.has_slurm:
        seen.draining = slurm.draining([str(each) for each in decision.get("hosts") or []])
    folder = launch.get("checkpoint_dir")
    if folder and decision.get("kind") != "NONE_NEEDED":
        _look_at_checkpoints(seen, Path(folder), time.monotonic() + seconds)
    return seen


def _look_at_endings(seen: Seen) -> None:
    """What ended the ranks that did not answer may have come into the log only after the verdict."""
    run, job = seen.run, seen.job
    if not run.verdict.get("silent_ranks") or run.later:  # a later attempt writes to the same log
        return
    state = job.word if job is not None and job.state == "gone" else ""
    try:
        later = _C.with_later_endings(json.dumps(run.verdict), str(run.folder), state)
    except _C.FormatError:
        return
    if later is not None:
        run.verdict = json.loads(later)


def _look_at_checkpoints(seen: Seen, folder: Path, deadline: float) -> None:
    try:
        seen.checkpoints = found = checkpoints.checkpoints_in(folder)
    except OSError:
        return
    seen.resumed, seen.resumed_why = checkpoints.resumed(folder, found)
    # First what would be loaded; a good one ends the search.
    first = [seen.resumed] if seen.resumed is not None else []
    for each in [*first, *(each for each in found if each is not seen.resumed)]:
        checkpoints.check(each, deadline)
        is_allowed = not seen.run.is_too_new(each.step, each.written)
        if time.monotonic() > deadline or (each.is_finite and is_allowed):
            break


def text_of(plan: Plan, now: float) -> str:
    lines = [f"{plan.headline}, as of {utc(now)}"]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"{number}. {step.do}")
        if step.command:
            lines.append(f"     {step.command}")
        if step.expect:
            lines.append(f"   expect: {step.expect}")
        for outcome in step.outcomes:
            lines.append(f"   if {outcome.when}: {outcome.do}")
            if outcome.command:
                lines.append(f"     {outcome.command}")
    if not plan.steps:
        lines.append("nothing is left to do")
    lines += [f"verified: {each}" for each in plan.verified]
    lines += [f"not known: {each}" for each in plan.unknown]
    return "".join(f"{_C.printable(line)}\n" for line in lines)
