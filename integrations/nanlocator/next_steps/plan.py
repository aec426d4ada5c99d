"""Which steps of a decision are still to do. Pure: everything that was looked up is in `Seen`."""

import shlex
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanlocator import _C
from nanlocator.next_steps.checkpoints import TRACKER, Checkpoint
from nanlocator.next_steps.run import MINUTE, Run
from nanlocator.next_steps.slurm import Job

_MOST_RANKS = 8  # named one by one


@dataclass(slots=True)
class Outcome:
    """``command``: empty if ``do`` says all."""

    when: str
    do: str
    command: str = ""


@dataclass(slots=True)
class Step:
    do: str
    command: str = ""
    expect: str = ""
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    headline: str
    steps: list[Step] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"version": 1, **asdict(self)}


@dataclass(slots=True)
class Seen:
    """``job``: None if the verdict names no SLURM job, or SLURM is not here. ``checkpoints``: the newest
    first; None if their folder is not known or cannot be read."""

    run: Run
    has_slurm: bool = False
    job: Job | None = None
    draining: list[str] = field(default_factory=list)
    checkpoints: list[Checkpoint] | None = None
    resumed: Checkpoint | None = None
    resumed_why: str = ""


def plan_of(seen: Seen) -> Plan:
    return _Planner(seen).plan()


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) + " UTC"


