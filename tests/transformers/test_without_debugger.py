"""A package without its debugger, as built with NANLOCATOR_DEBUGGER=OFF."""

import os
from pathlib import Path

from ranks import run_python

import nanlocator

CODE = """
import nanlocator.transformers
from nanlocator.transformers import NanLocatorCallback
NanLocatorCallback()
try:
    from nanlocator.transformers import DebugUnderflowOverflow
except ImportError as error:
    print(error)
"""


def test_the_callback_works_and_the_debuggers_names_say_that_it_is_not_built(tmp_path):
    (tmp_path / "nanlocator").mkdir()
    for entry in Path(nanlocator.__file__).parent.iterdir():
        if entry.name != "debugger":
            (tmp_path / "nanlocator" / entry.name).symlink_to(entry)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    Path("script.py").write_text(CODE)
    done = run_python("script.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "DebugUnderflowOverflow needs nanlocator's debugger" in done.stdout
