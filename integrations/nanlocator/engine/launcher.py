"""What the launchers have in common: options that become variables, and the script, which runs as Python
would run it: as ``__main__``, with its own arguments, its folder first on the path, its exit code and its
traceback."""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nanlocator.engine.endings import record_for_torchrun


def make_parser(prog: str, description: str, examples: str, levels: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, text: str, **kind: Any) -> None:
        variable = f"NANLOCATOR_{name.upper()}"
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{text} [{variable}]", **kind)

    add("level", "what is watched at every step", choices=levels)
    add("on_bad", "what a bad step leads to", choices=["stop", "report", "skip", "recover"])
    add("output_dir", "folder of the run", metavar="FOLDER")
    add("rerun", "execute a bad step again, traced; always: every step", choices=["yes", "no", "always"])
    add("check_params", "scan parameters before and after the step", action=argparse.BooleanOptionalAction)
    add("gather_deadline", "how long to wait for silent ranks", type=float, metavar="SECONDS")
    add("bundle_bytes", "most bytes of bundles per rank", type=int, metavar="BYTES")
    add("bundle_count", "most bundles per rank", type=int, metavar="N")
    add("max_incidents", "findings to locate; further ones are counted", type=int, metavar="N")
    return parser


def set_variables(options: argparse.Namespace) -> None:
    """What was given takes the place of its variable, where the integration finds it."""
    for name, value in vars(options).items():
        if name not in ("script", "module", "arguments") and value is not None:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            os.environ[f"NANLOCATOR_{name.upper()}"] = text


def check_script(parser: argparse.ArgumentParser, script: str) -> None:
    if not os.path.isfile(script):
        parser.error(f"no such script: {script}")


def run_script(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # there is none before Python 3.11
        sys.path[0] = os.path.dirname(os.path.abspath(script))  # it was this launcher's
    _recorded(lambda: runpy.run_path(script, run_name="__main__"))


def run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = [name, *arguments]
    _recorded(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _recorded(run: Callable[[], Any]) -> None:
    """So that torchrun's summary shows the error, as with torch's decorator ``record`` in the script. What
    has been recorded before stays: a verdict, which says more."""
    try:
        run()
    except Exception as error:
        if not os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", "")):
            record_for_torchrun(error)
        raise
