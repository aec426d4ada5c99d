"""Whether the extension fits this Python, and backports for Python 3.10."""

import sys

from nanlocator.engine.torch_versions import REMEDY


def misfit(built: str, installed: str) -> str | None:
    """Returns a sentence if an extension built for Python ``built``, such as "3.11", is imported by another
    version, else None."""
    if installed.split(".")[:2] == built.split("."):
        return None
    return f"nanlocator was built for Python {built}, but this is Python {installed}. {REMEDY}"


def add_note(error: BaseException, text: str) -> None:
    """``error.add_note`` of Python 3.11; in older versions the text joins the error's message."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    else:
        print(text, file=sys.stderr, flush=True)
