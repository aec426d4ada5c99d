"""Options: an argument, else its NANLOCATOR_* variable, else the default."""

import datetime
import os
from collections.abc import Callable
from typing import TypedDict, TypeVar

import torch

from nanlocator import _C

T = TypeVar("T")


class Options(TypedDict, total=False):
    """What every integration can be told. An option that is left out or None is read from NANLOCATOR_<NAME>
    (NANLOCATOR_ON_BAD, ...), else it has its default.

    on_bad: ``"stop"`` (default) raises ``nanlocator.NonFiniteGradientError`` on every rank, before anything
        is clipped or a weight moves; ``"report"`` writes the verdict and goes on; ``"skip"`` goes on without
        the optimizer's step; ``"recover"`` goes on with the gradients and losses of a clean re-run, and
        stops where there is none.
    output_dir: folder of the run, default ``nanlocator_run``; nothing but the parameter map is written while
        all is well.
    level: what is watched at every step. ``"grads"``: gradients. ``"boundaries"``: also what ranks send
        to each other. ``"modules"``: also every module's inputs, outputs and their gradients,
        without waiting. ``"operators"``: every operator, which waits for the device between them.
    rerun: ``True`` (default) executes a bad step again, with every operator traced, so that the verdict names
        the operator and says whether the fault repeats. ``False`` does not. ``"always"`` executes every step
        twice and warns where the two differ in a bit.
    check_params: scan the parameters before and after each step, too; default False.
    gather_deadline: seconds to wait for ranks that do not answer when a finding is gathered; default 30.
    """

    on_bad: str | None
    output_dir: str | os.PathLike[str] | None
    level: str | None
    rerun: bool | str | None
    check_params: bool | None
    gather_deadline: float | None


def check_names(options: Options) -> None:
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"unexpected option {name!r}; there are {', '.join(Options.__annotations__)}")


def resolve_options(
    options: Options,
    *,
    integration: str,
    not_covered: list[str] | None = None,
    default_level: str = "grads",
    default_output_dir: str = "nanlocator_run",
) -> _C.LocatorOptions:
    """Option, else NANLOCATOR_<NAME>, else default. A variable that cannot be read is a UsageError.
    bundle_bytes, bundle_count and max_incidents have variables only."""
    check_names(options)
    resolved = _C.LocatorOptions()
    resolved.on_bad = _choose("on_bad", options.get("on_bad"), str, "stop")
    resolved.output_dir = str(_choose("output_dir", options.get("output_dir"), str, default_output_dir))
    resolved.level = _choose("level", options.get("level"), str, default_level)
    rerun = options.get("rerun")
    policy = None if rerun is None else _rerun_policy(rerun)
    resolved.rerun = _choose("rerun", policy, _rerun_policy, "on_bad")
    resolved.check_params = _choose("check_params", options.get("check_params"), _parse_bool, False)
    seconds = _choose("gather_deadline", options.get("gather_deadline"), float, 30.0)
    if not 0 < seconds < 86_400:
        raise _C.UsageError(f"gather_deadline is {seconds}; it must be between 0 and 86400 seconds")
    resolved.gather_deadline = datetime.timedelta(seconds=seconds)
    resolved.bundle_bytes = _choose("bundle_bytes", None, _parse_count, resolved.bundle_bytes)
    resolved.bundle_count = _choose("bundle_count", None, _parse_count, resolved.bundle_count)
    resolved.max_incidents = _choose("max_incidents", None, _parse_count, resolved.max_incidents)
    resolved.threads = torch.get_num_threads()
    resolved.integration = integration
    resolved.not_covered = not_covered or []
    return resolved


def recorded_bytes() -> int:
    """NANLOCATOR_RECORDED_BYTES: what may be kept for operators outside of modules."""
    return _choose("recorded_bytes", None, _parse_count, 256 << 20)


def _choose(name: str, argument: T | None, parse: Callable[[str], T], default: T) -> T:
    if argument is not None:
        return argument
    variable = f"NANLOCATOR_{name.upper()}"
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise _C.UsageError(f"{variable}={text!r} cannot be read: {error}") from None


def _rerun_policy(value: bool | str) -> str:
    if value == "always":
        return "always"
    try:
        is_on = value if isinstance(value, bool) else _parse_bool(str(value))
    except ValueError:
        raise _C.UsageError(f"rerun is {value!r}; it must be True, False or 'always'") from None
    return "on_bad" if is_on else "never"


def _parse_count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError("expected a number that is not negative")
    return count


def _parse_bool(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in values:
        raise ValueError("expected 1 or 0, true or false")
    return values[text.lower()]
