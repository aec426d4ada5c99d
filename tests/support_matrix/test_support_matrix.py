"""tools/test --matrix, without making an environment: its cells, the table of results, the choice of a Python
and of CI's cell, and the reading of pytest's report."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import time
from pathlib import Path

import cells
import environments
import matrix
import pytest
import results
from cells import CELLS, Cell
from results import Row
from work import CommandFailed, work

ROOT = Path(__file__).resolve().parents[2]

PLAIN = Cell("2.8.0", "3.10", "pytorch")
OLD_MEGATRON = Cell("2.11.0", "3.11", "megatron-core", "0.12.3")


def tools_test(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, Path(__file__).with_name("matrix.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# ---- cells ----------------------------------------------------------------------------------------------


def test_every_torch_of_the_table_runs_plain_pytorch_and_transformers():
    frameworks = collections.defaultdict(set)
    for cell in CELLS:
        frameworks[cell.torch].add(cell.framework)
    assert len(frameworks) >= 6
    assert all(names >= {"pytorch", "transformers"} for names in frameworks.values())


def test_the_versions_that_tools_setup_installs_are_cells():
    pins = cells.pins()
    for framework in ("transformers", "megatron-core"):
        assert Cell(pins["torch"], "3.11", framework, pins[framework]) in CELLS


def test_no_cell_is_there_twice_and_each_has_tests_that_are_there():
    assert len({cell.key for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        for test in [*cells.TESTS[cell.framework], *cells.SMOKE_TESTS[cell.framework]]:
            path, _, function = test.partition("::")
            if path.startswith("tests/"):
                assert (ROOT / path).exists(), path
                assert function.partition("[")[0] in (ROOT / path).read_text() if function else True, test


def test_what_cannot_pass_is_of_a_cell_that_there_is():
    versions = {(cell.framework, cell.version) for cell in CELLS} | {("torch", cell.torch) for cell in CELLS}
    assert {(framework, version) for framework, version, _ in cells.IMPOSSIBLE} <= versions


@pytest.mark.parametrize(
    ("version", "is_released"), [("0.16.1", True), ("core_v0.17.1", False), ("main", False)]
)
def test_a_version_that_begins_with_a_digit_is_a_release(version, is_released):
    assert Cell("2.11.0", "3.11", "megatron-core", version).is_from_registry is is_released


@pytest.mark.parametrize(
    ("asked", "is_meant"), [("2.8", True), ("2.8.0", True), ("2", True), ("2.80", False)]
)
def test_a_short_version_means_all_that_begin_with_it(asked, is_meant):
    assert cells.is_of("2.8.0", asked) is is_meant


def test_every_cell_has_its_turn_in_the_rotation_and_the_same_commit_gives_the_same_one():
    commits = [f"{number:040x}" for number in range(len(CELLS))]
    assert {cells.in_rotation(CELLS, commit) for commit in commits} == set(CELLS)
    assert cells.in_rotation(CELLS, "7b7563a") == cells.in_rotation(CELLS, "7b7563a")


def test_the_rotation_leaves_out_what_tools_test_runs_itself(monkeypatch, capsys):
    monkeypatch.setattr(environments, "find_python", lambda version: version == "3.11" and Path("python3.11"))
    monkeypatch.setattr(environments, "is_default", lambda cell: cell.python == "3.11")
    chosen = []
    for number in range(100):
        monkeypatch.setattr(matrix, "git", lambda *arguments, number=number: f"{number:x}")
        chosen.append(matrix.rotated())
    assert {cell.python for cell in chosen} == {"3.11"}
    assert {cell.version for cell in chosen} == {"4.57.6", "5.23.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3"}
    assert "--torch 2.11.0 --python 3.11 --megatron 0.12.3 --smoke" in capsys.readouterr().out


# ---- the choice of cells on the command line ------------------------------------------------------------


def chosen(monkeypatch, *arguments: str) -> list[Cell]:
    monkeypatch.setattr(sys, "argv", ["tools/test", *arguments])
    return matrix.chosen_cells(matrix.parse_arguments())


def test_one_cell_takes_what_is_not_said_from_the_table(monkeypatch):
    assert chosen(monkeypatch, "--torch", "2.8") == [PLAIN]
    assert chosen(monkeypatch, "--megatron", "0.12.3") == [OLD_MEGATRON]
    assert chosen(monkeypatch, "--torch", "2.8", "--python", "3.12") == [Cell("2.8.0", "3.12", "pytorch")]
    both = chosen(monkeypatch, "--transformers", "4.57.6", "--megatron", "main")
    assert [cell.framework for cell in both] == ["transformers", "megatron-core"]


def test_a_torch_that_the_table_has_not_got_is_the_newest_of_that_number(monkeypatch):
    (cell,) = chosen(monkeypatch, "--torch", "2.9")
    assert cell == Cell("2.9", "3.11", "pytorch")
    assert "torch==2.9.*" in environments.requirements_of(cell)


def test_with_matrix_versions_choose_among_the_cells_of_the_table(monkeypatch):
    assert chosen(monkeypatch, "--matrix") == CELLS
    assert {cell.torch for cell in chosen(monkeypatch, "--matrix", "--torch", "2.8")} == {"2.8.0"}
    assert chosen(monkeypatch, "--matrix", "--megatron", "0.12.3") == [OLD_MEGATRON]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--smoke"], "--matrix"),
        (["--matrix", "--python", "3.9"], "--list"),
        (["--torch", "new"], "2.8"),
        (["--torch", "2.8", "--python", "3.10.1"], "3.10"),
        (["--matrix-rotation", "--torch", "2.8"], "chooses by itself"),
        (["--matrix", "--matrix-rotation"], "not allowed"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_to_do(arguments, word):
    done = tools_test(*arguments)
    assert done.returncode == 2
    assert word in done.stderr and "Traceback" not in done.stderr


def test_help_has_examples_and_the_list_has_every_cell():
    assert "tools/test --torch 2.8 --python 3.10" in tools_test("--help").stdout
    listed = tools_test("--matrix", "--list")
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == len(CELLS)


# ---- the table of results -------------------------------------------------------------------------------

PAGE = f"# Title\n\nbefore\n\n{results.BEGIN}\n{results.END}\n\nafter\n"


def row_of(cell: Cell, result: str = "passed: 12", date: str = "2026-01-02") -> Row:
    return Row(*cell.key, date, "0123abcd", result)


def test_the_project_s_own_page_has_a_table_that_is_read_and_written_alike():
    page = (ROOT / "docs" / "support.md").read_text()
    assert results.write(page, results.read(page), CELLS) == page


def test_what_is_recorded_is_read_and_the_text_around_it_stays(tmp_path):
    page = tmp_path / "support.md"
    page.write_text(PAGE)
    results.record(page, row_of(PLAIN), [OLD_MEGATRON, PLAIN])
    text = page.read_text()
    assert text.startswith("# Title\n\nbefore\n\n") and text.endswith("\n\nafter\n")
    rows = results.read(text)
    assert list(rows) == [OLD_MEGATRON.key, PLAIN.key]  # in the order of the cells
    assert rows[PLAIN.key] == row_of(PLAIN)
    assert rows[OLD_MEGATRON.key].result == results.NEVER
    assert os.listdir(tmp_path) == ["support.md"]


def test_rows_of_cells_that_did_not_run_keep_their_date(tmp_path):
    page = tmp_path / "support.md"
    page.write_text(PAGE)
    results.record(page, row_of(OLD_MEGATRON, "1 of 8 failed: `a`"), [OLD_MEGATRON, PLAIN])
    results.record(page, row_of(PLAIN, date="2026-02-03"), [OLD_MEGATRON, PLAIN])
    rows = results.read(page.read_text())
    assert rows[OLD_MEGATRON.key] == row_of(OLD_MEGATRON, "1 of 8 failed: `a`")
    assert rows[PLAIN.key].date == "2026-02-03"


def test_rows_of_cells_that_are_no_more_are_dropped():
    text = results.write(PAGE, {PLAIN.key: row_of(PLAIN)}, [OLD_MEGATRON])
    assert list(results.read(text)) == [OLD_MEGATRON.key]


def test_a_result_cannot_break_the_table():
    field = results.in_a_field("error: a | b\n  and more")
    text = results.write(PAGE, {PLAIN.key: row_of(PLAIN, field)}, [PLAIN])
    assert results.read(text)[PLAIN.key].result == "error: a / b and more"


@pytest.mark.parametrize("text", ["no markers", results.BEGIN, results.END])
def test_a_page_without_markers_says_which_lines_are_missing(text):
    with pytest.raises(ValueError, match="Written by tools/test"):
        results.read(text)


def test_a_cell_that_cannot_run_here_keeps_its_result_and_has_a_row_where_it_had_none(tmp_path, monkeypatch):
    page = tmp_path / "support.md"
    page.write_text(results.write(PAGE, {PLAIN.key: row_of(PLAIN)}, CELLS))
    monkeypatch.setattr(matrix, "PAGE", page)
    no_python = matrix.Outcome("not run", "not run: no Python here")
    matrix.keep(PLAIN, no_python, "89abcdef")
    matrix.keep(OLD_MEGATRON, no_python, "89abcdef")
    rows = results.read(page.read_text())
    assert rows[PLAIN.key] == row_of(PLAIN)
    assert (rows[OLD_MEGATRON.key].commit, rows[OLD_MEGATRON.key].result) == ("", no_python.text)


# ---- Python ---------------------------------------------------------------------------------------------


def python_that_is(folder: Path, version: str, works: bool = True) -> Path:
    """A program of that name, as seen by find_python: a whole Python, or one of pyenv's shims."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"python{version}"
    program.write_text(f"#!/bin/sh\nexit {0 if works else 127}\n")
    program.chmod(0o755)
    return program


