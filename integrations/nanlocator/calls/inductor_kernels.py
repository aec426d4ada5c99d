"""Kernels that Inductor has compiled for CPUs. Each is an extension module in Inductor's code cache. Its name
is the one that it has in the Python module that Inductor generated with the kernel's source."""

import ast
import functools
import re
import types
from pathlib import Path
from typing import Any


def is_extension(module: Any) -> bool:
    """Whether torch._inductor.codecache.CppPythonBindingsCodeCache has loaded it."""
    if not isinstance(module, types.ModuleType):
        return False
    own = vars(module)  # a module's __getattr__ may import other modules
    return own.get("__name__") == f"{own.get('key')}.kernel"


def is_generated(function: Any) -> bool:
    return is_extension(getattr(function, "__self__", None))


def source_of(generated: types.ModuleType, name: str) -> str:
    """A Python module that compiles the kernel ``name`` when imported; "" if its source is not found."""
    types_of_arguments, source = _definition(generated, name)
    if not source:
        return ""
    return (
        "from torch._inductor.codecache import CppPythonBindingsCodeCache\n\n"
        f"{name} = CppPythonBindingsCodeCache.load_pybinding(\n"
        f"    {types_of_arguments!r},\n    r'''{source}''',\n)\n"
    )


def argument_names(generated: types.ModuleType, name: str) -> list[str]:
    _, source = _definition(generated, name)
    inside = re.search(r"\bvoid\s+kernel\(([^)]*)\)", source)
    return re.findall(r"(\w+)\s*(?:,|$)", inside.group(1)) if inside else []


def _definition(generated: types.ModuleType, name: str) -> tuple[list[str], str]:
    """The types of the kernel's arguments, and its C++ source; [] and "" if it is not found."""
    return _definitions(str(getattr(generated, "__file__", ""))).get(name, ([], ""))


@functools.cache
def _definitions(file: str) -> dict[str, tuple[list[str], str]]:
    """The definitions of all kernels in ``file``, by name."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, tuple[list[str], str]] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr="cpp_pybinding"),
                    args=[ast.List(elts=elements), ast.Constant(value=str(source))],
                ),
            ):
                kinds = [each.value for each in elements if isinstance(each, ast.Constant)]
                found[name] = ([kind for kind in kinds if isinstance(kind, str)], source)
    return found
