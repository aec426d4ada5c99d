"""An option is one row of nanlocator/engine/options.py. Everything that shows it is derived from the row."""

import datetime
import os
import re
import runpy
from pathlib import Path
from typing import Annotated

import pytest
from checked_types import errors_of

import nanlocator
from nanlocator import _C
from nanlocator.engine import launcher, options
from nanlocator.engine.options import COUNT, INTEGRATIONS, Option, resolve_options, rows

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(rows("watch"))
TABLE = runpy.run_path(str(ROOT / "tools" / "option_table.py"))
HEAD = "class Options(TypedDict, total=False):\n"


@pytest.fixture
def imaginary(monkeypatch):
    """Adds a row to the table and a field to the engine."""
    row = Annotated[int | None, Option(COUNT, "an imaginary one", only=("watch", "deepspeed"))]

    class More(options.Options, total=False):
        patience: row

    class Engine(_C.LocatorOptions):
        patience = 7

    monkeypatch.setattr(options, "Options", More)
    monkeypatch.setattr(options._C, "LocatorOptions", Engine)


def test_a_row_is_an_argument_and_a_variable_that_fill_the_field_of_the_engine(imaginary, monkeypatch):
    assert resolve_options({}, "watch").patience == 7
    monkeypatch.setenv("NANLOCATOR_PATIENCE", "3")
    assert resolve_options({}, "watch").patience == 3
    assert resolve_options({"patience": 4}, "watch").patience == 4
    assert resolve_options({}, "megatron").patience == 7
    with pytest.raises(TypeError, match="unexpected option 'patience'"):
        resolve_options({"patience": 4}, "megatron")
    with pytest.raises(
        nanlocator.UsageError, match="patience='soon' cannot be read: expected a whole number"
    ):
        resolve_options({"patience": "soon"}, "watch")


def test_a_row_is_a_flag_of_the_launchers_of_its_integrations(imaginary, monkeypatch, capsys):
    monkeypatch.setenv("NANLOCATOR_PATIENCE", "3")
    parser = launcher.make_parser("prog", "", "", "watch")
    assert re.search(r"--patience N\s+an imaginary one \[NANLOCATOR_PATIENCE\]", parser.format_help())
    launcher.set_variables(parser.parse_args(["--patience", "5"]), "watch")
    assert os.environ["NANLOCATOR_PATIENCE"] == "5"
    assert "patience" not in launcher.make_parser("prog", "", "", "megatron").format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--patience", "soon"])
    assert "argument --patience: 'soon': expected a whole number" in capsys.readouterr().err


def test_a_row_is_a_row_of_the_documents(imaginary):
    cells = (
        "`patience`, `--patience` | `NANLOCATOR_PATIENCE` | `7` | an imaginary one "
        "(only for watch, deepspeed)"
    )
    assert TABLE["table"]().splitlines()[-1] == f"| {cells} |"


@pytest.mark.slow
def test_mypy_sees_a_row(tmp_path):
    text = Path(options.__file__).read_text(encoding="utf-8")
    row = '    patience: Annotated[int | None, Option(COUNT, "an imaginary one")]\n'
    program = (
        "from typing_extensions import Unpack\n"
        "from copy_of_options import Options\n"
        "def watch(**options: Unpack[Options]) -> None: ...\n"
        "watch(patience=3, level=None)\n"
        "watch(patients=3)\n"
        "watch(patience='long')\n"
    )
    found = errors_of({"copy_of_options.py": text.replace(HEAD, HEAD + row), "program.py": program}, tmp_path)
    assert found["program.py"].keys() == {5, 6}


def test_the_table_in_the_documents_is_that_of_the_rows():
    text = TABLE["PAGE"].read_text(encoding="utf-8")
    assert TABLE["page_with"](text, TABLE["table"]()) == text, "run tools/option_table.py"


