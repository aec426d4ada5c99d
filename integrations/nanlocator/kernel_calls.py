"""The documented path of ``nanlocator.calls.kernel_calls``."""

from nanlocator.calls.kernel_calls import Imported, register_reference, register_signature

__all__ = ["Imported", "register_reference", "register_signature"]
