"""The text: rows, frames, the header of a batch and the report. All of this package's formatting is here.

Without ``verbose`` the text equals that of transformers' ``debug_utils`` (5.17), byte for byte, unless a
value is bad that the original does not scan.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from nanlocator.debugger.values import Values

_PREFIX = " " * 17  # the two columns and the blank between them
_COLUMNS = f"{'abs min':8} {'abs max':8} metadata"


class Role(Enum):
    WEIGHT = "weight"
    INPUT = "input"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One value of a frame."""

    role: Role
    context: str  # "weight", "input[0]", "output[1][0]", "input[attention_mask]", "grad_input[0]"
    values: Values | None  # None: no tensor
    type_name: str = ""  # of a value that is no tensor
    is_extra: bool = False  # the original has no row for it: keyword arguments, nested values

    @property
    def is_bad(self) -> bool:
        return self.values is not None and self.values.is_bad


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a module, or its part in backward."""

    name: str  # fully qualified
    module_class: str
    rows: list[Row]  # the shown rows
    starts: str | None  # "batch number=1" in its first frame; "backward of batch number=1"


def frame_text(frame: Frame, verbose: bool) -> str:
    lines = []
    if frame.starts is not None:
        lines += [f"\n\n{_PREFIX} *** Starting {frame.starts} ***", _COLUMNS]
    lines.append(f"{_PREFIX} {frame.name} {frame.module_class}")
    lines += [_row_text(row, verbose) for row in frame.rows]
    return "\n".join(lines)


def report_text(frames: Iterable[Frame], headline: str, kind: str, verbose: bool) -> str:
    """``kind`` of frames: "forward frames", as in the original; "frames" if some are of backward."""
    texts = [frame_text(frame, verbose) for frame in frames]
    return "\n".join(
        [
            f"\n{headline}",
            f"Last {len(texts)} {kind}:",
            _COLUMNS,
            "\n".join(texts),
            "\n\n",
        ]
    )


def values_text(values: Values, context: str) -> str:
    """The two columns and the metadata."""
    if values.magnitudes is None:
        return f"{'empty' if 0 in values.shape else 'no values':>17} {context}"
    least, most = values.magnitudes
    return f"{least:8.2e} {most:8.2e} {context}"


def finding_lines(values: Values, context: str) -> list[str]:
    """Printed at once for a bad value."""
    found = []
    if values.has_nan:
        found.append(f"{context} has nans")
    if values.has_inf:
        found.append(f"{context} has infs")
    return found


def overflow_lines(rows: Iterable[Row]) -> list[str]:
    return [line for row in rows if row.values is not None for line in finding_lines(row.values, row.context)]


def _row_text(row: Row, verbose: bool) -> str:
    if row.values is not None:
        text = values_text(row.values, row.context)
        return f"{text}  {_details(row.values)}" if verbose else text
    if row.type_name == "NoneType":
        return f"{'None':>17} {row.context}"
    text = f"{'not a tensor':>17} {row.context}"
    return f"{text}  {row.type_name}" if verbose else text


def _details(values: Values) -> str:
    """After the metadata: dtype, shape; for a bad tensor also the counts, the first index, the finite
    range."""
    text = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    stats = values.stats
    if stats is None or stats.is_finite:
        return text
    counts = {"NaN": stats.nan, "+Inf": stats.pos_inf, "-Inf": stats.neg_inf}
    text += f"  {', '.join(f'{n} {what}' for what, n in counts.items() if n)} of {stats.numel}"
    if (index := values.first_bad) is not None:
        text += f", first at {list(index)}"
    has_finite = stats.numel > stats.nan + stats.pos_inf + stats.neg_inf
    span = f"finite {stats.finite_min:.2e} to {stats.finite_max:.2e}" if has_finite else "nothing finite"
    return f"{text}, {span}"
