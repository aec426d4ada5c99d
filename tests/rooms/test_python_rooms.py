"""The rooms of the Python package: imports follow docs/concepts.md, and no chain of them is a circle."""

import ast
import functools
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "integrations"
GENERATED = ("nanlocator._C", "nanlocator._build_info")  # by the build; below every room
TOP = "nanlocator/*.py"


def table_of(text):
    """{room: the rooms that it may import}, in the order of the rows."""
    rows, is_in_table = {}, False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            is_in_table = False
        elif cells[0] == "Python room":
            is_in_table = True
        elif is_in_table and cells[0].startswith("`"):
            below = {other for other in cells[-1].split(", ") if other != "nothing"}
            rows[cells[0].strip("`").rstrip("/")] = below
    return rows


def modules_of(source):
    files = [*source.glob("*.py"), *(source / "nanlocator").rglob("*.py")]
    files = [file for file in files if "__pycache__" not in file.parts and file.stem != "_build_info"]
    parts = {file: file.relative_to(source).with_suffix("").parts for file in files}
    return {".".join(part for part in parts[file] if part != "__init__"): file for file in files}


def room_of(module):
    package, _, rest = module.partition(".")
    if package != "nanlocator":
        return package
    room, _, _ = rest.partition(".")
    return room if (SOURCE / "nanlocator" / room).is_dir() and room else TOP


@functools.cache  # the planted trees below differ in one file
def named_in(text, package):
    """[(module, name that is imported from it, or None)]: at the top, in a function, for type checkers only,
    or in the text that import_module is given."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found += [(base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            path = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            found += [(path.value.rstrip("."), None)] if isinstance(path, ast.Constant) else []
    return [(base, name) for base, name in found if base.startswith("nanlocator")]


def imports_of(module, file, modules):
    """The modules of ours that it imports. Raises where there is no such module."""
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    found = set()
    for base, name in named_in(file.read_text(encoding="utf-8"), package):
        inside = f"{base}.{name}"
        found.add(inside if inside in modules or inside in GENERATED else base)
    missing = found - {*GENERATED} - modules.keys()
    assert not missing, f"{file} imports {missing}, which nobody has"
    return found - {*GENERATED, module}


def circle_in(imports):
    """The modules of one, in order, or nothing."""
    finished = set()

    def follow(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for other in sorted(imports[module]):
            if circle := follow(other, [*path, module]):
                return circle
        finished.add(module)
        return []

    return next(filter(None, (follow(module, []) for module in sorted(imports))), [])


def problems_of(source, table):
    modules = modules_of(source)
    imports = {module: imports_of(module, file, modules) for module, file in modules.items()}
    rooms = {room_of(module) for module in modules}
    found = [f"{room} has no row" for room in sorted(rooms - table.keys())]
    found += [f"{room} has a row and no files" for room in sorted(table.keys() - rooms)]
    folders = {module.rpartition(".")[0] for module in modules} - {""}
    found += [
        f"{folder} has no __init__.py: pip would leave it out" for folder in sorted(folders - modules.keys())
    ]
    for position, (room, below) in enumerate(table.items()):
        above = below - {*list(table)[:position]}
        found += [f"{room} may import {other}, which has no row above it" for other in sorted(above)]
    found += [
        f"{module} imports {other}: {room_of(module)} may not import {room_of(other)}"
        for module in sorted(modules)
        for other in sorted(imports[module])
        if room_of(other) not in {room_of(module), *table.get(room_of(module), ())}
    ]
    circle = circle_in(imports)
    return [*found, *([f"a circle: {' -> '.join(circle)}"] if circle else [])]


@pytest.fixture
def table():
    return table_of((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return tmp_path / "copied"


def test_imports_point_down_the_table_of_rooms_and_none_lead_back(table):
    assert len(table) > 10
    assert problems_of(SOURCE, table) == []


@pytest.mark.parametrize(
    "line",
    [
        "import nanlocator.loops.watch",
        "from nanlocator.loops import watch",
        "from nanlocator.loops.watch import Watch as _Watch",
        "from ..loops import watch",
        "def _later():\n    from nanlocator.loops.watch import Watch",
        "if TYPE_CHECKING:\n    from nanlocator.loops.watch import Watch",
        'importlib.import_module("nanlocator.loops.watch")',
    ],
)
def test_an_import_that_points_up_is_found(copied, table, line):
    with open(copied / "nanlocator" / "hooks" / "patches.py", "a") as file:
        file.write(f"\n{line}\n")
    upward, circle = problems_of(copied, table)
    assert upward == "nanlocator.hooks.patches imports nanlocator.loops.watch: hooks may not import loops"
    assert circle.startswith("a circle: ")


def test_the_package_itself_is_above_its_rooms(copied, table):
    with open(copied / "nanlocator" / "netcheck" / "slurm.py", "a") as file:
        file.write("\nfrom nanlocator import watch\n")
    assert problems_of(copied, table) == [
        f"nanlocator.netcheck.slurm imports nanlocator: netcheck may not import {TOP}"
    ]


def test_a_circle_within_a_room_is_found(copied, table):
    with open(copied / "nanlocator" / "calls" / "pickled_modules.py", "a") as file:
        file.write("\ndef _later():\n    from nanlocator.calls import module_calls\n")
    (circle,) = problems_of(copied, table)
    assert set(circle.removeprefix("a circle: ").split(" -> ")) == {
        "nanlocator.calls.module_calls",
        "nanlocator.calls.pickled_modules",
    }


def test_an_import_of_a_module_that_is_gone_is_found(copied, table):
    with open(copied / "nanlocator" / "loops" / "watch.py", "a") as file:
        file.write("\ndef _later():\n    from nanlocator.session import Options\n")
    with pytest.raises(AssertionError, match=r"nanlocator\.session"):
        problems_of(copied, table)


def test_a_table_whose_rows_point_up_or_lack_a_room_is_found():
    table = table_of("| Python room | question | may import |\n|---|---|---|\n| `hooks/` | ? | engine |\n")
    found = problems_of(SOURCE, table)
    assert "engine has no row" in found
    assert "hooks may import engine, which has no row above it" in found
    assert "ghost has a row and no files" in problems_of(SOURCE, {**table, "ghost": set()})
