"""The options, one row each.

A row is a field of ``Options``, the keyword arguments of every integration. Its name is also that of the
variable (NANLOCATOR_ON_BAD), of the launchers' flag (--on-bad) and of the engine's field, which has the
default (nanlocator/step/locator_options.hpp). Its ``Option`` has the rest. ``tools/option_table.py`` makes
the table in docs/options.md from the rows.
"""

import contextlib
import datetime
import difflib
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

import torch

from nanlocator import _C
from nanlocator.check_checkpoint.content import finite_of
from nanlocator.engine.on_finding import OnFinding
from nanlocator.engine.this_rank import log_once


class Kind(NamedTuple):
    """How an option's values are written in Python, in variables and as flags."""

    read: Callable[[Any], Any] = str  # converts to the engine's value; a ValueError says what was expected
    show: Callable[[Any], str] = str  # the reverse, for display
    metavar: str | None = None
    choices: tuple[str, ...] = ()  # empty: the engine's choices, if any
    is_switch: bool = False


class Option(NamedTuple):
    kind: Kind
    help: str
    defaults: Mapping[str, str] = {}  # for integrations whose default differs from the engine's
    only: tuple[str, ...] = ()  # the only integrations that have the option; empty: all


def _switch(value: Any) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in values:
        raise ValueError("expected 1 or 0, true or false")
    return values[str(value).lower()]


def _rerun(value: Any) -> str:
    if value == "always":
        return "always"
    try:
        return "on_bad" if _switch(value) else "never"
    except ValueError:
        raise ValueError("expected True, False or 'always'") from None


def _seconds(value: Any) -> datetime.timedelta:
    with contextlib.suppress(TypeError, ValueError):
        if 0 < float(value) < 86_400:
            return datetime.timedelta(seconds=float(value))
    raise ValueError("expected seconds between 0 and 86400")


def _count(value: Any) -> int:
    with contextlib.suppress(TypeError, ValueError):
        if int(value) >= 0:
            return int(value)
    raise ValueError("expected a whole number, 0 or more")


_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def _bytes(value: Any) -> int:
    """Also "512 MiB" or "4G", all in powers of 1,024."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", str(value).strip().lower())
    if found is None:
        raise ValueError("expected a number of bytes, or one with a unit: 512MiB, 4GiB")
    return int(found[1]) << _UNITS[found[2]]


_RERUNS = {"on_bad": "on", "never": "off", "always": "always"}

CHOICE = Kind()
FOLDER = Kind(metavar="FOLDER")
SWITCH = Kind(_switch, lambda is_on: "on" if is_on else "off", is_switch=True)
RERUN = Kind(_rerun, _RERUNS.__getitem__, choices=("yes", "no", "always"))
SECONDS = Kind(_seconds, lambda time: f"{time.total_seconds():g} s", "SECONDS")
BYTES = Kind(_bytes, lambda count: f"{count / 2**30:g} GiB", "BYTES")
COUNT = Kind(_count, metavar="N")
ON_FINDING = Kind(OnFinding, lambda action: "none" if action is None else str(action), "COMMAND")


class Options(TypedDict, total=False):
    """An argument takes precedence over its variable, and that over the default. None counts as not given."""

    on_bad: Annotated[
        str | None,
        Option(
            CHOICE,
            "action on a bad step. `stop`: raise `nanlocator.NonFiniteGradientError` on every rank before "
            "any weight changes; `report`: write the verdict and continue; `skip`: continue without the "
            "optimizer step; `recover`: continue with the gradients and losses of a clean re-run, bit for "
            "bit as if the fault had not happened; stop if there is none",
        ),
    ]
    level: Annotated[
        str | None,
        Option(
            CHOICE,
            "what is scanned in every step. `grads`: gradients and losses; `boundaries`: also what ranks "
            "exchange; `modules`: also every module's inputs and outputs; `operators`: also every operator, "
            "which waits for the device",
            {"megatron": "boundaries", "transformers": "modules"},
        ),
    ]
    rerun: Annotated[
        bool | str | None,
        Option(
            RERUN,
            "re-run a bad step with every operator traced; `always`: re-run every step, and warn if any bit "
            "differs. `recover` requires it",
        ),
    ]
    output_dir: Annotated[
        str | os.PathLike[str] | None,
        Option(FOLDER, "folder for the run's files; each start adds its own `a0`, `a1`, ..."),
    ]
    checkpoint_dir: Annotated[
        str | os.PathLike[str] | None,
        Option(
            FOLDER,
            "folder into which the training saves checkpoints, so that a verdict can name the one to load; "
            "known to the integrations of Megatron-Core, Transformers and Lightning, and by default the one "
            "into which it has saved last by torch.save. The names must have the number of the step, "
            '"step" or "iter" before it; where a resumed program counts its steps from 1 again, what it has '
            "saved or loaded says how many came before",
        ),
    ]
    on_finding: Annotated[
        Callable[[Path], object] | str | None,
        Option(
            ON_FINDING,
            "what rank 0 does with a finding once it is on disk and before the step raises: a function, "
            "which gets the path of `verdict.json`, or a command line, which gets the path as its last word "
            "or in place of `{}` and is read by no shell. After 30 s it is killed. Its failure is a warning",
        ),
    ]
    check_params: Annotated[
        bool | None,
        Option(
            SWITCH,
            "also scan the parameters before and after each step; in a bad step they are always scanned",
        ),
    ]
    gather_deadline: Annotated[
        float | None,
        Option(
            SECONDS,
            "how long a finding waits for ranks that do not answer; half as long for a rank whose heartbeat "
            "has stopped",
        ),
    ]
    max_incidents: Annotated[
        int | None,
        Option(
            COUNT,
            "how many findings to locate under `report`, `skip` and `recover`; further ones are only counted",
        ),
    ]
    bundle_count: Annotated[
        int | None, Option(COUNT, "maximum number of bundles per rank; the first origins get them")
    ]
    bundle_bytes: Annotated[int | None, Option(BYTES, "maximum size of all bundles of a rank")]
    recorded_bytes: Annotated[
        int | None,
        Option(
            BYTES,
            "maximum size of the data kept per step to re-run operators outside modules",
            only=("watch", "deepspeed"),
        ),
    ]


# The integrations that take options, and their names in run.json.
INTEGRATIONS = {
    "watch": "pytorch",
    "optimizer": "pytorch",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
}


def rows(integration: str) -> dict[str, Option]:
    """The rows of this integration's options, by name."""
    hints = get_type_hints(Options, include_extras=True)
    every: dict[str, Option] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return {name: row for name, row in every.items() if not row.only or integration in row.only}


