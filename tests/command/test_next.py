"""``nanlocator next`` against a SLURM of scripts, through the orders in which a job's things may happen."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanlocator.next_steps import plan as plans
from nanlocator.next_steps import program, slurm
from nanlocator.next_steps.run import read_run

FOUND = time.time() - 3600
JOB = "88213"

# A SLURM whose jobs and nodes are files; it changes as told, so that a printed command can be executed.
FAKE = """#!{python}
import json, sys
from pathlib import Path
name, words = Path(sys.argv[0]).name, sys.argv[1:]
place = Path({place!r})
state = json.loads(place.read_text())
with open(str(place) + ".asked", "a") as asked:
    asked.write(json.dumps([name, *words]) + "\\n")
if state.get("hangs"):
    import time
    time.sleep(60)
job = state["job"]
if name == "squeue":
    if job["state"] == "":
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    print(job["state"])
elif name == "sacct":
    if state.get("sacct"):
        print(state["sacct"])
elif words[:2] == ["show", "job"]:
    if job["state"] == "":
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    print("JobId=88213 JobName=gpt Priority=" + ("0" if job.get("held") else "4711") +
          " Restarts=" + str(job.get("restarts", 0)) + " StartTime=" + job.get("started", "Unknown") +
          " NodeList=" + job.get("hosts", "(null)") + " ExcNodeList=(null) WorkDir=/home/u")
elif words[:2] == ["show", "node"]:
    print("NodeName=" + words[2] + " State=" + ("IDLE+DRAIN" if words[2] in state["drained"] else "IDLE"))
elif words[0] == "update" and words[1].startswith("nodename="):
    hosts = words[1].partition("=")[2].split(",")
    state["drained"] = sorted(set(state["drained"]) | set(hosts)) if words[2] == "state=drain" else []
elif words[0] == "hold":
    job["held"] = True
elif name == "scancel":
    job["state"] = ""
else:
    sys.exit("not in this SLURM: " + " ".join([name, *words]))
