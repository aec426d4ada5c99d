"""Kernels that Inductor has compiled for CPUs. Each is an extension module of its code cache, and goes by the
name under which the module of Python has it that Inductor has generated with its source."""

import ast
import functools
import re
import types
from pathlib import Path
from typing import Any


def is_extension(module: Any) -> bool:
    """As torch._inductor.codecache.CppPythonBindingsCodeCache loads them."""
    if not isinstance(module, types.ModuleType):
        return False
    own = vars(module)  # a module's __getattr__ may import others
    return own.get("__name__") == f"{own.get('key')}.kernel"


def is_generated(function: Any) -> bool:
    return is_extension(getattr(function, "__self__", None))


def source_of(generated: types.ModuleType, name: str) -> str:
    """As a module of its own, which compiles it; "" where there is none."""
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
    """What it is compiled from: the types of its arguments, and C++; "" where that is not found."""
    return _definitions(str(getattr(generated, "__file__", ""))).get(name, ([], ""))


@functools.cache
def _definitions(file: str) -> dict[str, tuple[list[str], str]]:
    """Of each kernel in it."""
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