def variable_of(name: str) -> str:
    return f"NANLOCATOR_{name.upper()}"


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@functools.cache
def _warn_of_unknown_variables() -> None:
    """Once per process: a misspelt variable would have no effect."""
    known = {"NANLOCATOR", *map(variable_of, get_type_hints(Options))}
    for name in sorted(os.environ):
        if name.startswith("NANLOCATOR_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            log_once(f"{name} is no variable of nanlocator's" + (f": {near[0]}?" if near else ""))


def check_names(options: Mapping[str, object], integration: str) -> None:
    names = rows(integration)
    for name in options:
        if name not in names:
            raise TypeError(f"unexpected option {name!r}; expected {', '.join(names)}")


def resolve_options(
    options: Options, integration: str, not_covered: list[str] | None = None, **defaults: str | None
) -> _C.LocatorOptions:
    """``defaults`` of this call take precedence over the rows'. Raises UsageError for a value that cannot be
    read."""
    check_names(options, integration)
    resolved = _C.LocatorOptions()
    _warn_of_unknown_variables()
    for name, option in rows(integration).items():
        value, source = _given(name, option, options)
        if value is None:
            value = defaults.get(name, option.defaults.get(integration))
        if value is None:
            continue
        try:
            setattr(resolved, name, value)
        except _C.UsageError as error:  # an unknown choice
            raise _C.UsageError(f"{source}: {error}" if source != name else str(error)) from None
    resolved.threads = torch.get_num_threads()
    resolved.integration = INTEGRATIONS[integration]
    resolved.not_covered = not_covered or []
    resolved.set_read_checkpoint(finite_of)
    return resolved


def _given(name: str, option: Option, options: Mapping[str, object]) -> tuple[Any, str]:
    """The value, or None, and the name by which it was given."""
    source, value = name, options.get(name)
    if value is None:
        source = variable_of(name)
        value = os.environ.get(source)
    if value is None:
        return None, name
    try:
        return option.kind.read(value), source
    except (TypeError, ValueError) as error:
        raise _C.UsageError(f"{source}={value!r} cannot be read: {error}") from None