place.write_text(json.dumps(state))
"""


def local(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


class Slurm:
    def __init__(self, folder, monkeypatch):
        self.place = folder / "slurm.json"
        self.state = {"job": {"state": ""}, "drained": [], "sacct": ""}
        tools = folder / "bin"
        tools.mkdir()
        for name in ("squeue", "scontrol", "sacct", "scancel", "sbatch"):
            (tools / name).write_text(FAKE.format(python=sys.executable, place=str(self.place)))
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        self.write()

    def write(self, **changes):
        self.state |= changes
        self.place.write_text(json.dumps(self.state))

    def job(self, state, **more):
        self.write(job={"state": state, **more})

    def gone(self):
        self.write(job={"state": ""}, sacct="FAILED|/home/u|sbatch --nodes=4 'my job.sh' --seed 3")


@pytest.fixture
def slurm_here(tmp_path, monkeypatch):
    return Slurm(tmp_path, monkeypatch)


@pytest.fixture
def no_slurm(monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)


def planted(
    folder, kind, *, severity="ERROR", step=700, saved=(600,), before=0, job=JOB, attempt=0, **decision
):
    """An attempt's folder with such a verdict, and checkpoints in Megatron's layout."""
    checkpoints = folder / "my ckpt"
    for each in saved:
        save(checkpoints, each, written=FOUND - 600)
    attempt_folder = folder / "run" / f"a{attempt}"
    attempt_folder.mkdir(parents=True)
    verdict = {
        "version": 3,
        "iteration": step,
        "status": "located",
        "decision": {
            "kind": kind,
            "traced": False,
            "hosts": ["a17"] if kind in ("EXCLUDE", "RESTART_AS_IS") else [],
            "newest_step": step - 1,
            "page": "model_author" if kind == "DO_NOT_RESTART" else "nobody",
            "ticket": "nobody",
            **decision,
        },
        "narrative": {
            "severity": severity,
            "action": f"DO {kind}",
            "rows": [["check", "rm -r . # no sentence of a verdict is a command"]],
        },
        "layout": {"ranks_per_host": 8},
        "launch": {
            "found": time.strftime("%Y-%m-%d %H:%M", time.gmtime(FOUND)),
            "scheduler": "slurm" if job else None,
            "job_id": job,
            "checkpoint_dir": str(checkpoints) if saved else None,
            "checkpoints": [{"step": each, "name": f"iter_{each:07d}"} for each in saved],
            "steps_before": before,
        },
    }
    (attempt_folder / "verdict.json").write_text(json.dumps(verdict))
    return attempt_folder


def save(checkpoints, step, *, bad=False, written=None, is_latest=True):
    folder = checkpoints / f"iter_{step:07d}" / "mp_rank_00"
    folder.mkdir(parents=True)
    weight = torch.ones(4, 4)
    if bad:
        weight[1, 2] = float("nan")
    torch.save({"model": {"weight": weight}}, folder / "model_optim_rng.pt")
    if is_latest:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
    if written is not None:
        os.utime(folder.parent, (written, written))
    return folder.parent


def next_of(folder, seconds=60):
    return plans.plan_of(program.look(read_run(folder), seconds))


def commands(plan):
    return [step.command for step in plan.steps if step.command]


def is_said(plan, text):
    return any(text in each for each in [*plan.verified, *plan.unknown, *(step.do for step in plan.steps)])


def execute(command):
    subprocess.run(["sh", "-ec", command], check=True, timeout=60)


# ---- the order of things ------------------------------------------------------------------------


def test_read_late_the_job_is_gone_and_the_restart_is_one_command(tmp_path, slurm_here):
    slurm_here.gone()
    folder = planted(tmp_path, "EXCLUDE")
    plan = next_of(folder)
    drain, restart, netcheck = commands(plan)
    assert drain == "scontrol update nodename=a17 state=drain reason=nanlocator"
    assert restart == "cd /home/u && sbatch --exclude=a17 --nodes=4 'my job.sh' --seed 3"
    assert netcheck.startswith("nanlocator netcheck --nproc-per-node 8 --output ")
    assert [outcome.when[:4] for outcome in plan.steps[-1].outcomes] == ["FAIL", "PASS"]
    assert is_said(plan, "job 88213 is gone (FAILED") and is_said(plan, "iter_0000600 was read: finite")


def test_requeued_and_running_on_the_suspected_host_it_is_stopped_first(tmp_path, slurm_here):
    slurm_here.job("RUNNING", started=local(FOUND + 600), hosts="a[16-18]", restarts=1)
    plan = next_of(planted(tmp_path, "EXCLUDE"))
    assert plan.steps[0].do == "stop it first: it runs on a17"
    assert commands(plan)[0] == "scancel --signal=KILL --full 88213"
    assert [outcome.command for outcome in plan.steps[0].outcomes] == ["scancel 88213", "scontrol hold 88213"]


def test_requeued_without_the_host_it_is_the_restart_and_stays(tmp_path, slurm_here):
    slurm_here.job("RUNNING", started=local(FOUND + 600), hosts="a[18-20],b1", restarts=1)
    plan = next_of(planted(tmp_path, "EXCLUDE"))
    assert is_said(plan, "it runs without a17") and not is_said(plan, "stop it")
    assert not any("sbatch" in each or "scancel" in each for each in commands(plan))


@pytest.mark.parametrize("kind", ["DO_NOT_RESTART", "SKIP_BATCH"])
def test_requeued_where_a_plain_restart_fails_again_it_is_stopped(kind, tmp_path, slurm_here):
    slurm_here.job("RUNNING", started=local(FOUND + 600), hosts="a1", restarts=1)
    plan = next_of(planted(tmp_path, kind))
    assert plan.steps[0].do.startswith("stop it first")
    assert not any("sbatch" in each or "release" in each for each in commands(plan))


def test_requeued_as_it_was_after_a_transient_fault_it_stays(tmp_path, slurm_here):
    slurm_here.job("RUNNING", started=local(FOUND + 600), hosts="a17", restarts=1)
    plan = next_of(planted(tmp_path, "RESTART_AS_IS"))
    assert is_said(plan, "this restart is what the decision asks for")
    assert commands(plan) == ["nvidia-smi -q -d ECC"]


def test_waiting_in_the_queue_it_is_held_and_then_released_without_the_host(tmp_path, slurm_here):
    slurm_here.job("PENDING")
    folder = planted(tmp_path, "EXCLUDE")
    plan = next_of(folder)
    assert commands(plan)[0] == "scontrol hold 88213"
    assert "scontrol update jobid=88213 excnodelist=a17 && scontrol release 88213" in commands(plan)
    execute(commands(plan)[0])
    assert "scontrol hold 88213" not in commands(next_of(folder))


def test_a_job_on_bad_weights_is_killed_without_a_chance_to_save(tmp_path, slurm_here):
    slurm_here.job("RUNNING", started=local(FOUND - 9000), hosts="a17")
    plan = next_of(planted(tmp_path, "OLDER_CHECKPOINT", severity="FATAL"))
    assert plan.steps[0].do.startswith("kill it") and commands(plan)[0].startswith("scancel --signal=KILL")


def test_a_bad_checkpoint_written_since_is_set_aside_and_not_loaded(tmp_path, slurm_here):
    slurm_here.gone()
    folder = planted(tmp_path, "RESTART_AS_IS", newest_step=699)
    late = save(tmp_path / "my ckpt", 800, bad=True)
    plan = next_of(folder)
    assert is_said(plan, "iter_0000800 was written after the verdict")
    move, tracker, restart, _ = commands(plan)
    for command in (move, tracker):
        execute(command)
    assert not late.exists() and (tmp_path / "my ckpt.set_aside" / "iter_0000800").is_dir()
    assert (tmp_path / "my ckpt" / "latest_checkpointed_iteration.txt").read_text() == "600\n"
    assert restart.startswith("cd /home/u && sbatch") and is_said(plan, "from iter_0000600")
    again = next_of(folder)
    assert commands(again)[0] == restart and is_said(again, "a plain resubmit loads iter_0000600")


def test_a_good_checkpoint_written_since_is_loaded_unless_it_holds_the_fault(tmp_path, slurm_here):
    slurm_here.gone()
    folder = planted(tmp_path, "RESTART_AS_IS")
    save(tmp_path / "my ckpt", 800)
    plan = next_of(folder)
    assert is_said(plan, "from iter_0000800") and not any("mv " in each for each in commands(plan))
    verdict = json.loads((folder / "verdict.json").read_text())
    verdict["decision"] |= {"kind": "OLDER_CHECKPOINT", "hosts": []}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    plan = next_of(folder)  # finite is not good
    assert is_said(plan, "set iter_0000800 aside") and is_said(plan, "restart it, from iter_0000600")


def test_a_run_that_counts_from_one_again_is_behind_the_names_of_its_checkpoints(tmp_path, slurm_here):
    slurm_here.gone()
    folder = planted(tmp_path, "OLDER_CHECKPOINT", step=35, saved=(800, 830, 833), before=800, newest_step=30)
    plan = next_of(folder)
    assert is_said(plan, "set iter_0000833 aside") and not is_said(plan, "set iter_0000830 aside")
    assert is_said(plan, "from iter_0000830")
    assert "no block by step 835" in plan.steps[-1].expect


def test_names_that_count_other_steps_say_nothing_of_the_fault(tmp_path, slurm_here):
    slurm_here.gone()
    folder = planted(tmp_path, "OLDER_CHECKPOINT", step=35, saved=(800, 830), before=None, newest_step=30)
    plan = next_of(folder)
    assert not is_said(plan, "aside")
    assert is_said(plan, "which checkpoints were written before step 35: their names count other steps")


def test_checkpoints_that_could_not_be_read_in_time_are_a_step_and_not_verified(tmp_path, slurm_here):
    slurm_here.gone()
    plan = next_of(planted(tmp_path, "RESTART_AS_IS"), seconds=0)
    check = plan.steps[0]
    assert check.command == f"nanlocator check-checkpoint '{tmp_path / 'my ckpt' / 'iter_0000600'}'"
    assert "mv " in check.outcomes[0].command and not is_said(plan, "was read")


def test_which_checkpoint_is_good_is_found_by_reading(tmp_path, slurm_here):
    slurm_here.gone()
    folder = planted(tmp_path, "OLDER_CHECKPOINT", saved=(400,), newest_step=None, check_first=True)
    save(tmp_path / "my ckpt", 500, bad=True)
    save(tmp_path / "my ckpt", 600, bad=True)
    plan = next_of(folder)
    assert is_said(plan, "from iter_0000400") and sum("mv " in each for each in commands(plan)) == 2


def test_the_plan_gets_shorter_with_what_was_done_until_it_is_empty(tmp_path, slurm_here):
    slurm_here.job("RUNNING", started=local(FOUND + 60), hosts="a17", restarts=1)
    folder = planted(tmp_path, "EXCLUDE")
    lengths = [len(next_of(folder).steps)]
    execute(commands(next_of(folder))[0])  # stopped
    slurm_here.state = json.loads(slurm_here.place.read_text())
    slurm_here.gone()
    lengths.append(len(next_of(folder).steps))
    execute(commands(next_of(folder))[0])  # drained
    lengths.append(len(next_of(folder).steps))
    (tmp_path / "run" / "a1").mkdir()  # restarted
    lengths.append(len(next_of(folder).steps))
    (folder / "netcheck.json").write_text(json.dumps({"verdict": "wrong result", "findings": [{}]}))
    lengths.append(len(next_of(folder).steps))
    assert lengths == [4, 3, 2, 1, 0]


def test_netcheck_without_a_finding_lets_the_host_return(tmp_path, slurm_here):
    slurm_here.gone()
    slurm_here.write(drained=["a17"])
    folder = planted(tmp_path, "EXCLUDE")
    (folder / "netcheck.json").write_text(json.dumps({"verdict": "healthy", "findings": []}))
    plan = next_of(folder)
    assert commands(plan)[-1] == "scontrol update nodename=a17 state=resume"
    os.utime(folder / "netcheck.json", (FOUND - 999, FOUND - 999))  # of before the verdict
    assert commands(next_of(folder))[-1].startswith("nanlocator netcheck")


def test_a_later_verdict_is_followed_instead(tmp_path, slurm_here):
    slurm_here.gone()
    first = planted(tmp_path, "RESTART_AS_IS")
    planted(tmp_path, "DO_NOT_RESTART", saved=(), attempt=1)
    assert commands(next_of(first)) == [f"nanlocator next {tmp_path / 'run' / 'a1'}"]
    assert next_of(tmp_path / "run").headline.startswith(str(tmp_path / "run" / "a1"))


@pytest.mark.parametrize("is_left", [True, False])
def test_the_verdict_of_a_rank_that_ended_alone_counts_where_that_of_all_knows_nothing(
    is_left, tmp_path, no_slurm
):
    folder = planted(tmp_path, "RESTART_AS_IS", traced=True)
    of_all = folder / "verdict.json"
    verdict = json.loads(of_all.read_text())
    (folder / "verdict_rank1.json").write_text(json.dumps(verdict | {"origins": [{"cause": "unknown"}]}))
    (folder / "verdict_rank0.json").write_text(json.dumps(verdict | {"origins": []}))
    of_all.write_text(json.dumps(verdict | {"origins": [], "decision": {"kind": "NONE_NEEDED"}}))
    if not is_left:
        of_all.unlink()
    assert read_run(folder).decision["kind"] == "RESTART_AS_IS"
    assert read_run(folder.parent).decision["traced"]


def test_what_needs_a_trace_is_submitted_traced(tmp_path, slurm_here):
    slurm_here.gone()
    plan = next_of(planted(tmp_path, "RESTART_AS_IS", hosts=[], traced=True))
    assert commands(plan) == [
        "cd /home/u && NANLOCATOR_LEVEL=operators sbatch --nodes=4 'my job.sh' --seed 3"
    ]


# ---- without SLURM, and files that are old or broken --------------------------------------------


@pytest.mark.parametrize(
    "kind", ["RESTART_AS_IS", "EXCLUDE", "SKIP_BATCH", "OLDER_CHECKPOINT", "DO_NOT_RESTART"]
)
def test_without_slurm_no_command_of_it_is_printed_and_what_is_not_known_is_said(kind, tmp_path, no_slurm):
    plan = next_of(planted(tmp_path, kind))
    assert is_said(plan, "whether the job still runs: squeue is not on PATH here")
    text = program.text_of(plan, time.time())
    assert not any(word in text for word in ("scontrol", "scancel", "sbatch")) and plan.steps


def test_a_slurm_that_does_not_answer_is_no_job_that_is_gone(tmp_path, slurm_here, monkeypatch):
    monkeypatch.setattr(slurm, "_SECONDS", 0.3)
    slurm_here.write(hangs=True)
    plan = next_of(planted(tmp_path, "RESTART_AS_IS"))
    assert is_said(plan, "whether job 88213 still runs: SLURM did not answer") and not is_said(
        plan, "is gone"
    )


def test_a_job_that_goes_on_well_needs_nothing(tmp_path, slurm_here):
    plan = next_of(planted(tmp_path, "NONE_NEEDED", severity="WARNING", ticket="model_author"))
    assert not plan.steps and is_said(plan, "whether the ticket for model author is written")


@pytest.mark.parametrize("version", [1, 2])
def test_a_verdict_of_before_decisions_is_not_planned_by(version, tmp_path, no_slurm, command_next):
    folder = planted(tmp_path, "EXCLUDE")
    verdict = json.loads((folder / "verdict.json").read_text())
    del verdict["decision"]
    (folder / "verdict.json").write_text(json.dumps(verdict | {"version": version}))
    status, out, err = command_next(str(folder))
    assert (status, out) == (2, "") and f"is of version {version}" in err and "nanlocator report" in err


@pytest.mark.parametrize("length", [0, 1, 200])
def test_a_verdict_that_is_cut_off_is_not_planned_by(length, tmp_path, no_slurm, command_next):
    folder = planted(tmp_path, "EXCLUDE")
    text = (folder / "verdict.json").read_text()
    (folder / "verdict.json").write_text(text[:length])
    status, out, err = command_next(str(folder))
    assert (status, out) == (2, "") and "is cut off" in err and len(err.splitlines()) == 1


def test_a_folder_without_a_verdict_is_wrong_use(tmp_path, command_next):
    assert command_next(str(tmp_path))[0] == 2


@pytest.fixture
def command_next(capsys):
    def run(*words):
        status = program.main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# ---- what is printed ----------------------------------------------------------------------------


def test_the_program_prints_steps_with_commands_and_changes_nothing(tmp_path, slurm_here, command_next):
    slurm_here.gone()
    folder = planted(tmp_path, "EXCLUDE")
    save(tmp_path / "my ckpt", 800, bad=True)
    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "slurm.json.asked"
    }
    status, out, _ = command_next(str(folder))
    assert status == 1 and out.splitlines()[0].startswith(f"{folder} step 700: DO EXCLUDE, as of 20")
    status, text, _ = command_next(str(folder), "--json")
    listed = json.loads(text)
    assert listed["version"] == 1 and [step["command"] for step in listed["steps"]] == [
        step.command for step in next_of(folder).steps
    ]
    slurm_here.place.write_text(json.dumps(slurm_here.state))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "slurm.json.asked"}
    before.pop(slurm_here.place), after.pop(slurm_here.place)
    assert before == after
    asked = [json.loads(line) for line in Path(str(slurm_here.place) + ".asked").read_text().splitlines()]
    assert {name for name, *_ in asked} <= {"squeue", "sacct", "scontrol"}
    assert all(words[0] == "show" for name, *words in asked if name == "scontrol")


@pytest.mark.parametrize("state", ["", "RUNNING", "PENDING"])
@pytest.mark.parametrize(
    "kind", ["RESTART_AS_IS", "EXCLUDE", "SKIP_BATCH", "OLDER_CHECKPOINT", "DO_NOT_RESTART"]
)
def test_every_command_can_be_read_by_a_shell_whatever_the_names(kind, state, tmp_path, slurm_here):
    folder = tmp_path / "it's $HOME; here"
    folder.mkdir()
    slurm_here.gone()
    if state:
        slurm_here.job(state, started=local(FOUND + 600), hosts="a17")
    run = planted(folder, kind)
    save(folder / "my ckpt", 800, bad=True)
    plan = next_of(run)
    every = [
        *commands(plan),
        *(each.command for step in plan.steps for each in step.outcomes if each.command),
    ]
    assert every
    for command in every:
        subprocess.run(["sh", "-n", "-c", command], check=True)
        words = shlex.split(command)
        assert not any("FOLDER" in word or "HOST" in word.replace("$HOME", "") for word in words)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a17", ["a17"]),
        ("a[17-18,20],b1", ["a17", "a18", "a20", "b1"]),
        ("gpu-a[007-009]-x", ["gpu-a007-x", "gpu-a008-x", "gpu-a009-x"]),
        ("a1,a2", ["a1", "a2"]),
    ],
)
def test_slurms_lists_of_hosts_are_read(text, hosts):
    assert slurm._expanded(text) == hosts
