"""What a program wants done with a finding: ``on_finding``, a function or a command.

It runs on rank 0, bounded, while the other ranks wait; nothing that it does changes how training goes on.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

SECONDS = 30.0
_SECONDS_TO_DIE = 2.0
# A command is no worker of this job: neither attached to, nor the author of torchrun's record of the error.
_NOT_PASSED_ON = ("NANLOCATOR", "TORCHELASTIC_ERROR_FILE")


class OnFinding:
    """Calls a function with the path of verdict.json, or runs a command with it as the last word, or in place
    of each ``{}``. No shell reads the command: variables and pipes need ``sh -c '...' {}``.

    Whatever goes wrong is one line on stderr. A command is killed with its children after ``seconds``; a
    function cannot be killed, and is left behind on its daemon thread.
    """

    def __init__(self, action: Callable[[Path], object] | str, seconds: float = SECONDS) -> None:
        """Raises ValueError for a command that cannot be split into words."""
        if not callable(action) and not isinstance(action, str):
            raise ValueError("expected a function or a command")
        self._seconds = seconds
        self._function = action if callable(action) else None
        self._words = [] if callable(action) else shlex.split(action)
        if self._function is None and not self._words:
            raise ValueError("expected a function or a command")

    def __call__(self, verdict: Path) -> None:
        try:
            problem = self._call(verdict) if self._function is not None else self._run(verdict)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            print(f"nanlocator: on_finding: {problem}; training is not affected", file=sys.stderr, flush=True)

    def _call(self, verdict: Path) -> str:
        function = self._function
        assert function is not None
        problems: list[str] = []

        def work() -> None:
            try:
                function(verdict)
            except BaseException as error:  # SystemExit, too: it may not end the training
                problems.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work, name="nanlocator on_finding", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive():
            return f"the function has not returned in {self._seconds:g} s and is left behind"
        return problems[0] if problems else ""

    def _run(self, verdict: Path) -> str:
        path = str(verdict)
        words = [each.replace("{}", path) for each in self._words]
        if words == self._words:
            words.append(path)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=2,  # training's own output stays as it is
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(self._seconds)
        except BaseException as error:
            _kill(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"{words[0]} was killed after {self._seconds:g} s"
            raise
        if status < 0:
            return f"{words[0]} was ended by signal {-status}"
        return f"{words[0]} ended with status {status}" if status else ""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_SECONDS_TO_DIE)
    except (OSError, subprocess.TimeoutExpired):
        pass  # in the kernel, for instance in a file system that does not answer
