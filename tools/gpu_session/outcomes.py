"""What a step of tools/gpu has shown: of each of its cases, whether or not those before it went well."""

import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

HANGS = 90  # seconds after which a case is taken to hang: the process ends, with the stacks of its threads
Case = tuple[str, Callable[[], tuple[dict[str, Any], list[str]]]]


class NotShown(Exception):
    """A step that did not show what it should; with the figures that there are."""

    def __init__(self, why: str, figures: dict[str, Any]) -> None:
        super().__init__(why)
        self.figures = figures


class Cases:
    """Cases of one step. ``figures`` raises where one of them was not shown."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._replays: list[tuple[str, subprocess.Popen[str]]] = []

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """Gives the dictionary for the case's figures."""
        outcome = self.outcomes[name] = {"shown": True}
        started = time.perf_counter()
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            yield outcome
        except Exception as error:
            traceback.print_exc()
            self._not_shown(name, f"{type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcome["seconds"] = round(time.perf_counter() - started, 2)
        print(name, outcome, flush=True)

    def replay(self, name: str, folder: Path) -> int:
        """Starts `nanlocator replay` of each bundle below `folder`; how many there are."""
        bundles = sorted(path.parent for path in folder.rglob("bundle.json"))
        for bundle in bundles:
            command = ["nanlocator", "replay", str(bundle)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self._replays.append((name, process))
        return len(bundles)

    def figures(self, **others: Any) -> dict[str, Any]:
        for name, process in self._replays:
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            print(f"replay of {name}, exit status {process.returncode}\n{output}", flush=True)
            conclusions = [line for line in output.splitlines() if line.startswith("conclusion")]
            replay = {"status": process.returncode, "conclusion": conclusions or output[-300:]}
            self.outcomes[name].setdefault("replays", []).append(replay)
            if process.returncode not in (0, 1):
                self._not_shown(name, "its bundle does not replay")
        figures = {"cases": self.outcomes, **others}
        wrong = {name: outcome["why"] for name, outcome in self.outcomes.items() if not outcome["shown"]}
        if wrong:
            raise NotShown("\n".join(f"{name}: {why}" for name, why in wrong.items()), figures)
        return figures

    def _not_shown(self, name: str, why: str) -> None:
        outcome = self.outcomes[name]
        outcome["shown"] = False
        outcome["why"] = "; ".join(filter(None, [outcome.get("why"), why]))


def outcomes_of(cases: Iterable[Case], seconds: float) -> dict[str, Any]:
    """The figures of cases that give what they found, and what of it is wrong. None begins when the seconds
    are over: those were not run."""
    outcomes, began = Cases(), time.monotonic()
    for name, run in cases:
        if time.monotonic() - began > seconds:
            outcomes.outcomes[name] = {"shown": True, "not run": "no time was left"}
            continue
        with outcomes.case(name) as outcome:
            found, wrong = run()
            outcome |= found
            assert not wrong, "; ".join(wrong)
    return outcomes.figures()


def host_waits(device: str, step: Callable[[], Any]) -> int | None:
    """Calls of Torch that wait for the GPU, as set_sync_debug_mode sees them."""
    if device != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen)


@contextlib.contextmanager
def standard_error() -> Iterator[Callable[[], str]]:
    """Gives what this process, C++ included, has printed there since the block began."""
    with tempfile.TemporaryFile() as file:

        def printed() -> str:
            sys.stderr.flush()
            file.seek(0)
            return file.read().decode(errors="replace")

        sys.stderr.flush()
        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            text = printed()
            os.dup2(own, 2)
            os.close(own)
            sys.stderr.write(text)