def test_every_row_has_its_field_in_the_engine():
    assert [name for name in NAMES if not hasattr(_C.LocatorOptions(), name)] == []


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_without_arguments_and_variables_the_engines_defaults_count(integration, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(options.variable_of(name), raising=False)
    resolved, engine = resolve_options({}, integration), _C.LocatorOptions()
    levels = {"megatron": "boundaries", "transformers": "modules"}
    assert resolved.level == levels.get(integration, engine.level)
    for name in set(rows(integration)) - {"level"}:
        assert getattr(resolved, name) == getattr(engine, name)
    assert resolve_options({}, integration, output_dir="here").output_dir == Path("here")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rerun", True, "on_bad"),
        ("rerun", "no", "never"),
        ("rerun", "always", "always"),
        ("check_params", "yes", True),
        ("check_params", False, False),
        ("gather_deadline", 2, datetime.timedelta(seconds=2)),
        ("gather_deadline", "7.5", datetime.timedelta(seconds=7.5)),
        ("output_dir", Path("here"), Path("here")),
        ("max_incidents", "2", 2),
    ],
)
def test_a_value_means_the_same_as_an_argument_and_in_a_variable(name, value, expected, monkeypatch):
    assert getattr(resolve_options({name: value}, "watch"), name) == expected
    monkeypatch.setenv(options.variable_of(name), str(value))
    assert getattr(resolve_options({}, "watch"), name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rerun", "often"),
        ("check_params", "perhaps"),
        ("gather_deadline", 0),
        ("gather_deadline", "nan"),
        ("max_incidents", -1),
        ("bundle_bytes", "1 GiX"),
        ("level", "all"),
        ("on_bad", "explode"),
    ],
)
def test_a_value_that_cannot_be_read_is_wrong_use(name, value):
    with pytest.raises(nanlocator.UsageError, match=name):
        resolve_options({name: value}, "watch")


@pytest.mark.parametrize(
    ("text", "count"), [("512", 512), ("1 GiB", 1 << 30), ("64MiB", 64 << 20), ("4k", 4096)]
)
def test_a_number_of_bytes_may_have_a_unit(text, count, monkeypatch):
    monkeypatch.setenv("NANLOCATOR_BUNDLE_BYTES", text)
    assert resolve_options({}, "watch").bundle_bytes == count


def test_the_variable_of_an_unknown_choice_is_named(monkeypatch):
    monkeypatch.setenv("NANLOCATOR_LEVEL", "module")
    with pytest.raises(nanlocator.UsageError, match=r"^NANLOCATOR_LEVEL: level is 'module'; expected one of"):
        resolve_options({}, "watch")


def test_a_misspelt_variable_is_reported_once(monkeypatch, capsys):
    options._warn_of_unknown_variables.cache_clear()
    monkeypatch.setenv("NANLOCATOR_LEVLE", "modules")
    resolve_options({}, "watch")
    resolve_options({}, "watch")
    assert capsys.readouterr().err == (
        "nanlocator: NANLOCATOR_LEVLE is no variable of nanlocator's: NANLOCATOR_LEVEL?\n"
    )


# ---- names of options elsewhere -----------------------------------------------------------------

# Other places that may contain an option's name as a string, with the reason.
ELSEWHERE = {
    "include/nanlocator/step/locator_options.hpp": NAMES,  # the engine's field, by name
    "integrations/nanlocator/engine/options.py": NAMES,
    # Keys in files, which are not options.
    "src/agree/rank_monitor.cpp": ["rerun"],  # an activity
    "src/record/ledger.cpp": ["level", "on_bad", "rerun"],
    "src/report/html.cpp": ["level"],
    "src/report/read_run.cpp": ["level"],
    "src/report/verdict_json.cpp": ["on_bad", "rerun", "checkpoint_dir"],
    "src/step/run_directory.cpp": ["level"],
    # Advice, examples.
    "src/report/cause_text.cpp": ["check_params", "level"],
    "src/report/orders.cpp": ["level", "on_bad"],
    "src/recorder/step_recorder_operators.cpp": ["recorded_bytes"],
    "integrations/nanlocator/__main__.py": ["on_bad"],
    "integrations/nanlocator/megatron/launcher.py": ["on_bad", "output_dir"],
    # It has its own folder, and one rank must not stop alone.
    "integrations/nanlocator/loops/evaluation.py": ["output_dir", "on_bad"],
    "integrations/nanlocator/doctor.py": ["output_dir", "bundle_bytes"],  # the same; a key
    # The outcome of a policy; an activity; a field that kOptionFields does not list.
    "integrations/bindings/module.cpp": ["on_bad", "rerun", "on_finding"],
    # Keys of a verdict, and a variable for a restarted job.
    "integrations/nanlocator/next_steps/plan.py": ["level", "checkpoint_dir", "on_bad"],
    "integrations/nanlocator/next_steps/program.py": ["checkpoint_dir"],
}


def test_no_option_is_spelled_anywhere_else():
    found = {}
    for room in ("include", "src", "integrations"):
        for file in (ROOT / room).rglob("*.*"):
            if file.suffix not in {".py", ".cpp", ".hpp"}:
                continue
            text = file.read_text(encoding="utf-8")
            for name in NAMES:
                spellings = rf"[\"']{name}[\"']|\b{options.variable_of(name)}\b|{options.flag_of(name)}\b"
                if re.search(spellings, text):
                    found.setdefault(str(file.relative_to(ROOT)), []).append(name)
    more = {file: set(names) - set(ELSEWHERE.get(file, [])) for file, names in found.items()}
    assert {file: names for file, names in more.items() if names} == {}
