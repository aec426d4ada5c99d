"""The versions of Megatron-Core that nanlocator has run with. Imports only names that all of them have."""

import re

import megatron.core

OLDEST, NEWEST = (0, 12), (0, 20)


def too_old() -> str | None:
    """Returns a sentence if the installed Megatron-Core is older than the supported versions, else None."""
    minor = _minor_version()
    if minor is None or minor >= OLDEST:
        return None
    return (
        f"nanlocator.megatron needs Megatron-Core {OLDEST[0]}.{OLDEST[1]} or newer, but {_version()} is "
        "installed. Update it, or wrap the optimizer in nanlocator.LocatingOptimizer (docs/pytorch.md)."
    )


def unknown_version() -> str | None:
    """Returns Megatron-Core's version if nanlocator was not tested with it, else None."""
    minor = _minor_version()
    return None if minor and OLDEST <= minor <= NEWEST else _version()


def _version() -> str:
    return str(getattr(megatron.core, "__version__", ""))


def _minor_version() -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)(?!\d)", _version())
    return (int(found.group(1)), int(found.group(2))) if found else None
