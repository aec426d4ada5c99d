"""nanlocator for DeepSpeed: ``nanlocator.deepspeed.install(engine)`` after ``deepspeed.initialize``."""

try:
    import deepspeed  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"nanlocator.deepspeed needs DeepSpeed, which cannot be imported ({error}): pip install deepspeed"
    ) from error

from nanlocator.deepspeed.locator import DeepSpeedLocator, install

__all__ = ["DeepSpeedLocator", "install"]
