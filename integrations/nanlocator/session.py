"""What the integrations share: options with their environment variables, the connection between the
ranks, and the end of a bad step."""

import atexit
import contextlib
import datetime
import json
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from nanlocator import _C
from nanlocator.errors import NonFiniteGradientError

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
    given = options.get
    resolved = _C.LocatorOptions()
    resolved.on_bad = _choose("on_bad", given("on_bad"), str, "stop")
    resolved.output_dir = str(_choose("output_dir", given("output_dir"), str, default_output_dir))
    resolved.level = _choose("level", given("level"), str, default_level)
    resolved.rerun = _rerun_policy(_choose("rerun", given("rerun"), str, True))
    resolved.check_params = _choose("check_params", given("check_params"), _parse_bool, False)
    seconds = _choose("gather_deadline", given("gather_deadline"), float, 30.0)
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


class RankConnection:
    """The group that reduces the flag and the Store that carries ledgers; closed with ``close``.

    The group is one of our own, so that the flag never disturbs the sequence of the framework's
    collectives. Its time-out is training's, not gather_deadline: in a healthy job a rank may reach the flag
    minutes after the others, for instance after writing a checkpoint.
    """

    _installed = 0  # installs of this process, the same on all ranks: keeps Store keys apart

    def __init__(self, gather_deadline: datetime.timedelta) -> None:
        RankConnection._installed += 1
        self._group = dist.new_group(timeout=_timeout_of(dist.group.WORLD))
        store = dist.distributed_c10d._get_default_store()
        self.communicator = _C.Communicator(
            group=self._group, store=store, prefix=f"nanlocator/{RankConnection._installed}"
        )
        self._goodbye = weakref.finalize(self, _say_goodbye, self.communicator, gather_deadline, os.getpid())
        # weakref's own is not called in a process of multiprocessing's (Python 3.13).
        self._goodbye.atexit = False
        atexit.register(self._goodbye)

    def close(self) -> None:
        self._goodbye()
        atexit.unregister(self._goodbye)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def connect(options: "_C.LocatorOptions") -> RankConnection | None:
    """None for a process by itself. Collective."""
    return RankConnection(options.gather_deadline) if is_distributed() else None


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """None, the backend's default, where no backend of the group says."""
    backends = [group._get_backend(device) for device in group._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    return max((each._timeout for each in options if hasattr(each, "_timeout")), default=None)


def _say_goodbye(communicator: _C.Communicator, gather_deadline: datetime.timedelta, process: int) -> None:
    """At the interpreter's exit, or when the connection is no longer needed. A process that an exception
    ends says so: its peers, which may wait for it in a collective, then know why it does not come. One that
    a peer's end has ended leaves the word to that peer, or waits until its silence is noticed: where all that
    are left end at once, nobody else would say whose end it was."""
    if os.getpid() != process:
        return  # a forked worker, which has none of our threads
    error = ending_error()
    is_orderly = error is None or isinstance(error, NonFiniteGradientError | KeyboardInterrupt)
    if is_orderly:
        communicator.leave()
    elif is_failure_of_peers(error):
        communicator.wait_for_loss(gather_deadline)
        communicator.leave()
    else:
        communicator.leave(first_line(error))


def ending_error() -> BaseException | None:
    """At the interpreter's exit: the exception that ends it."""
    return getattr(sys, "last_value", None)


def is_failure_of_peers(error: BaseException) -> bool:
    """True where the error says that a collective or a transfer between ranks has failed: then a peer may
    have gone. gloo and NCCL raise plain RuntimeErrors for it, too."""
    if isinstance(error, _C.AgreementError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _C.is_failure_of_peers(str(error))


def abort_collectives() -> None:
    """Ends what this process waits for in any group; whoever waits gets an error. Training cannot go on."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):  # a backend that cannot
            group.abort()


def first_line(error: BaseException) -> str:
    """``ValueError: what it says``, without what follows in further lines."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 300 else text[:297] + "..."


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def raise_for(verdict: dict[str, Any], run_dir: str) -> NoReturn:
    """The end of a run under policy ``stop``, on every rank. Among several ranks the error's text is the
    headline: rank 0 has printed the whole, and each rank's traceback is to be read beside the others'."""
    error = whole = NonFiniteGradientError(_C.format_verdict(json.dumps(verdict), run_dir), verdict)
    if is_distributed():
        text = f"{_headline(str(whole))}\nRank 0 has printed the verdict; it is in {run_dir}/verdict.json"
        error = NonFiniteGradientError(text, verdict)
    try:
        raise error
    except NonFiniteGradientError:
        record_for_torchrun(whole)
        raise


def _headline(text: str) -> str:
    """The first line and its continuation, which is indented by more than the labels."""
    first, *others = text.splitlines()
    for line in others:
        if not line.startswith("    "):
            break
        first += " " + line.strip()
    return first


def record_for_torchrun(error: BaseException) -> None:
    """Into torchrun's error file, as torch's decorator ``record`` does for scripts that have it: `error` as
    its message, and the traceback of the exception that is being handled, which is what torchrun's summary
    shows (elastic/multiprocessing/errors). Nothing where torchrun has not started this process."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)


def device_description(device: torch.device) -> str:
    """``cpu``, or on CUDA the index, UUID and PCI address: what a hardware team asks for."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    address = "{:04x}:{:02x}:{:02x}.0".format(
        getattr(properties, "pci_domain_id", 0),
        getattr(properties, "pci_bus_id", 0),
        getattr(properties, "pci_device_id", 0),
    )
    return f"cuda:{device.index} GPU-{uuid} {address}"


def rank_prefix() -> str:
    """ "rank 3: " where there are several."""
    return f"rank {dist.get_rank()}: " if is_distributed() else ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def log_once(message: str) -> None:
    """One line on rank 0's stderr."""
    if not is_distributed() or dist.get_rank() == 0:
        print(f"nanlocator: {message}", file=sys.stderr, flush=True)
