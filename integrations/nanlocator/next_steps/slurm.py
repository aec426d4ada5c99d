"""What SLURM says of a job and of hosts now. Asks only; each question has a deadline."""

import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field

_SECONDS = 10.0
_ALIVE = {
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "CONFIGURING",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
}
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}


@dataclass(slots=True)
class Job:
    """``state``: "running", "waiting" (in the queue), "gone", or "" if SLURM does not say."""

    id: str
    state: str = ""
    word: str = ""  # SLURM's own: RUNNING
    is_held: bool = False
    started: float | None = None  # seconds since the epoch; of its last start
    restarts: int = 0
    hosts: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    submit_line: str = ""
    folder: str = ""
    asked: list[str] = field(default_factory=list)  # the commands that answered


def is_here() -> bool:
    return shutil.which("squeue") is not None


def look_at(job_id: str) -> Job:
    job = Job(job_id)
    found = _ask(job, ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"])
    if found is not None:
        job.word = found.split()[0].upper() if found.split() else ""
        is_alive, is_waiting = job.word in _ALIVE, job.word in _WAITING
        job.state = "running" if is_alive else "waiting" if is_waiting else "gone"
    if job.state in ("running", "waiting"):
        _read_details(job)
    _read_accounts(job)
    return job


def draining(hosts: list[str]) -> list[str]:
    """Those of ``hosts`` that get no new job."""
    found = []
    for host in hosts:
        text = _ask(None, ["scontrol", "show", "node", host, "--oneliner"]) or ""
        if re.search(r"\bState=\S*(DRAIN|DOWN|FAIL|MAINT)", text):
            found.append(host)
    return found


def _read_details(job: Job) -> None:
    text = _ask(job, ["scontrol", "show", "job", job.id, "--oneliner"]) or ""

    def value(key: str) -> str:
        match = re.search(rf"(?:^|\s){key}=(\S*)", text)
        return "" if match is None or match[1] in ("(null)", "None", "Unknown", "N/A") else match[1]

    job.started = _local_seconds(value("StartTime")) if job.state == "running" else None
    job.restarts = int(value("Restarts")) if value("Restarts").isdecimal() else 0
    job.hosts = _expanded(value("NodeList"))
    job.excluded = _expanded(value("ExcNodeList"))
    job.is_held = value("Priority") == "0" or job.word == "REQUEUE_HOLD"
    job.folder = value("WorkDir")


def _read_accounts(job: Job) -> None:
    """For a job that SLURM's daemon has forgotten: its state, and how it was submitted."""
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job.id}"]
    text = _ask(job, [*command, "--format=State,WorkDir,SubmitLine"])
    cells = (text or "").strip().splitlines()[-1:]
    if not cells or cells[0].count("|") < 2:
        return
    state, folder, line = cells[0].split("|", 2)
    word = state.split()[0].upper() if state.split() else ""
    job.folder, job.submit_line = job.folder or folder, line.strip()
    if not job.state and word:  # squeue knows nothing of a job that has left it
        job.state = "running" if word in _ALIVE else "waiting" if word in _WAITING else "gone"
    if job.state == "gone" and word:
        job.word = word


def _ask(job: Job | None, command: list[str]) -> str | None:
    """None: it is not there, refused, or has not answered."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    if command[0] == "squeue" and "invalid job id" in done.stderr.lower():
        done.returncode, done.stdout = 0, ""  # it has left the queue
    if done.returncode != 0:
        return None
    if job is not None and command[0] not in job.asked:
        job.asked.append(command[0])
    return done.stdout


def _local_seconds(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _expanded(text: str) -> list[str]:
    """a[17-18,20],b1 as hosts."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        for item in match[2].split(","):
            low, _, high = item.partition("-")
            if (
                not low.isdecimal()
                or (high and not high.isdecimal())
                or int(high or low) - int(low) > 100_000
            ):
                return []
            for number in range(int(low), int(high or low) + 1):
                hosts.append(f"{match[1]}{number:0{len(low)}d}{match[3]}")
    return hosts