def test_a_python_on_the_path_comes_before_pyenvs_newest(tmp_path, monkeypatch):
    versions = tmp_path / ".pyenv" / "versions"
    python_that_is(versions / "3.77.9" / "bin", "3.77")
    newest = python_that_is(versions / "3.77.12" / "bin", "3.77")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert environments.find_python("3.77", tmp_path) == newest
    on_path = python_that_is(tmp_path / "bin", "3.77")
    assert environments.find_python("3.77", tmp_path) == on_path


def test_a_shim_that_does_not_run_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    python_that_is(tmp_path / "bin", "3.77", works=False)
    assert environments.find_python("3.77", tmp_path) is None
    real = python_that_is(tmp_path / ".pyenv" / "versions" / "3.77.0" / "bin", "3.77")
    assert environments.find_python("3.77", tmp_path) == real


def test_this_python_is_whole_and_is_no_other_version():
    version = "{}.{}".format(*sys.version_info[:2])
    assert not environments.is_whole(Path(sys.executable), "3.77")
    assert environments.find_python(version) is None or environments.is_whole(
        environments.find_python(version), version
    )


def test_a_cell_without_its_python_is_not_run(monkeypatch, capsys):
    monkeypatch.setattr(environments, "find_python", lambda version: None)
    monkeypatch.setattr(sys, "argv", ["tools/test", "--torch", "2.8", "--smoke"])
    assert matrix.main() == 1  # nothing ran
    assert "not run: no Python 3.10 here" in capsys.readouterr().out


