"""Argument names of kernels whose libraries bind them without names (``arg0, arg1, ...``).

The names come from ``kernel_signatures.txt`` and from the program's registrations. The number of arguments
identifies the release. If no row has that number, the table lacks the release: the names stay unknown, and no
reference judges such a call (nanlocator/calls/kernel_references.py).
"""

from pathlib import Path

_names: dict[str, dict[int, list[str]]] = {}  # by kernel and number of arguments


def register_signature(kernel: str, names: str) -> None:
    """Registers the names of the positional arguments of ``kernel`` ("my_extension::fwd"): "q k v out
    softmax_scale". Replaces an earlier signature with as many arguments."""
    row = names.split()
    _names.setdefault(kernel, {})[len(row)] = row


def is_known(kernel: str) -> bool:
    """``kernel``: "flash_attn_2_cuda::varlen_bwd"."""
    return kernel in _names


def argument_names(kernel: str, count: int) -> list[str]:
    """The names for a call with ``count`` arguments; empty if no signature has that many."""
    return _names.get(kernel, {}).get(count, [])


def rows_of_the_table() -> list[tuple[str, str, str]]:
    """Kernel, the first release with this signature, names of the arguments."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    kept = (line.split(maxsplit=2) for line in text.splitlines() if line and not line.startswith("#"))
    return [(kernel, release, names) for kernel, release, names in kept]


for _kernel, _, _row in rows_of_the_table():
    register_signature(_kernel, _row)
