"""Which versions of Megatron-Core nanlocator has run with. Imports nothing that only some of them have."""

import re

import megatron.core

OLDEST, NEWEST = (0, 12), (0, 20)


def too_old() -> str | None:
    """A sentence where the Megatron-Core that is installed lacks what every later one has."""
    minor = _minor_version()
    if minor is None or minor >= OLDEST:
        return None
    return (
        f"nanlocator.megatron needs Megatron-Core {OLDEST[0]}.{OLDEST[1]} or newer, and {_version()} is "
        "installed. Update it, or use nanlocator.LocatingOptimizer around the optimizer (docs/pytorch.md)."
    )


def unknown_version() -> str | None:
    """Megatron-Core's version where nobody has tried nanlocator with it."""
    minor = _minor_version()
    return None if minor and OLDEST <= minor <= NEWEST else _version()


def _version() -> str:
    return str(getattr(megatron.core, "__version__", ""))


def _minor_version() -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)(?!\d)", _version())
    return (int(found.group(1)), int(found.group(2))) if found else None
