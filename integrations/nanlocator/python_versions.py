"""What Python 3.10 lacks."""

import sys


def add_note(error: BaseException, text: str) -> None:
    """``error.add_note``, from Python 3.11 on; before, the text joins the error's message."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    else:
        print(text, file=sys.stderr, flush=True)