# ---- results of a cell ------------------------------------------------------------------------------------


def report_of(folder: Path, **tests: str) -> Path:
    """A report in JUnit's format; `tests` have the names of the elements that give their results."""
    text = "".join(
        f'<testcase name="{name}">{f"<{outcome}/>" if outcome else ""}</testcase>'
        for name, outcome in tests.items()
    )
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return path


def test_tests_that_passed_are_counted_and_skipped_ones_are_not(tmp_path):
    report = report_of(tmp_path, a="", b="", c="skipped")
    assert matrix.judged(PLAIN, report, None) == matrix.Outcome("passed", "passed: 2")


def test_failures_are_named(tmp_path):
    report = report_of(tmp_path, a="failure", b="error", c="failure", d="failure", e="")
    outcome = matrix.judged(PLAIN, report, CommandFailed("tests", 1, report))
    assert outcome == matrix.Outcome("failed", "4 of 5 failed: `a`, `b`, `c` and 1 more")


def test_what_a_version_cannot_do_is_listed_with_its_reason_and_is_no_failure(tmp_path, monkeypatch):
    reason = "this Megatron-Core calls CUDA"
    monkeypatch.setattr(cells, "IMPOSSIBLE", {("megatron-core", "0.12.3", "experts"): reason})
    report = report_of(tmp_path, experts="failure", ddp="")
    failed = CommandFailed("tests", 1, report)
    assert matrix.judged(OLD_MEGATRON, report, failed).text == f"passed: 1; 1 not possible: {reason}"
    assert matrix.judged(OLD_MEGATRON, report, failed).status == "passed"
    assert matrix.judged(PLAIN, report, failed).status == "failed"


