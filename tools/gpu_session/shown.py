"""What steps of tools/gpu share: many cases, each with its outcome, and how often the host waits."""

import faulthandler
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch


class NotShown(Exception):
    """A step that did not show what it should; with the figures that there are."""

    def __init__(self, why: str, figures: dict[str, Any]) -> None:
        super().__init__(why)
        self.figures = figures


HANGS = 90  # seconds after which a case is taken to hang: the process ends, with the stacks of its threads
Case = tuple[str, Callable[[], tuple[dict[str, Any], list[str]]]]


def outcomes_of(cases: Iterable[Case], seconds: float) -> dict[str, Any]:
    """What each case found, by its name; cases give that, and what of it is wrong. One that fails does not
    keep the next one from running; none begins when the seconds are over."""
    began, outcomes, failed = time.monotonic(), {}, []
    for name, run in cases:
        started = time.monotonic()
        if started - began > seconds:
            outcomes[name] = {"outcome": "not run: no time was left"}
            continue
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            found, wrong = run()
        except Exception as error:
            found = {"traceback": traceback.format_exc()[-2500:]}
            wrong = [f"{type(error).__name__}: {error}"[:1000]]
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcome = {"outcome": "failed" if wrong else "shown", "wrong": wrong} | found
        outcomes[name] = outcome | {"seconds": round(time.monotonic() - started, 2)}
        print(json.dumps({name: outcomes[name]}, default=str), flush=True)
        failed += [name] if wrong else []
    outcomes = json.loads(json.dumps(outcomes, default=str))
    if failed:
        raise NotShown(f"{len(failed)} of {len(outcomes)} cases: {', '.join(failed)}", outcomes)
    return outcomes


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
