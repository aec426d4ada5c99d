"""The types for checking programs: the package's, and the extension's, whose stub is written by hand
(integrations/nanlocator/_C.pyi)."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checked_types import errors_of

from nanlocator import _C

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "integrations" / "nanlocator" / "_C.pyi"
SCRIPT = Path(__file__).with_name("typed_user_script.py")

# ---- a program that uses the package ------------------------------------------------------------


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """{file: {line: error of mypy}}, for the script, and for variants with a mistake."""
    pytest.importorskip("transformers")
    text = SCRIPT.read_text(encoding="utf-8")
    programs = {
        "good.py": text,
        "misspelt.py": text.replace("on_bad=", "on_bath="),
        "of_another_type.py": text.replace('"level": None', '"level": 3').replace("=10,", '="soon",'),
        "misspelt_attribute.py": text.replace("driver.is_rerunning", "driver.is_running_again"),
    }
    assert len(set(programs.values())) == len(programs)
    return errors_of(programs, tmp_path_factory.mktemp("programs"))


def lines_with(words):
    text = SCRIPT.read_text(encoding="utf-8")
    return [number for number, line in enumerate(text.splitlines(), 1) if words in line]


@pytest.mark.slow
def test_a_program_that_uses_every_integration_is_clean_under_strict(checked):
    assert checked["good.py"] == {}


@pytest.mark.slow
def test_a_misspelt_option_is_an_error_in_every_integration(checked):
    assert checked["misspelt.py"].keys() == {*lines_with("on_bad=")}
    assert all("on_bath" in said for said in checked["misspelt.py"].values())


@pytest.mark.slow
def test_an_option_of_another_type_is_an_error(checked):
    assert checked["of_another_type.py"].keys() == {*lines_with('"level": None'), *lines_with("=10,")}


@pytest.mark.slow
def test_a_name_that_a_driver_does_not_have_is_an_error(checked):
    assert checked["misspelt_attribute.py"].keys() == {*lines_with("driver.is_rerunning")}


# ---- the stub of the extension ------------------------------------------------------------------


@pytest.mark.slow
def test_the_stub_has_the_names_of_the_extension():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy.stubtest", "nanlocator._C", "--mypy-config-file", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def arguments_of(function):
    """(name, default) of each, in order; a default as written in Python, None if there is none."""
    given = function.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    pairs = [*zip(given.args, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    names = [
        (each.arg, default and ast.unparse(default).removeprefix("datetime."))
        for each, default in pairs
        if each.arg != "self"
    ]
    return tuple(names), len(given.kwonlyargs)


# pybind11's and the stub's spellings of the same type.
SPELLINGS = {
    "os.PathLike | str | bytes": "StrPath",  # also for a result, which is a Path
    "Path": "StrPath",
    "typing.SupportsInt": "int",
    "typing.SupportsFloat": "float",
    "torch.Tensor": "Tensor",
}
MODULES = ("collections.abc", "datetime", "nanlocator._C", "torch.distributed.distributed_c10d", "typing")


def members(annotation):
    """The type, as the sorted members of its union; None if the binding takes or returns any object."""
    text = ast.unparse(annotation) if annotation is not None else "object"
    for written, instead in SPELLINGS.items():
        text = re.sub(rf"(?<!\w){re.escape(written)}(?!\w)", instead, text)
    for module in MODULES:
        text = text.replace(f"{module}.", "")
    is_any = re.search(r"\b(Callable|dict|object|tuple)\b(?!\[)|\bobject\b", text)
    return None if is_any else sorted(text.split(" | "))


def signature(function):
    """Arguments, and their types and the result's."""
    every = [*function.args.args, *function.args.kwonlyargs]
    kinds = {each.arg: members(each.annotation) for each in every if each.arg != "self"}
    return arguments_of(function), kinds | {"return": members(function.returns)}


def in_stub(text):
    """{"scan": [signatures], "Birth.kind": [signatures]} for functions and read-only properties."""
    found = {}
    for node in ast.parse(text).body:
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef) and not any(map(_is_setter, each.decorator_list)):
                name = f"{node.name}.{each.name}" if node is not each else each.name
                found.setdefault(name, []).append(signature(each))
            elif isinstance(each, ast.AnnAssign) and node is not each and "ClassVar" not in ast.dump(each):
                found[f"{node.name}.{each.target.id}"] = [(((), 0), {"return": members(each.annotation)})]
    return found


def _is_setter(decorator):
    return isinstance(decorator, ast.Attribute) and decorator.attr == "setter"


def documented(text):
    """The signatures in a pybind11 function's documentation."""
    lines = [line for line in text.splitlines() if re.match(r"(\d+\. )?\w*\(.*\) -> ", line)]
    for line in lines:
        line = re.sub(r"nanlocator(::\w+)+", "object", line)  # a class that is bound after this function
        line = re.sub(r"^\(", "get(", re.sub(r"^\d+\. ", "", line))
        yield signature(ast.parse(f"def {line}: ...").body[0])


def in_extension():
    found = {}
    for name, value in vars(_C).items():
        if not isinstance(value, type):
            if callable(value):
                found[name] = list(documented(value.__doc__))
            continue
        if issubclass(value, Exception):
            continue
        for member, each in vars(value).items():
            if isinstance(each, property):
                (_, kinds), *_ = documented(each.fget.__doc__)
                found[f"{name}.{member}"] = [(((), 0), {"return": kinds["return"]})]
            elif callable(each) or isinstance(each, staticmethod):
                found[f"{name}.{member}"] = list(documented(getattr(value, member).__doc__ or ""))
    return found


def _agree(of_stub, of_extension):
    """Compares if both are known. pybind11 does not mark that a pointer or a function may be None."""
    return all(
        None in (kinds, others := of_extension[name])
        or kinds == others
        or (name != "return" and kinds == sorted([*others, "None"]))
        for name, kinds in of_stub.items()
    )


def differences(text):
    stub, extension = in_stub(text), in_extension()
    different = [name for name in extension if name not in stub and not re.search(r"\._", name)]
    for name, signatures in stub.items():
        is_operator = re.search(r"\.__(?!init)", name)  # Python knows its arguments
        if is_operator or name.startswith("_"):
            continue
        if name not in extension or len(extension[name]) != len(signatures):
            different.append(name)
            continue
        for one, other in zip(signatures, extension[name], strict=True):
            if one[0] != other[0] or not _agree(one[1], other[1]):
                different.append(name)
    return different


def test_the_stub_has_the_arguments_of_the_extension():
    assert len(in_stub(STUB.read_text(encoding="utf-8"))) > 250
    assert differences(STUB.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("written", "instead", "name"),
    [
        ("def scan_one(tensor: ", "def scan_one(value: ", "scan_one"),
        ('def leave(self, ended_by: str = "")', "def leave(self, ended_by: str)", "Communicator.leave"),
        ("threads: int = 1)", "threads: int = 2)", "scan"),
        ("def module_depth() -> int: ...", "", "module_depth"),
        (
            "def is_registered(operator: str) -> bool",
            "def is_registered(operator: str) -> str",
            "is_registered",
        ),
        ("def births(self) -> list[TracedBirth]", "def births(self) -> list[Birth]", "Explanation.births"),
        ("outputs: Sequence[Tensor | None]", "outputs: Sequence[Tensor]", "StepReplay.set_outputs"),
        ("    is_expert: bool", "    is_expert: str", "ParameterInfo.is_expert"),
    ],
)
def test_a_stub_that_differs_is_found(written, instead, name):
    text = STUB.read_text(encoding="utf-8")
    assert written in text
    assert differences(text.replace(written, instead, 1)) == [name]
