"""Runs nanlocator's fault tests with other versions of torch, Python, transformers and Megatron-Core.

examples:
  tools/test --matrix                         every cell of tests/support_matrix/cells.py (hours, 50 GB)
  tools/test --matrix --torch 2.8             those of torch 2.8; --python, --transformers and --megatron
                                              choose likewise
  tools/test --matrix --list                  the cells, their last results, and which can run here
  tools/test --torch 2.8 --python 3.10        one cell, plain PyTorch
  tools/test --torch 2.11 --transformers 4.57.6
  tools/test --megatron 0.14.0 --smoke        a cell's smoke test: one fault, its replay and its report
  tools/test --megatron main --megatron-repository ~/Megatron-LM
  tools/test --matrix-rotation                the smoke test of one cell, which the commit chooses: for CI

Each torch and Python gets a virtual environment and a build in build/matrix, which later runs use again; the
default torch and Python use those of tools/setup. Python 3.X is looked for as python3.X on PATH and among
pyenv's. pip's own variables say what it installs from: with PIP_EXTRA_INDEX_URL=
https://download.pytorch.org/whl/cpu it takes the wheels without CUDA, a tenth of the size.

Results of the table's cells are written into docs/support.md, those of smoke tests are not. A cell whose
Python is not on this machine is not run, and keeps its last result.

Exit status: 0 all that ran passed, 1 something failed or nothing could run, 2 wrong use.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import environments
import results
from cells import (
    CELLS,
    ROOT,
    SMOKE_TESTS,
    TESTS,
    Cell,
    in_rotation,
    is_of,
    pins,
    python_version,
    reason_why_impossible,
    torch_version,
    versions_of,
)
from work import CommandFailed, fresh, last_lines, run_program, work

PAGE = ROOT / "docs" / "support.md"
LIMIT = 1800.0  # seconds for the tests of a cell


@dataclasses.dataclass(frozen=True)
class Outcome:
    status: str  # passed, failed or not run
    text: str  # for docs/support.md


def main() -> int:
    arguments = parse_arguments()
    cells = chosen_cells(arguments)
    try:
        results.read(PAGE.read_text())  # fails before hours of work, not after
    except ValueError as error:
        wrong_use(f"{PAGE.relative_to(ROOT)}: {error}")
    if arguments.list:
        return show(cells)
    with environments.alone("tools/test"):
        return run_all(cells, arguments)


def run_all(cells: list[Cell], arguments: argparse.Namespace) -> int:
    failed = ran = 0
    for number, cell in enumerate(cells, start=1):
        count = f"[{number}/{len(cells)}] " if len(cells) > 1 else ""
        print(f"{count}{cell}", flush=True)
        started, commit = time.monotonic(), commit_of_the_sources()
        outcome = run(cell, arguments)
        print(f"  {painted(outcome)}  ({time.monotonic() - started:.0f} s)", flush=True)
        if not arguments.smoke and cell in CELLS:
            keep(cell, outcome, commit)
        ran += outcome.status != "not run"
        failed += outcome.status == "failed"
    if len(cells) > 1:
        print(f"\n{ran - failed} cells passed, {failed} failed, {len(cells) - ran} not run")
    return 1 if failed or not ran else 0


# ---- which cells ----------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--matrix", action="store_true", help="every cell of the table, or those chosen below")
    which.add_argument("--matrix-rotation", action="store_true", help="the smoke test of one cell")
    parser.add_argument(
        "--torch", metavar="X", type=torch_version, help=f"2.8 or 2.8.0; default: {pins()['torch']}"
    )
    parser.add_argument(
        "--python",
        metavar="P",
        type=python_version,
        help="3.10; default: the table's for this torch, else 3.11",
    )
    parser.add_argument("--transformers", metavar="Z", help="a release of transformers")
    parser.add_argument("--megatron", metavar="Y", help="a release of Megatron-Core, or a branch or tag")
    parser.add_argument("--smoke", action="store_true", help="one fault of each cell only; keeps no result")
    parser.add_argument("--list", action="store_true", help="list what would run, and run nothing")
    parser.add_argument(
        "--megatron-repository",
        metavar="PATH_OR_URL",
        default=environments.MEGATRON_REPOSITORY,
        help="where branches and tags of Megatron-LM come from; default: %(default)s",
    )
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count(), help="default: %(default)s")
    arguments = parser.parse_args()
    wishes = [arguments.torch, arguments.python, arguments.transformers, arguments.megatron]
    if arguments.matrix_rotation and any(wishes):
        parser.error("--matrix-rotation chooses by itself; leave out the versions")
    if not (any(wishes) or arguments.matrix or arguments.matrix_rotation):
        parser.error("name a cell with --torch, --transformers or --megatron, or say --matrix")
    arguments.smoke |= arguments.matrix_rotation
    return arguments


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    if arguments.matrix_rotation:
        return [rotated()]
    if arguments.matrix:
        return filtered(arguments)
    torch, python = versions_of(arguments.torch, arguments.python)
    frameworks = [("transformers", arguments.transformers), ("megatron-core", arguments.megatron)]
    wanted = [Cell(torch, python, name, version) for name, version in frameworks if version]
    return wanted or [Cell(torch, python, "pytorch")]


def filtered(arguments: argparse.Namespace) -> list[Cell]:
    """The cells of the table that match all options; of two frameworks, either."""
    frameworks = {"transformers": arguments.transformers, "megatron-core": arguments.megatron}
    cells = [
        cell
        for cell in CELLS
        if (not arguments.torch or is_of(cell.torch, arguments.torch))
        and (not arguments.python or cell.python == arguments.python)
        and (not any(frameworks.values()) or is_of(cell.version, frameworks.get(cell.framework) or "none"))
    ]
    if not cells:
        wrong_use(
            "no cell of the table is so; without --matrix any cell can be run (tools/test --matrix --list)"
        )
    return cells


def rotated() -> Cell:
    """Among the cells that can run here without a repository and that tools/test itself does not cover."""
    default = {("pytorch", ""), *((name, pins()[name]) for name in ("transformers", "megatron-core"))}
    candidates = [
        cell
        for cell in CELLS
        if cell.is_from_registry
        and not (environments.is_default(cell) and (cell.framework, cell.version) in default)
        and environments.find_python(cell.python)
        and passed(cell)
    ]
    commit = git("rev-parse", "HEAD")
    if not candidates or not commit:
        wrong_use(
            "no cell can be chosen: " + ("this is no git checkout" if candidates else "no Python is here")
        )
    cell = in_rotation(candidates, commit)
    print(
        f"commit {commit[:8]} chooses, of {len(candidates)} cells: tools/test {arguments_for(cell)} --smoke"
    )
    return cell


def passed(cell: Cell) -> bool:
    """The rotation holds cells that have passed; a failing cell is mended by hand."""
    row = results.read(PAGE.read_text()).get(cell.key)
    return row is not None and row.result.startswith("passed")


def arguments_for(cell: Cell) -> str:
    option = {"transformers": "--transformers", "megatron-core": "--megatron"}.get(cell.framework)
    framework = f" {option} {cell.version}" if option else ""
    return f"--torch {cell.torch} --python {cell.python}{framework}"


def wrong_use(text: str) -> None:
    print(f"tools/test: {text}", file=sys.stderr)
    sys.exit(2)


def show(cells: list[Cell]) -> int:
    rows = results.read(PAGE.read_text())
    for cell in cells:
        row = rows.get(cell.key)
        result = f"{row.date}  {row.result}" if row and row.date else results.NEVER
        here = "" if environments.find_python(cell.python) else f"  (no Python {cell.python} here)"
        print(f"torch {cell.torch:7} Python {cell.python:5} {cell.framework_name:27} {result}{here}")
    return 0


# ---- one cell -------------------------------------------------------------------------------------------

_broken: dict[tuple[str, str], Outcome] = {}  # environments that could not be made, for later cells


def run(cell: Cell, arguments: argparse.Namespace) -> Outcome:
    python = environments.find_python(cell.python)
    if python is None:
        return Outcome("not run", f"not run: no Python {cell.python} here")
    if (cell.torch, cell.python) in _broken:
        return _broken[cell.torch, cell.python]
    try:
        environment = environments.prepare(cell, python, arguments.jobs, arguments.megatron_repository)
    except CommandFailed as error:
        print(f"{last_lines(error.log)}\n\n{error}", file=sys.stderr)
        outcome = Outcome("failed", results.in_a_field(why_not_made(error)))
        if error.log.stem in ("environment", "build", "setup"):
            _broken[cell.torch, cell.python] = outcome
        return outcome
    return tested(cell, environment, arguments)


def why_not_made(error: CommandFailed) -> str:
    """The compiler's first error, or the package that pip has not found; without the name of this machine or
    a host."""
    text = error.log.read_text(errors="replace").replace(f"{ROOT}/", "")
    if compiler := re.search(r"^\S+:\d+:\d+: (?:fatal )?error: .*", text, re.MULTILINE):
        return f"does not build: {compiler[0][:200]}"
    if missing := re.search(r"No matching distribution found for \S+", text):
        return f"cannot be set up: {missing[0]}"
    return f"cannot be set up: {error.what}"


def tested(cell: Cell, environment: environments.Environment, arguments: argparse.Namespace) -> Outcome:
    name = f"tests-{cell.framework}{cell.version}{'-smoke' if arguments.smoke else ''}"
    report, log = environment.logs / f"{name}.xml", fresh(environment.logs / f"{name}.log")
    report.unlink(missing_ok=True)
    tests = (SMOKE_TESTS if arguments.smoke else TESTS)[cell.framework]
    command = [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not exhaustive"]
    if not arguments.smoke:
        command += ["-n", str(arguments.jobs), "--dist", "loadfile"]
    command += [f"--junitxml={report}", "--rootdir", ROOT]
    command += [ROOT / test if test.startswith("tests/") else test for test in tests]
    problem = None
    try:
        work("tests", command, log, environment.variables, LIMIT)
    except CommandFailed as error:
        problem = error
    outcome = judged(cell, report, problem, environment.note)
    if outcome.status == "failed":
        print(f"{last_lines(log)}\n\nall of its output is in {log}", file=sys.stderr)
    return outcome


def judged(cell: Cell, report: Path, problem: CommandFailed | None, note: str = "") -> Outcome:
    """The result of pytest's report; for a test that cannot pass with this version, the reason."""
    ran, bad = tests_of(report)
    if problem and (problem.code is None or not bad):
        how = "took too long" if problem.code is None else f"ended with code {problem.code} and no result"
        return Outcome("failed", f"the tests {how}")
    if not ran:
        return Outcome("failed", "no test ran")
    failed, impossible = [], {}
    for test in bad:
        reason = reason_why_impossible(cell, test)
        (impossible.setdefault(reason, []) if reason else failed).append(test)
    if failed:
        parts = [f"{len(failed)} of {len(ran)} failed: {listed(failed)}"]
    else:
        parts = [f"passed: {len(ran) - len(bad)}"]
    parts += [f"{len(tests)} not possible: {reason}" for reason, tests in impossible.items()]
    if note:
        parts.append(f"{cell.version} is {note}")
    return Outcome("failed" if failed else "passed", results.in_a_field("; ".join(parts)))


