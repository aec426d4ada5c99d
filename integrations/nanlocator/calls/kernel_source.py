"""The source of a Triton kernel as a self-contained module, for bundles and bug reports.

It includes everything that the kernel refers to: other Triton functions, modules, constants. If a name cannot
be written this way, there is no source.
"""

import functools
import inspect
import textwrap
import types
from typing import Any


def source_of(kernel: Any) -> str:
    """The source of a launchable kernel (JITFunction, the interpreter's, Inductor's); "" if there is none."""
    try:
        return _Module().of(kernel)
    except (_NotWritten, AttributeError, OSError, TypeError):
        return ""


class _NotWritten(Exception):
    pass


class _Module:
    def __init__(self) -> None:
        self._imports = ["import triton", "import triton.language as tl"]
        self._constants: list[str] = []
        self._functions: dict[str, str] = {}

    def of(self, kernel: Any) -> str:
        self._add(_launched(kernel))
        parts = [
            "\n".join(dict.fromkeys(self._imports)),
            "\n".join(self._constants),
            *self._functions.values(),
        ]
        return "\n\n\n".join(filter(None, parts)) + "\n"

    def _add(self, function: Any) -> None:
        python = python_function(function)
        if python.__name__ in self._functions:
            return
        self._functions[python.__name__] = ""  # recursion ends here
        for name in _names_in(python.__code__):
            if name in python.__globals__:
                self._add_global(name, python.__globals__[name])
        text = textwrap.dedent(function.src if hasattr(function, "src") else inspect.getsource(python))
        begin = text.find("def ")
        self._functions[python.__name__] = "@triton.jit\n" + text[begin:].rstrip()

    def _add_global(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            self._imports.append(f"import {value.__name__} as {name}")
        elif _is_kernel(value):
            if python_function(value).__name__ != name:
                raise _NotWritten(name)
            self._add(value)
        elif type(value) in (bool, int, float, str):
            self._constants.append(f"{name} = {value!r}")
        elif type(value).__name__ == "constexpr":
            self._constants.append(f"{name} = tl.constexpr({value.value!r})")
        elif (
            hasattr(value, "__module__") and hasattr(value, "__qualname__") and "." not in value.__qualname__
        ):
            self._imports.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        else:
            raise _NotWritten(name)


def _launched(kernel: Any) -> Any:
    """The kernel without the autotuners and heuristics around it."""
    while not _is_kernel(kernel) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _is_kernel(value: Any) -> bool:
    return type(value).__name__ in ("JITFunction", "InterpretedFunction")


def python_function(kernel: Any) -> Any:
    """The kernel's Python function, without autotuners, heuristics and ``triton.jit``."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


@functools.cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for each in inner for name in _names_in(each))]))
