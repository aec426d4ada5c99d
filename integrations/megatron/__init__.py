"""nanlocator for Megatron-Core: one call after the optimizer is built.

    import nanlocator.megatron
    locator = nanlocator.megatron.install(model_chunks, optimizer)

Every rank calls it. docs/megatron.md says what is seen, at which cost, and what is not covered.
"""

from nanlocator.megatron.locator import MegatronLocator, install

__all__ = ["MegatronLocator", "install"]