def tests_of(report: Path) -> tuple[list[str], list[str]]:
    """The tests in a report in JUnit's format that were not skipped, and the failed ones."""
    ran, bad = [], []
    if not report.exists():
        return ran, bad
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = case.get("name") or case.get("classname") or "?"
        if case.find("skipped") is None:
            ran.append(name)
        if case.find("failure") is not None or case.find("error") is not None:
            bad.append(name)
    return ran, bad


def listed(tests: list[str], most: int = 3) -> str:
    more = f" and {len(tests) - most} more" if len(tests) > most else ""
    return ", ".join(f"`{test}`" for test in tests[:most]) + more


# ---- results ----------------------------------------------------------------------------------------------


def keep(cell: Cell, outcome: Outcome, commit: str) -> None:
    """A cell that was not run keeps its previous result."""
    before = results.read(PAGE.read_text()).get(cell.key)
    if outcome.status == "not run":
        if before and before.commit:
            return
        commit = ""
    date = datetime.date.today().isoformat()
    results.record(PAGE, results.Row(*cell.key, date, commit, outcome.text), CELLS)


def commit_of_the_sources() -> str:
    """With a + if the sources differ from the commit; the page itself does not count."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.strip()


def painted(outcome: Outcome) -> str:
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return outcome.text
    color = {"passed": "32", "failed": "31", "not run": "33"}[outcome.status]
    return f"\033[{color}m{outcome.text}\033[0m"


if __name__ == "__main__":
    run_program(main)
