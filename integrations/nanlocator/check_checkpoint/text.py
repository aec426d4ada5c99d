"""A report in words, for a terminal."""

from nanlocator import _C
from nanlocator.check_checkpoint.report import (
    CheckpointReport,
    Content,
    Finding,
    Largest,
    Report,
    TensorReport,
)

__all__ = ["size", "text_of"]

_MOST_ROWS = 20
_CONTENTS = {
    Content.FINITE: "yes",
    Content.BAD: "no",
    Content.SUSPECT: "yes, but of absurd magnitude",
    Content.UNKNOWN: "unknown",
    Content.NONE: "none there",
}


def text_of(report: Report, *, is_verbose: bool = False) -> str:
    """``is_verbose``: all rows. Names come from the files; whatever a terminal interprets is escaped."""
    lines = []
    for checkpoint in report.checkpoints:
        lines += _checkpoint(checkpoint, is_verbose)
    if report.problem:
        lines.append(f"could not be checked: {report.problem}")
    if report.others and report.is_safe is not True:
        shown = ", ".join(report.others[:5]) + (", ..." if len(report.others) > 5 else "")
        lines.append(f"other checkpoints: {shown} (--all checks them)")
    if len(report.checkpoints) > 1:
        safe = next((each.path for each in report.checkpoints if each.is_safe), None)
        lines.append(f"newest that is safe to load: {safe or 'none of these'}")
    return "".join(_C.printable(line) + "\n" for line in lines)


def size(count: float) -> str:
    """ "12.3 GB" """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.4g} TB"


def _checkpoint(report: CheckpointReport, is_verbose: bool) -> list[str]:
    facts = [report.layout]
    if report.iteration is not None:
        facts.append(f"iteration {report.iteration}")
    if report.chosen:
        facts.append(f"what a resume loads: {report.chosen}")
    lines = [f"{report.path}: {_verdict(report)}", f"  is        {', '.join(facts)}"]
    lines.append(
        "  finite    "
        + ", ".join(f"{role} {_CONTENTS[content]}" for role, content in report.contents.items())
        + ("" if report.complete else "; the time was up before all was read")
    )
    for finding in _first(report.findings, is_verbose):
        lines += [f"  found     {_place(finding.tensor)}", f"            {_words(finding)}"]
    lines += _more(len(report.findings), is_verbose, "findings")
    if report.largest is not None:
        lines.append(f"  largest   {_magnitude(report.largest)}")
    if report.largest_before is not None:
        lines.append(f"  before    {_magnitude(report.largest_before)} in {report.largest_before.checkpoint}")
    for each in _first(report.unread, is_verbose):
        lines.append(f"  not read  {each.what}: {each.reason}")
    lines += _more(len(report.unread), is_verbose, "not read")
    for note in _first(report.notes, is_verbose):
        lines.append(f"  note      {note}")
    lines += _more(len(report.notes), is_verbose, "notes")
    lines += _selected([each for each in report.tensors if each.is_selected])
    unread = sum(1 for each in report.tensors if each.unread)
    lines.append(
        f"  read      {size(report.bytes_read)} of {size(report.bytes_in_all)}, {len(report.tensors)} tensors"
        + (f" ({unread} not or not wholly)" if unread else "")
        + f", in {report.seconds:.1f} s"
    )
    return lines


def _first(items: list, is_verbose: bool) -> list:  # type: ignore[type-arg]
    return items if is_verbose else items[:_MOST_ROWS]


def _more(count: int, is_verbose: bool, what: str) -> list[str]:
    hidden = count - _MOST_ROWS
    return [] if is_verbose or hidden <= 0 else [f"            {hidden} more {what} (--json has all)"]


def _verdict(report: CheckpointReport) -> str:
    if report.is_safe is True:
        return "safe to load"
    if report.is_safe is None:
        return "not known to be safe: not all of it could be read"
    bad = [role for role, content in report.contents.items() if content is Content.BAD]
    if bad:
        verb = "holds" if bad == ["optimizer"] else "hold"
        return f"do not load it: the {' and the '.join(bad)} {verb} NaN or Inf"
    return "look before you load it: a magnitude is absurd"


def _place(tensor: TensorReport) -> str:
    shape = f" {list(tensor.shape)}" if tensor.shape else ""
    return f"{tensor.name}  {tensor.dtype}{shape}  in {tensor.file} ({tensor.role})"


def _words(finding: Finding) -> str:
    s = finding.tensor.statistics
    assert s is not None
    if finding.kind == "nonfinite":
        counts = [(s.nan, "NaN"), (s.pos_inf, "+Inf"), (s.neg_inf, "-Inf")]
        found = ", ".join(f"{count:,} {name}" for count, name in counts if count)
        where = f", the first at {list(s.first_bad)}" if s.first_bad else ""
        rest = f"; finite elements up to {s.absmax:.3g}" if s.numel > s.nonfinite else ""
        return f"{found} of {s.numel:,}{where}{rest}"
    if finding.kind == "near_limit":
        limit = f"{finding.tensor.dtype} ends at {finding.reference:.4g}"
        return f"up to {s.absmax:.4g}: the next doubling is Inf ({limit})"
    if finding.kind == "grew":
        return f"up to {s.absmax:.4g}, from {finding.reference:.4g} in the checkpoint before"
    layer = "" if finding.layer is None else f"in layer {finding.layer} "
    return (
        f"{layer}up to {s.absmax:.4g}, where this tensor of other layers has {finding.reference:.3g} (median)"
    )


def _magnitude(largest: Largest) -> str:
    return f"|w| {largest.absmax:.4g} in {largest.name}"


def _selected(tensors: list[TensorReport]) -> list[str]:
    lines = []
    for tensor in tensors:
        s = tensor.statistics
        lines.append(f"  tensor    {_place(tensor)}")
        if s is None or s.numel == 0:
            lines.append(f"            {tensor.unread or 'no elements'}")
            continue
        values = f"min {s.minimum:.6g}, max {s.maximum:.6g}, absmax {s.absmax:.6g}, rms {s.rms:.6g}, "
        if s.numel == s.nonfinite:
            values = "no finite element, "
        where = f", first bad at {list(s.first_bad)}" if s.first_bad is not None else ""
        lines.append(
            f"            {values}zeros {s.zeros:,}, NaN {s.nan:,}, +Inf {s.pos_inf:,}, -Inf {s.neg_inf:,}, "
            f"elements {s.numel:,}{where}"
        )
    return lines
