"""Shared by the launchers: options become variables, and the script runs as Python would run it: as
``__main__``, with its own arguments, its folder first on the path, its exit code and its traceback."""

import argparse
import builtins
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from nanlocator import _C
from nanlocator.engine.endings import record_for_torchrun
from nanlocator.engine.errors import NonFiniteGradientError
from nanlocator.engine.options import Kind, flag_of, rows, variable_of
from nanlocator.engine.tracebacks import CleanTracebacks, without_own_frames


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as the C++ commands print it; argparse's usage would be 20."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser(prog: str, description: str, examples: str, integration: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, option in rows(integration).items():
        text = f"{option.help.replace('`', '')} [{variable_of(name)}]"
        parser.add_argument(flag_of(name), help=text, **_values(name, option.kind))
    return parser


def _values(name: str, kind: Kind) -> dict[str, Any]:
    if kind.is_switch:
        return {"action": argparse.BooleanOptionalAction}
    if choices := kind.choices or _C.LocatorOptions.choices.get(name):
        return {"choices": choices}

    def checked(text: str) -> str:
        try:
            kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
        return text

    return {"type": checked, "metavar": kind.metavar}


def set_variables(given: argparse.Namespace, integration: str) -> None:
    """Writes the given options to their variables, where the integration reads them."""
    for name in rows(integration):
        value = getattr(given, name)
        if value is not None:
            os.environ[variable_of(name)] = str(int(value)) if isinstance(value, bool) else value


def check_script(parser: argparse.ArgumentParser, script: str) -> None:
    if not os.path.isfile(script):
        parser.error(f"no such script: {script}")


def run_script(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # it was this launcher's folder
    _recorded(lambda: _run_as_main(os.path.abspath(script)))


def _run_as_main(path: str) -> None:
    """Like ``python path``: unlike under runpy, ``__file__`` is absolute, and ``sys.argv[0]`` as given."""
    loader = SourceFileLoader("__main__", path)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main  # where pickle and spawned processes look
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = [name, *arguments]
    _recorded(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _recorded(run: Callable[[], Any]) -> None:
    """Shows the error in torchrun's summary, as torch's decorator ``record`` in the script would. An earlier
    record stays: a verdict says more. A verdict that ends the script ends the process with its own status."""
    CleanTracebacks()
    try:
        run()
    except NonFiniteGradientError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(error.exit_status)
    except Exception as error:
        if not os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", "")):
            error.__traceback__ = without_own_frames(error.__traceback__)
            record_for_torchrun(error)
        raise