class _Planner:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._run = run = seen.run
        self._decision = run.decision
        self._kind = str(self._decision.get("kind"))
        narrative = run.verdict.get("narrative") or {}
        self._rows = [(str(label), str(text)) for label, text in narrative.get("rows", [])]
        self._is_damaged = narrative.get("severity") == "FATAL"
        self._is_traced = bool(self._decision.get("traced"))
        self._suspects = [str(each) for each in self._decision.get("hosts") or []]
        leaves_out = self._kind in ("EXCLUDE", "OLDER_CHECKPOINT")
        self._out = self._suspects if leaves_out else []
        step = run.verdict.get("iteration")
        action = str(narrative.get("action") or self._kind).rpartition(" SILENT), THEN ")[2]
        self._plan = Plan(f"{run.folder} step {step}: {action}")

    def plan(self) -> Plan:
        plan = self._plan
        judged = [each for each in self._run.later if each.verdict is not None]
        if judged:
            latest = judged[-1]
            plan.verified.append(f"{latest.folder.name} came after this verdict and has one of its own")
            plan.steps.append(
                Step(
                    "follow the later verdict; this one is past", _words("nanlocator", "next", latest.folder)
                )
            )
            return plan
        self._say_who_reads()
        self._say_what_ended()
        if self._kind == "NONE_NEEDED":
            plan.verified.append("the decision is NONE_NEEDED: nothing to restart")
            return plan
        is_restarted = self._stop()
        self._set_aside()
        self._drain()
        if self._kind == "DO_NOT_RESTART":
            self._page()
        elif not is_restarted:
            self._restart()
        self._netcheck()
        return plan

    # --- the job ---

    def _stop(self) -> bool:
        """Returns whether the restart that the decision asks for has been made."""
        plan, job = self._plan, self._seen.job
        later = self._run.later[-1] if self._run.later else None
        if job is None or not job.state:
            name = f"job {job.id}" if job else "the job"
            why = "SLURM did not answer" if job else self._why_no_job()
            plan.unknown.append(f"whether {name} still runs: {why}")
            if later is not None:
                return self._judge_later()
            if self._is_damaged:
                plan.steps.append(
                    Step("end its processes with SIGKILL on every host (at SIGTERM it may save bad weights)")
                )
            return False
        if job.state == "gone":
            plan.verified.append(f"job {job.id} is gone ({job.word or 'not in the queue'}; {_by(job)})")
            return self._judge_later() if later is not None else False
        if job.state == "waiting":
            plan.verified.append(f"job {job.id} waits in the queue ({job.word}; {_by(job)})")
            if not job.is_held:
                plan.steps.append(
                    Step(
                        "hold it: a requeued job may start at any moment",
                        _words("scontrol", "hold", job.id),
                        f"squeue --jobs={job.id} then shows JobHeldUser",
                    )
                )
            return False
        is_new = job.restarts > 0 or (
            job.started is not None
            and self._run.found is not None
            and job.started >= self._run.found + MINUTE
        )
        if is_new and job.started is not None:
            plan.verified.append(f"job {job.id} was started again at {utc(job.started)} ({_by(job)})")
        else:
            plan.verified.append(f"job {job.id} is {job.word} ({_by(job)})")
        if is_new or later is not None:
            why = self._why_wrong_restart(job)
            if not why:
                plan.verified.append("this restart is what the decision asks for, as far as can be seen")
                return True
            plan.steps.append(self._kill(job, f"stop it first: {why}"))
        elif self._is_damaged:
            plan.steps.append(
                self._kill(job, "kill it: it trains on bad weights; at SIGTERM it may save them")
            )
        else:
            plan.steps.append(self._kill(job, "end what is left of it: it stopped in this step"))
        return False

    def _why_no_job(self) -> str:
        launch = self._run.launch
        if launch.get("scheduler") != "slurm" or not launch.get("job_id"):
            return "the verdict names no SLURM job"
        return "squeue is not on PATH here"

    def _kill(self, job: Job, do: str) -> Step:
        return Step(
            do,
            _words("scancel", "--signal=KILL", "--full", job.id),
            "squeue prints no line of it before you go on",
            [
                Outcome("it is still RUNNING after 2 min", "cancel it", _words("scancel", job.id)),
                Outcome("it is PENDING (requeued)", "hold it", _words("scontrol", "hold", job.id)),
            ],
        )

    def _why_wrong_restart(self, job: Job) -> str:
        """Empty: the job that runs now is the restart that was decided."""
        if self._kind == "DO_NOT_RESTART":
            return "the same fails again"
        if self._is_traced:
            return "whether its operators are traced is not known, and it was to be traced"
        if self._kind == "SKIP_BATCH":
            return "it meets the same batch again, unless whoever started it left that out"
        if self._out and not job.hosts:
            return "on which hosts it runs is not known"
        common = [host for host in self._out if host in job.hosts]
        if common:
            return f"it runs on {', '.join(common)}"
        if self._out:
            self._plan.verified.append(f"it runs without {', '.join(self._out)}")
        loaded = self._seen.resumed
        if self._kind == "OLDER_CHECKPOINT" and loaded is None:
            return "from which checkpoint it was started is not known"
        if loaded is not None and self._is_bad(loaded):
            return f"it loads {loaded.path.name}, which is bad or may be"
        return ""

    def _judge_later(self) -> bool:
        later = self._run.later[-1]
        self._plan.verified.append(f"it was started again: {later.folder.name}, without a verdict so far")
        if self._kind in ("RESTART_AS_IS", "EXCLUDE") and not self._is_traced:
            if self._out:
                self._plan.unknown.append(f"whether {later.folder.name} runs without {', '.join(self._out)}")
            return True
        if self._kind != "DO_NOT_RESTART":
            self._plan.unknown.append(f"whether {later.folder.name} was started as decided")
        return False

    # --- checkpoints ---

    def _is_bad(self, each: Checkpoint) -> bool:
        """Found bad, or saved with the fault in it."""
        return each.is_finite is False or (
            self._holds_fault and self._run.is_too_new(each.step, each.written)
        )

    @property
    def _holds_fault(self) -> bool:
        return self._is_damaged or self._kind == "OLDER_CHECKPOINT"

    def _set_aside(self) -> None:
        plan, found = self._plan, self._seen.checkpoints
        if found is None:
            folder = self._run.launch.get("checkpoint_dir")
            what = f"{folder} cannot be read here" if folder else "the verdict names no folder"
            plan.unknown.append(f"which checkpoints there are: {what}")
            return
        if found and self._holds_fault and not self._run.has_known_steps:
            step = self._run.verdict.get("iteration")
            plan.unknown.append(
                f"which checkpoints were written before step {step}: their names count other steps"
            )
        bad = [each for each in found if self._is_bad(each)]
        for each in found:
            if each.is_finite is not None:
                plan.verified.append(f"{each.path.name} was read: {each.why}")
            if self._run.found is not None and each.written >= self._run.found + MINUTE:
                plan.verified.append(f"{each.path.name} was written after the verdict, {utc(each.written)}")
        load = self._load()
        for each in found:
            if each.is_finite is None and not self._is_bad(each) and each is load:
                self._check_step(each)
        for each in bad:
            plan.steps.append(self._move(each))
        resumed = self._seen.resumed
        is_moved = resumed is None and self._seen.resumed_why.endswith(" names it")  # by hand, already
        if (is_moved or resumed in bad) and load is not None:
            if self._seen.resumed_why.startswith(TRACKER):
                file = load.path.parent / TRACKER
                command = f"printf '%s\\n' {load.step} > {shlex.quote(str(file))}"
                plan.steps.append(Step(f"let a resubmit load {load.path.name}", command))
            elif self._seen.resumed_why.startswith("latest"):
                latest = shlex.quote(str(load.path.parent / "latest"))
                command = f"printf '%s' {shlex.quote(load.path.name)} > {latest}"
                plan.steps.append(Step(f"let a resubmit load {load.path.name}", command))
        elif resumed is not None:
            plan.verified.append(f"a plain resubmit loads {resumed.path.name} ({self._seen.resumed_why})")
        if load is None and found:
            plan.unknown.append("which checkpoint is good: each one here is bad, or holds the fault")
        if any("finite is not enough" in text for _, text in self._rows):
            plan.unknown.append("whether its weights had grown already: compare them with an older one's")

    def _load(self) -> Checkpoint | None:
        return next((each for each in self._seen.checkpoints or [] if not self._is_bad(each)), None)

    def _check_step(self, each: Checkpoint) -> None:
        check = _words("nanlocator", "check-checkpoint", each.path)
        self._plan.steps.append(
            Step(
                f"check {each.path.name}: {each.why or 'it was not read'}",
                check,
                "exit status 0: finite",
                [Outcome("exit status 1", "set it aside, then plan again", self._move(each).command)],
            )
        )

    def _move(self, each: Checkpoint) -> Step:
        folder = each.path.parent
        aside = shlex.quote(str(folder.with_name(folder.name + ".set_aside")))
        why = each.why if each.is_finite is False else "it holds the fault, or may"
        return Step(
            f"set {each.path.name} aside: {why}",
            f"mkdir -p {aside} && mv {shlex.quote(str(each.path))} {aside}/",
        )

    # --- hosts ---

    def _drain(self) -> None:
        left = [host for host in self._out if host not in self._seen.draining]
        for host in self._out:
            if host not in left:
                self._plan.verified.append(f"{host} is drained or down")
        if not left or not self._seen.has_slurm:
            if left:
                self._plan.unknown.append(f"whether {', '.join(left)} is out of use: SLURM is not here")
            return
        if self._has_passed():
            return
        command = _words(
            "scontrol", "update", f"nodename={','.join(left)}", "state=drain", "reason=nanlocator"
        )
        self._plan.steps.append(
            Step(
                f"drain {', '.join(left)}",
                command,
                outcomes=[
                    Outcome(
                        "it is refused (it needs an operator's rights)", "go on: the restart leaves it out"
                    )
                ],
            )
        )

    def _has_passed(self) -> bool:
        return self._run.netcheck is not None and not self._run.netcheck.get("findings")

    def _netcheck(self) -> None:
        plan, out = self._plan, self._out
        if not self._suspects:
            return
        hosts = ", ".join(out)
        names = ",".join(out)
        resume = (
            _words("scontrol", "update", f"nodename={names}", "state=resume") if self._seen.has_slurm else ""
        )
        if out and self._run.netcheck is not None:
            file = self._run.netcheck_file
            if self._has_passed():
                plan.verified.append(f"netcheck found nothing ({file})")
                if self._seen.draining and resume:
                    plan.steps.append(Step(f"return {hosts}; a second event there takes it out", resume))
            else:
                plan.verified.append(f"netcheck failed ({file}): {self._run.netcheck.get('verdict')}")
            return
        if out:
            layout = self._run.verdict.get("layout") or {}
            check = _C.netcheck_command(int(layout.get("ranks_per_host", 1)), len(out), shlex.quote(out[0]))
            command = f"{check} --output {shlex.quote(str(self._run.folder / 'netcheck.json'))}"
            outcomes = [
                Outcome("FAIL (exit status 1)", f"what it names stays out; plan again: {self._again()}"),
                Outcome("PASS (exit status 0)", f"{hosts} may return", resume),
            ]
            plan.steps.append(Step(f"on {hosts}, beside the restart", command, outcomes=outcomes))
            return
        suspects = ", ".join(self._suspects)
        plan.steps.append(
            Step(
                f"read the error counters on {suspects}, beside the restart",
                "nvidia-smi -q -d ECC",
                "no uncorrectable error",
                [Outcome("it shows one", f"restart without {suspects}", self._submit(self._suspects)[0])],
            )
        )

    # --- people and the restart ---

    def _say_who_reads(self) -> None:
        ticket = self._decision.get("ticket")
        if ticket not in (None, "nobody"):
            self._plan.unknown.append(f"whether the ticket for {str(ticket).replace('_', ' ')} is written")

    def _say_what_ended(self) -> None:
        """Of the ranks that did not answer."""
        launch = self._run.launch
        endings = {each["rank"]: each for each in launch.get("endings") or []}
        logs = {each["rank"]: each["log"] for each in launch.get("logs") or []}
        for rank, each in list(endings.items())[:_MOST_RANKS]:
            self._plan.verified.append(f"rank {rank} ended with: {each['text']}")
        silent = [each for each in self._run.verdict.get("silent_ranks") or [] if each not in endings]
        if silent:
            ranks = ", ".join(map(str, silent[:_MOST_RANKS])) + (" ..." if len(silent) > _MOST_RANKS else "")
            log = logs.get(silent[0]) or launch.get("log") or "its log"
            self._plan.unknown.append(
                f"what ended rank {ranks}: {log} has no word of it; a Python error of its own code there "
                "(not NCCL, not a closed connection): leave it down"
            )

    def _page(self) -> None:
        person = str(self._decision.get("page") or "model_author").replace("_", " ")
        self._plan.steps.append(
            Step(
                f"leave it down; page the {person} with what this prints (if that was not done)",
                _words("nanlocator", "report", self._run.folder),
            )
        )

    def _restart(self) -> None:
        load = self._load()
        loads = f", from {load.path.name}" if load is not None else ""
        without = f" without {', '.join(self._out)}" if self._out else ""
        command, note = self._submit(self._out)
        # As the checkpoints count: a restarted program may count its own steps from 1 again.
        named = int(self._run.verdict.get("iteration") or 0) + int(self._run.launch.get("steps_before") or 0)
        do = f"restart it{without}{loads}"
        if self._kind == "SKIP_BATCH":
            do += f", with {self._added()}, so that the step with that batch goes without an update"
        if self._is_traced:
            do += f", with {self._added()}, up to step {named}"
        self._plan.steps.append(
            Step(
                do + (f" ({note})" if note else ""),
                command,
                f"a new attempt beside {self._run.folder.name}, and no block by step {named}",
                [Outcome("a block again, or no new attempt after 15 min", "plan again", self._again())],
            )
        )

    def _again(self) -> str:
        own = self._run.folder
        return _words("nanlocator", "next", own.parent if own.name[1:].isdecimal() else own)

    def _submit(self, without: list[str]) -> tuple[str, str]:
        """The command, and what there is to say if it is not known."""
        job = self._seen.job
        if job is not None and job.state == "waiting" and not self._added():
            release = _words("scontrol", "release", job.id)
            if not without:
                return release, ""
            hosts = ",".join(dict.fromkeys([*job.excluded, *without]))
            update = _words("scontrol", "update", f"jobid={job.id}", f"excnodelist={hosts}")
            return f"{update} && {release}", ""
        by_hand = "as it was started" + (f", with --exclude={','.join(without)}" if without else "")
        try:
            words = shlex.split(job.submit_line) if job is not None else []
        except ValueError:
            words = []
        has_own = any(word.startswith(("--exclude", "-x")) for word in words)
        if job is None or len(words) < 2 or Path(words[0]).name != "sbatch" or (has_own and without):
            return "", f"{by_hand}: how it was started is not known here" if not has_own else by_hand
        excluded = [f"--exclude={','.join(dict.fromkeys([*job.excluded, *without]))}"] if without else []
        added = f"{self._added()} ".lstrip()
        folder = f"cd {shlex.quote(job.folder)} && " if job.folder else ""
        return folder + added + shlex.join([words[0], *excluded, *words[1:]]), ""

    def _added(self) -> str:
        """What the restart has in its environment beside what it had."""
        if self._is_traced:
            return "NANLOCATOR_LEVEL=operators"
        return "NANLOCATOR_ON_BAD=skip" if self._kind == "SKIP_BATCH" else ""


def _by(job: Job) -> str:
    return ", ".join(job.asked)


def _words(*words: object) -> str:
    return shlex.join(str(word) for word in words)
