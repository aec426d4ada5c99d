"""nanlocator for Megatron-Core: one call after the optimizer is built, or no call at all.

    import nanlocator.megatron
    locator = nanlocator.megatron.install(model_chunks, optimizer)

    torchrun ... -m nanlocator.megatron pretrain_gpt.py ARGS...   # the script unedited

Every rank calls it. docs/megatron.md has its observations, its cost, and what is not covered.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanlocator.megatron.locator import MegatronLocator, install

__all__ = ["MegatronLocator", "install"]


def __getattr__(name: str) -> Any:
    # Imported at first use: the launcher runs before the script has set the path to its Megatron.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from nanlocator.megatron import locator
    except ImportError:
        from nanlocator.megatron.supported import too_old

        if problem := too_old():
            raise ImportError(problem) from None
        raise
    return getattr(locator, name)
