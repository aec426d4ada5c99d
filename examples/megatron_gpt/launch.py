"""Starts the ranks of a scenario, waits with a hard timeout and collects their results.

`ScenarioPool` keeps one run_scenarios.py alive: 8 ranks of TP2 x PP2 x DP2 start in 0.4 s instead of the
20 s of 8 fresh interpreters on 2 cores. `run_torchrun` is the real launcher, for tests that depend on it. In
both, ranks that are still alive at the timeout dump their Python stacks into their logs and are killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

# Not imported from scenarios.py, so that this module needs no torch.
HERE = pathlib.Path(__file__).resolve().parent
_STARTUP_SECONDS = 120.0


@dataclasses.dataclass
class Outcome:
    """The outcome of a run. `ranks[r]` is rank{r}.json, or None if rank r did not write it."""

    directory: pathlib.Path
    ranks: list[dict | None]
    seconds: float
    timed_out: bool
    exit_codes: list[int | None]

    def logs(self, last_lines: int = 25) -> str:
        """The ends of all logs, for a failure message."""
        parts = []
        for path in sorted(self.directory.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            parts.append(f"---- {path}\n" + "\n".join(lines[-last_lines:]))
        return "\n".join(parts)

    def require_survivors(self) -> list[dict]:
        """The results of all ranks that were not killed, or AssertionError as from `require_results`."""
        killed = [rank for rank, code in enumerate(self.exit_codes) if code == -signal.SIGKILL]
        survivors = [result for rank, result in enumerate(self.ranks) if rank not in killed]
        if self.timed_out or None in survivors:
            what = "timed out" if self.timed_out else "a survivor left no result"
            raise AssertionError(
                f"{what} after {self.seconds:.0f} s, killed: {killed}, in {self.directory}\n{self.logs(80)}"
            )
        return survivors  # type: ignore[return-value]

    def require_results(self) -> list[dict]:
        """`ranks`, or AssertionError with the logs if the run hung or a rank died without a result."""
        missing = [rank for rank, result in enumerate(self.ranks) if result is None]
        if self.timed_out or missing:
            what = "timed out" if self.timed_out else f"ranks {missing} left no result"
            raise AssertionError(f"{what} after {self.seconds:.0f} s in {self.directory}\n{self.logs(80)}")
        return self.ranks  # type: ignore[return-value]

    def require_success(self) -> list[dict]:
        """`require_results`, and no rank ended by an exception."""
        ranks = self.require_results()
        failed = [rank["rank"] for rank in ranks if rank["error"]]
        if failed:
            raise AssertionError(f"ranks {failed} raised in {self.directory}\n{self.logs()}")
        return ranks


class ScenarioPool:
    """A running run_scenarios.py --serve. Scenarios run one after another. Use it as a context manager."""

    def __init__(self, directory: pathlib.Path, environment: dict[str, str] | None = None) -> None:
        """`directory` gets one folder per scenario. `environment` is added to this process's."""
        self._directory = directory.resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._log = open(self._directory / "pool.log", "w+")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "run_scenarios.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._is_ready = False

    def __enter__(self) -> ScenarioPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def directory(self, scenario: dict) -> pathlib.Path:
        """Where the scenario's files go."""
        return self._directory / scenario["name"]

    def start(self, scenario: dict) -> None:
        """Starts a scenario (fields of scenarios.Scenario); `wait` returns its outcome."""
        if not self._is_ready:
            self._read_line(_STARTUP_SECONDS)
            self._is_ready = True
        request = {"scenario": scenario, "directory": str(self.directory(scenario))}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._running = scenario

    def wait(self, poll=None) -> Outcome:
        """Waits for the started scenario and calls `poll()` ten times a second."""
        scenario = self._running
        answer = self._read_line(scenario.get("timeout", 120.0) + 60.0, poll)
        directory = self.directory(scenario)
        return Outcome(
            directory=directory,
            ranks=_read_results(directory, scenario["ranks"]),
            seconds=answer["seconds"],
            timed_out=answer["timed_out"],
            exit_codes=answer["exit_codes"],
        )

    def run(self, scenario: dict) -> Outcome:
        self.start(scenario)
        return self.wait()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks die with it (PR_SET_PDEATHSIG)
            self._process.wait()
        self._log.close()

    def _read_line(self, seconds: float, poll=None) -> dict:
        # The answer is one line, written at once; nothing is buffered before it, so select() is reliable.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            readable, _, _ = select.select([self._process.stdout], [], [], 0.1)
            if poll is not None:
                poll()
            if readable:
                line = self._process.stdout.readline()
                if line:
                    return json.loads(line)
                break
        state = self._process.poll()
        self._log.seek(0)
        raise RuntimeError(
            f"run_scenarios.py {'does not answer' if state is None else f'ended with code {state}'} "
            f"after {seconds:.0f} s at most:\n{self._log.read()[-4000:]}"
        )


def run_torchrun(
    ranks: int, arguments: list[str], directory: pathlib.Path, timeout: float = 180.0
) -> Outcome:
    """run_training.py under torchrun on a free port. `arguments`: its command line without --output, which is
    `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(directory / "torchrun.log", "w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
                *("--redirects=3", f"--log-dir={directory / 'torchrun'}"),  # stdout.log, stderr.log per rank
                *(str(HERE / "run_training.py"), *arguments, "--output", str(directory)),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # its workers join its process group: all are killed together
        )
        timed_out = False
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            for child in _children(process.pid):
                os.kill(child, signal.SIGUSR1)  # faulthandler: stacks into the log
            time.sleep(2.0)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(
        directory=directory,
        ranks=_read_results(directory, ranks),
        seconds=time.monotonic() - started,
        timed_out=timed_out,
        exit_codes=[process.returncode],
    )


def _children(pid: int) -> list[int]:
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return found


def _read_results(directory: pathlib.Path, ranks: int) -> list[dict | None]:
    paths = [directory / f"rank{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]
