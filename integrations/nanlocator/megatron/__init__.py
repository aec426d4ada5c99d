"""nanlocator for Megatron-Core: one call after the optimizer is built, or none at all.

    import nanlocator.megatron
    locator = nanlocator.megatron.install(model_chunks, optimizer)

    torchrun ... -m nanlocator.megatron pretrain_gpt.py ARGS...   # the script unedited

Every rank calls it. docs/megatron.md says what is seen, at which cost, and what is not covered.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanlocator.megatron.locator import MegatronLocator, install

__all__ = ["MegatronLocator", "install"]


def __getattr__(name: str) -> Any:
    # Imported at first use: the launcher runs before the script has said where its Megatron is.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from nanlocator.megatron import locator
    except ImportError:
        if problem := _too_old():
            raise ImportError(problem) from None
        raise
    return getattr(locator, name)


def _too_old() -> str | None:
    """A sentence where the Megatron-Core that is installed lacks what every later one has."""
    import megatron.core

    version = str(getattr(megatron.core, "__version__", ""))
    if not re.match(r"0\.([0-9]|1[01])(?!\d)", version):
        return None
    return (
        f"nanlocator.megatron needs Megatron-Core 0.12 or newer, and {version} is installed. Update it, or "
        "use nanlocator.LocatingOptimizer around the optimizer (docs/pytorch.md)."
    )
