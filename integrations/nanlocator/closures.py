"""What a closure draws from: an iterator gives other data when the closure is executed again."""

import functools
import io
import types
from collections.abc import Callable, Iterator
from typing import Any

_DEEPEST = 4  # calls of functions that the closure names


def iterators_of(closure: Callable[..., Any]) -> list[str]:
    """Names of the iterators that ``closure`` uses, or functions of the program that it names do: of its own
    and of global variables, and of the attributes of an object whose method it is. Those that nobody names
    are not found."""
    found: dict[str, None] = {}
    seen: set[int] = set()

    def visit(function: Any, depth: int) -> None:
        while isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                take("an argument", value, depth)
            function = function.func
        if isinstance(function, types.MethodType):
            for name, value in _attributes(function.__self__).items():
                take(f"self.{name}", value, depth, follows=False)
            function = function.__func__
        if not isinstance(function, types.FunctionType) or id(function) in seen or depth > _DEEPEST:
            return
        seen.add(id(function))
        for name, value in _variables(function):
            take(name, value, depth)

    def take(name: str, value: Any, depth: int, *, follows: bool = True) -> None:
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            found.setdefault(name)
        elif follows and isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            visit(value, depth + 1)

    visit(closure, 0)
    return list(found)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _attributes(owner: Any) -> dict[str, Any]:
    try:
        return vars(owner)
    except TypeError:  # it has none
        return {}
