"""The public names: those of the package, and each path that documents or examples mention."""

import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanlocator

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "AgreementError",
    "Error",
    "FormatError",
    "IoError",
    "LocatingOptimizer",
    "NonFiniteGradientError",
    "RankCoordinates",
    "UnsupportedError",
    "UsageError",
    "Verdict",
    "Watch",
    "__version__",
    "check_checkpoint",
    "detect",
    "guard",
    "replay",
    "watch",
]
FRAMEWORKS = {"megatron": "megatron.core", "deepspeed": "deepspeed.runtime", "transformers": "transformers"}


def test_the_package_shows_what_programs_use_and_nothing_else():
    assert dir(nanlocator) == NAMES
    assert all(getattr(nanlocator, name) is not None for name in NAMES)


def test_the_package_holds_no_other_name_but_its_modules():
    """In its own process: tests import modules, which the package has afterwards."""
    code = (
        "import nanlocator, types\n"
        "others = [name for name, value in vars(nanlocator).items() if not name.startswith('_')\n"
        "          and not getattr(value, '__name__', '').startswith('nanlocator.')]\n"
        "print(*sorted(set(others) - set(dir(nanlocator))), callable(nanlocator.watch))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True"]


def test_the_error_of_a_bad_step_is_known_by_its_public_name():
    error = nanlocator.NonFiniteGradientError("a headline", {"step": 3})
    assert b"nanlocator\n" in pickle.dumps(error, protocol=0)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is nanlocator.NonFiniteGradientError and again.verdict == {"step": 3}


def documented_paths():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = {path.rstrip(".") for path in re.findall(r"(?<![\w./-])nanlocator(?:\.[A-Za-z_]\w*)+", text)}
    for module, names in re.findall(r"from (nanlocator[\w.]*) import ([\w, ]+)", text):
        found |= {f"{module}.{name.strip()}" for name in names.split(",")}
    return sorted(found - {"nanlocator.pth"})  # a file


def resolved(path):
    """The longest prefix is imported as modules; the rest are attributes."""
    words = path.split(".")
    for end in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:end]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("nanlocator"):
                raise
            continue
        for name in words[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("path", documented_paths())
def test_a_path_that_documents_or_examples_mention_can_be_imported(path):
    if framework := FRAMEWORKS.get(path.split(".")[1]):
        pytest.importorskip(framework)
    resolved(path)


def test_documents_mention_paths_of_each_kind():
    """Otherwise the pattern above finds too little."""
    expected = {
        "nanlocator.watch",
        "nanlocator.replay.load",
        "nanlocator.megatron.install",
        "nanlocator.driver",
    }
    assert expected <= {*documented_paths()}
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolved("nanlocator.driver.NoSuchName")


def test_each_path_beside_a_room_gives_what_the_room_has():
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(nanlocator\.\w+)` \| (`nanlocator\.\w+\.\w+`.*) \|$", text, re.MULTILINE))
    assert sorted(rows) == [f"nanlocator.{name}" for name in ("driver", "kernel_calls", "replay", "rerun")]
    for path, text in rows.items():
        module = importlib.import_module(path)
        rooms = [importlib.import_module(room) for room in re.findall(r"nanlocator\.\w+\.\w+", text)]
        assert module.__all__
        for name in module.__all__:
            assert any(getattr(room, name, None) is getattr(module, name) for room in rooms), name