@pytest.mark.parametrize("tests", [{}, {"a": ""}])
def test_a_run_that_broke_off_is_no_success(tmp_path, tests):
    report = report_of(tmp_path, **tests)
    assert matrix.judged(PLAIN, report, CommandFailed("tests", None, report)).status == "failed"
    assert matrix.judged(PLAIN, tmp_path / "missing.xml", None).status == "failed"


def test_a_build_that_fails_has_the_compilers_first_error(tmp_path):
    log = tmp_path / "build.log"
    log.write_text(
        f"[1/9] x\n{ROOT}/src/a.cpp:3:1: error: no member | 'b'\nninja: build stopped\nerror: later\n"
    )
    told = matrix.why_not_made(CommandFailed("build", 1, log))
    assert told == "does not build: src/a.cpp:3:1: error: no member | 'b'"


def test_what_pip_cannot_find_is_named(tmp_path):
    log = tmp_path / "environment.log"
    log.write_text("Collecting torch\nERROR: No matching distribution found for torch==2.99\n")
    told = matrix.why_not_made(CommandFailed("installing torch==2.99", 1, log))
    assert told == "cannot be set up: No matching distribution found for torch==2.99"


def test_what_stands_on_the_page_names_no_folder_and_no_host_of_this_machine(tmp_path):
    log = tmp_path / "main.log"
    log.write_text("fatal: unable to access 'https://host.example/repository'\n")
    told = matrix.why_not_made(CommandFailed("fetching main of Megatron-LM", 128, log))
    assert told == "cannot be set up: fetching main of Megatron-LM failed"
    slow = CommandFailed("tests", None, log)
    assert matrix.judged(PLAIN, tmp_path / "missing.xml", slow).text == "the tests took too long"


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; wait"
    with pytest.raises(CommandFailed, match="took too long"):
        work("sleeping", ["sh", "-c", script], tmp_path / "log", limit=1.0)
    for _ in range(50):
        if not is_running(int(child.read_text())):
            return
        time.sleep(0.1)
    raise AssertionError("what the command has started still runs")


def test_a_program_that_is_missing_is_named_and_is_no_traceback(tmp_path):
    with pytest.raises(CommandFailed) as raised:
        work("build", ["no-such-program", "--build"], tmp_path / "log")
    assert "no-such-program is not on this machine" in raised.value.log.read_text()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_two_runs_in_one_checkout_wait_for_each_other(tmp_path):
    code = (
        "import pathlib, sys, time, environments\n"
        "environments.PLACE = pathlib.Path(sys.argv[1])\n"
        "with environments.alone('tools/test'):\n"
        "    print('begins', flush=True); time.sleep(0.5); print('ends', flush=True)\n"
    )
    folder = Path(__file__).parent
    command = [sys.executable, "-c", code, str(tmp_path)]
    with (tmp_path / "out").open("w") as out:
        both = [
            subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True) for _ in "ab"
        ]
    said = "".join(each.communicate(timeout=30)[1] for each in both)
    assert (tmp_path / "out").read_text().split() == ["begins", "ends"] * 2
    assert said == "tools/test: waiting for another run in this checkout ...\n"
