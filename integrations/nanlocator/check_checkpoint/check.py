"""The check of a path: finds the checkpoint, reads its tensors, judges them, compares them with those
before."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from nanlocator._C import UsageError
from nanlocator.check_checkpoint import judging, layouts
from nanlocator.check_checkpoint.reading import Plan, can_be_bad
from nanlocator.check_checkpoint.report import (
    CheckpointReport,
    Content,
    Finding,
    Largest,
    Report,
    Statistics,
    TensorReport,
    Unread,
)
from nanlocator.check_checkpoint.sources import UnreadError
from nanlocator.check_checkpoint.stored import Role, StoredTensor

__all__ = ["BEFORE", "Progress", "check_checkpoint"]

BEFORE = "before"  # compare with the checkpoint before, if there is one


@dataclass(frozen=True, slots=True)
class Progress:
    """Of the checkpoint that is being read."""

    path: str
    bytes_read: int
    bytes_in_all: int
    tensors_read: int
    tensors_in_all: int


class _Expired(TimeoutError):
    """The time is up: the report belongs to the caller now."""


def check_checkpoint(
    path: str | os.PathLike[str],
    *,
    which: str = "resume",
    parameters: Sequence[str] = (),
    compare: str | os.PathLike[str] | None = BEFORE,
    deadline_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    maps_files: bool = False,
) -> Report:
    """Reads a checkpoint and says which of its tensors hold NaN, Inf or absurd magnitudes. Executes nothing
    that is in it, reads it in blocks of 4 MiB, and needs no device.

    ``path``: a file, a checkpoint's folder, or a run's folder. Of the latter ``which="resume"`` checks the
    checkpoint that a resume would load, ``which="all"`` all of them. ``parameters``: globs of names
    ("*layers.3.*") whose tensors are `is_selected`; integers among them are read, too. ``compare``: a
    checkpoint whose magnitudes are compared; None: none. ``deadline_s``: return after this many seconds
    with what is known by then, even if the file system does not answer (the thread that waits for it is
    left behind). ``on_progress`` is called between two blocks, by a thread that scans. ``maps_files``
    spares a copy, but an error of the file system ends the process (SIGBUS).

    Raises UsageError for wrong arguments. What cannot be read is in the report, not raised.

        report = nanlocator.check_checkpoint("checkpoints/iter_0001250", deadline_s=60)
        if report.is_safe is False:
            print(report.checkpoints[0].findings[0])
    """
    if which not in ("resume", "all"):
        raise UsageError(f'which is {which!r}: expected "resume" or "all"')
    if deadline_s is not None and not deadline_s >= 0:
        raise UsageError(f"deadline_s is {deadline_s}: expected seconds")
    check = _Check(
        Path(path),
        which,
        tuple(parameters),
        compare,
        on_progress,
        is_timed=deadline_s is not None,
        maps_files=maps_files,
    )
    if deadline_s is None:
        check.run()
    else:
        thread = threading.Thread(target=check.run, name="nanlocator checkpoint check", daemon=True)
        thread.start()
        thread.join(deadline_s)
    return check.take()


class _Check:
    def __init__(
        self,
        path: Path,
        which: str,
        parameters: tuple[str, ...],
        compare: str | os.PathLike[str] | None,
        on_progress: Callable[[Progress], None] | None,
        *,
        is_timed: bool,
        maps_files: bool,
    ) -> None:
        self._path, self._which, self._parameters, self._compare = path, which, parameters, compare
        self._is_timed, self._maps_files, self._on_progress = is_timed, maps_files, on_progress
        self._report = Report(str(path))
        self._lock = threading.Lock()  # guards the report, which `take` takes away
        self._is_over = False
        self._error: BaseException | None = None
        self._done = False

    def take(self) -> Report:
        """The report, as it is. The check ends soon afterwards, if it is still running."""
        with self._lock:
            self._is_over = True
            if self._error is not None:
                raise self._error
            if not self._done:
                if not self._report.checkpoints and not self._report.problem:
                    self._report.problem = "the time was up before the checkpoint was found"
                for checkpoint in self._report.checkpoints:
                    if not checkpoint.complete:
                        _conclude(checkpoint)
            return self._report

    def run(self) -> None:
        try:
            self._run()
        except _Expired:
            return
        except (UnreadError, OSError) as error:
            with self._writing():
                self._report.problem = str(error)
        except BaseException as error:
            if not self._is_timed:
                raise
            self._error = error
        self._done = True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            if self._is_over:
                raise _Expired
            yield

    def _keep_on(self) -> None:
        if self._is_over:
            raise _Expired

    def _run(self) -> None:
        if not self._path.exists():
            raise UnreadError(f"{self._path}: no such file or folder")
        run = layouts.run_at(self._path)
        if run is None or run.chosen is None:
            older = layouts.before(self._path.absolute()) if self._compare == BEFORE else None
            report, tensors = self._check(self._path, layouts.iteration_of(self._path.absolute()), "", [])
            self._compare_with_other(report, tensors, older)
            return
        chosen, older = run.chosen, None
        if self._which == "resume":
            others = [each.path for each in run.candidates if each.path != chosen.path]
            with self._writing():
                self._report.others = [each.name for each in others]
            report, tensors = self._check(chosen.path, chosen.iteration, run.why, run.notes)
            if self._compare == BEFORE:
                older = layouts.before(chosen.path.absolute())
            self._compare_with_other(report, tensors, older)
            return
        checked = []
        for candidate in run.candidates:
            why = run.why if candidate.path == chosen.path else ""
            checked.append(self._check(candidate.path, candidate.iteration, why, run.notes if why else []))
        if self._compare == BEFORE:
            for (report, tensors), (previous, before) in itertools.pairwise(checked):
                self._compare_with(report, tensors, previous.path, before)

    def _check(
        self, path: Path, iteration: int | None, why: str, notes: list[str]
    ) -> tuple[CheckpointReport, list[TensorReport]]:
        started = time.monotonic()
        report = CheckpointReport(str(path), "", iteration, why, notes=list(notes))
        with self._writing():
            self._report.checkpoints.append(report)
        try:
            found = layouts.contents(path, self._keep_on)
        except (UnreadError, OSError) as error:
            with self._writing():
                report.layout, report.complete = "unknown", True
                report.unread.append(Unread(path.name, str(error)))
                _conclude(report)
            return report, []
        rows = [self._row(tensor) for tensor in found.tensors]
        with self._writing():
            report.layout = found.layout
            report.tensors = rows
            report.unread = list(found.unread)
            report.notes += found.notes
            report.findings = list(_bad_numbers(found))
        self._read(report, found.tensors, rows)
        with self._writing():
            report.complete = True
            report.seconds = time.monotonic() - started
            _conclude(report)
        return report, rows

    def _row(self, tensor: StoredTensor) -> TensorReport:
        is_selected = any(
            fnmatchcase(tensor.name, glob) or fnmatchcase(tensor.name, f"*.{glob}")
            for glob in self._parameters
        )
        return TensorReport(
            tensor.name,
            tensor.role.value,
            tensor.dtype,
            tensor.shape,
            tensor.file,
            None,
            tensor.unread,
            is_selected,
        )

    def _read(self, report: CheckpointReport, tensors: list[StoredTensor], rows: list[TensorReport]) -> None:
        row_of = {id(tensor): row for tensor, row in zip(tensors, rows, strict=True)}
        wanted = [
            tensor
            for tensor, row in zip(tensors, rows, strict=True)
            if any(can_be_bad(part.dtype) or row.is_selected for part in tensor.parts)
        ]
        weights = [tensor for tensor in wanted if tensor.role is Role.WEIGHTS]
        rest = [tensor for tensor in wanted if tensor.role is not Role.WEIGHTS]
        # In the order of the files; but if the time may be up, the weights first.
        plans = [Plan(weights), Plan(rest)] if self._is_timed else [Plan(wanted)]
        done = 0
        with self._writing():
            report.bytes_in_all = sum(plan.bytes for plan in plans)

        def take(tensor: StoredTensor, statistics: Statistics) -> None:
            nonlocal done
            done += 1
            with self._writing():
                row = row_of[id(tensor)]
                row.statistics, row.unread = statistics, tensor.unread

        def count(length: int) -> None:
            with self._writing():
                report.bytes_read += length
            if self._on_progress is not None:
                self._on_progress(
                    Progress(report.path, report.bytes_read, report.bytes_in_all, done, len(wanted))
                )

        for plan in plans:
            plan.measure(take, count, self._keep_on, maps_files=self._maps_files)

    def _compare_with_other(
        self, report: CheckpointReport, tensors: list[TensorReport], older: Path | None
    ) -> None:
        if self._compare is None:
            return
        path = older if self._compare == BEFORE else Path(self._compare)
        if path is None or not tensors:
            return
        other = CheckpointReport(str(path), "")
        try:
            run = layouts.run_at(path)
            if run is not None and run.chosen is not None:
                path = run.chosen.path
            found = layouts.contents(path, self._keep_on)
        except (UnreadError, OSError) as error:
            with self._writing():
                report.notes.append(f"not compared: {error}")
            return
        weights = [tensor for tensor in found.tensors if tensor.role is Role.WEIGHTS]
        rows = [self._row(tensor) for tensor in weights]
        self._read(other, weights, rows)
        self._compare_with(report, tensors, str(path), rows)

    def _compare_with(
        self, report: CheckpointReport, tensors: list[TensorReport], path: str, before: list[TensorReport]
    ) -> None:
        with self._writing():
            report.largest_before = _largest(path, before)
            known = {id(each.tensor) for each in report.findings}
            report.findings += [
                each for each in judging.grown(tensors, before) if id(each.tensor) not in known
            ]
            _set_contents(report)


def _bad_numbers(found: layouts.Contents) -> Iterator[Finding]:
    """A learning rate of Inf, or anything of NaN, among an optimizer's settings. Other settings may be
    Inf."""
    for file, number in found.numbers:
        is_nan = number.value != number.value
        if is_nan or (number.name.endswith(".lr") and abs(number.value) == float("inf")):
            statistics = Statistics(1, int(is_nan), int(number.value > 0), int(number.value < 0), 0, ())
            row = TensorReport(number.name, Role.OPTIMIZER.value, "float", (), file, statistics)
            yield Finding("nonfinite", row)


def _conclude(report: CheckpointReport) -> None:
    numbers = [each for each in report.findings if each.tensor.dtype == "float"]
    report.findings = [*judging.find(report.tensors), *numbers]
    report.findings.sort(key=lambda each: each.kind != "nonfinite")
    listed = {each.what for each in report.unread}
    for row in report.tensors:
        if row.unread and row.role != Role.OTHER.value and row.name not in listed:
            report.unread.append(Unread(row.name, f"{row.file}: {row.unread}", row.role))
    for row in report.tensors:
        if row.role == Role.OTHER.value and row.statistics is not None and row.statistics.nonfinite:
            report.notes.append(
                f"{row.name} in {row.file} holds NaN or Inf: neither a weight nor of the optimizer"
            )
        if judging.is_mask(row):
            report.notes.append(f"{row.name} in {row.file} is a mask of -Inf")
    report.largest = _largest(report.path, report.tensors)
    _set_contents(report)


def _set_contents(report: CheckpointReport) -> None:
    for role in (Role.WEIGHTS.value, Role.OPTIMIZER.value):
        kinds = {each.kind for each in report.findings if each.tensor.role == role}
        is_unknown = any(each.role in ("", role) for each in report.unread)
        if not report.complete:
            is_unknown = (
                is_unknown or not report.tensors or any(_is_not_read(row, role) for row in report.tensors)
            )
        if "nonfinite" in kinds:
            content = Content.BAD
        elif is_unknown:
            content = Content.UNKNOWN
        elif kinds:
            content = Content.SUSPECT
        else:
            has_any = any(row.role == role for row in report.tensors)
            content = Content.FINITE if has_any else Content.NONE
        report.contents[role] = content


def _is_not_read(row: TensorReport, role: str) -> bool:
    return (
        row.role == role and row.statistics is None and row.dtype.startswith(("float", "bfloat", "complex"))
    )


def _largest(path: str, rows: list[TensorReport]) -> Largest | None:
    weights = [
        (row.statistics.absmax, row)
        for row in rows
        if row.statistics is not None
        and row.role == Role.WEIGHTS.value
        and row.statistics.numel
        and not judging.is_mask(row)
    ]
    if not weights:
        return None
    absmax, row = max(weights, key=lambda each: each[0])
    return Largest(path, absmax, row.name, row.file)
