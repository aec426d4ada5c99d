"""Finds the modules and libraries that registered a custom operator, for its bundle, and loads them for
replay.

PyTorch has no link from an operator back to the module or library that registered it. It keeps the place of
each registration (``torch._C._dispatch_dump``): a line of C++, whose file name is in the library compiled
from it; a line of Python that made a ``torch.library.Library``; or a line of torch.library itself. For the
last, the modules' sources show which of them names the operator.
"""

import ast
import os
import re
import symtable
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._library.custom_ops import OPDEFS

from nanlocator import _C
from nanlocator.calls.bundle_code import consent, execute, import_named, line_of, require_own
from nanlocator.calls.kernels import holds_one_of

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PLACE = re.compile(r"registered at (.+?):\d+(?: ::|$)", re.MULTILINE)
_DEFINES = re.compile(r"custom_op|triton_op|define")
_REGISTERS = re.compile(
    rf"{_DEFINES.pattern}|impl|impl_abstract|register_(?:kernel|autograd|fake|autocast|vmap|torch_dispatch)"
)
_PROGRAM = "nanlocator_program"  # for code without a module name: not "__main__", so that it does not run


def registered_by(operator: str) -> list[tuple[str, str, str]]:
    """(module, file, source) of all code that registered ``operator``, in the order of loading.

    For a shared library, the module is "" or the package that contains it. The source is self-contained
    Python that registers the operator; "" if the module's statements cannot run alone.
    """
    places = set(_PLACE.findall(torch._C._dispatch_dump(operator)))
    in_python = {place for place in places if place.endswith(".py")}
    found = [(_module_of_library(file), file, "") for file in _libraries(places - in_python)]
    for module, text in _modules(operator, in_python) if in_python else ():
        file, name = str(module.__file__), module.__name__
        if not all(part.isidentifier() for part in name.split(".")):
            name = _PROGRAM
        package = getattr(module, "__package__", None) or ""
        found.append((name, _absolute(file), source_of(operator, text, package)))
    return found


def _absolute(file: str) -> str:
    return os.path.normpath(os.path.abspath(file))


# --- shared libraries ---


def _libraries(places: set[str]) -> list[str]:
    """The mapped libraries, except Torch's own, that were compiled from the files ``places``."""
    marks = tuple(os.fsencode(place) + b"\0" for place in sorted(places))
    return [file for file in _mapped_libraries() if holds_one_of(file, marks)] if marks else []


def _mapped_libraries() -> list[str]:
    files = dict.fromkeys(_absolute(file) for file in torch.ops.loaded_libraries)
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        file = line.split(maxsplit=5)[-1]
        is_left_out = file.startswith(_TORCH) or "/nvidia/" in file  # gigabytes without custom operators
        if ".so" in os.path.basename(file) and not is_left_out and os.path.isfile(file):
            files[file] = None
    return list(files)


def _module_of_library(file: str) -> str:
    """The extension module in ``file``, else the innermost package that contains ``file``, or ""."""
    innermost = ("", "")
    for name, module in list(sys.modules.items()):
        own = getattr(module, "__file__", None)
        if isinstance(own, str) and own.endswith(".so") and _absolute(own) == file:
            return name
        for folder in _folders_of(module):
            if file.startswith(f"{folder}{os.sep}"):
                innermost = max(innermost, (folder, name), key=lambda found: len(found[0]))
    return innermost[1]


def _folders_of(module: types.ModuleType) -> list[str]:
    try:
        return [_absolute(folder) for folder in getattr(module, "__path__", ())]
    except Exception:  # proxies of modules can raise anything
        return []


# --- modules of Python ---


def _modules(operator: str, places: set[str]) -> list[tuple[types.ModuleType, str]]:
    """The loaded modules that registered ``operator``, with their sources; modules that define it come
    first."""
    loaded = _loaded_modules()
    wanted = {_absolute(place) for place in places if not place.startswith(_TORCH)}
    if any(place.startswith(_TORCH) for place in places):
        wanted |= {file for file in loaded if _registers(operator, _text(file))}
    if not wanted:  # code computes the operator's name: use the file of its function
        function = getattr(OPDEFS.get(operator.partition(".")[0]), "_init_fn", None)
        wanted = {_absolute(getattr(getattr(function, "__code__", None), "co_filename", ""))}
    found = [(loaded[file], _text(file)) for file in loaded if file in wanted]
    return sorted(found, key=lambda module: not _registers(operator, module[1], _DEFINES))


def _loaded_modules() -> dict[str, types.ModuleType]:
    """Loaded Python modules by file, except Torch's and nanlocator's."""
    own = f"{Path(__file__).parents[1]}{os.sep}"
    files: dict[str, types.ModuleType] = {}
    for module in list(sys.modules.values()):
        file = module.__dict__.get("__file__") if isinstance(module, types.ModuleType) else None
        if isinstance(file, str) and file.endswith(".py") and not file.startswith((_TORCH, own)):
            files.setdefault(_absolute(file), module)
    return files


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _registers(operator: str, text: str, by: re.Pattern[str] = _REGISTERS) -> bool:
    if "torch" not in text or _short_name(operator) not in text:
        return False
    if not re.search(rf"\b(?:{by.pattern})\(", text):  # before the slow part
        return False
    try:
        return any(_is_registration(node, operator, by) for node in ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _short_name(operator: str) -> str:
    """The name alone: "scale" for "mylib::scale.out"."""
    return operator.partition("::")[2].partition(".")[0]


def _is_registration(node: ast.AST, operator: str, by: re.Pattern[str] = _REGISTERS) -> bool:
    """Whether ``node`` calls a function of torch.library, or a Library's method, with the operator's name."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if not by.fullmatch(function):
        return False
    pattern = re.compile(rf"(?:^|::){re.escape(_short_name(operator))}(?:$|[.(\s])")
    texts = (text for argument in [*node.args, *node.keywords] for text in ast.walk(argument))
    return any(
        isinstance(t, ast.Constant) and isinstance(t.value, str) and pattern.search(t.value) for t in texts
    )


# --- the statements of a module that register an operator ---


def source_of(operator: str, text: str, package: str) -> str:
    """The statements in a module's ``text`` that register ``operator``, outside functions, and all statements
    that these need. "" if there are none, or if they need ``__file__``."""
    try:
        body = [s for s in ast.parse(text).body if not _is_only_for_the_program(s)]
        kept = _needed(body, {i for i, s in enumerate(body) if _is_statement_of(s, operator)})
    except (SyntaxError, ValueError, RecursionError):
        return ""
    if not kept or "__file__" in {name for i in kept for name in _uses(body[i])}:
        return ""
    lines = text.splitlines()
    future = {i for i, s in enumerate(body) if isinstance(s, ast.ImportFrom) and s.module == "__future__"}
    source, after = "", "\n"
    for i in sorted(kept | future):
        around = "\n\n\n" if isinstance(body[i], ast.FunctionDef | ast.ClassDef) else "\n"
        source += (max(after, around) if source else "") + _written(body[i], lines, package)
        after = around
    return source + "\n"


def _is_only_for_the_program(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def _is_statement_of(statement: ast.stmt, operator: str) -> bool:
    return any(_is_registration(node, operator) for node in _of_this_scope(statement))


def _needed(body: list[ast.stmt], kept: set[int]) -> set[int]:
    """``kept``, plus statements that add to the registration (``scale.register_autograd``), plus all that
    these use."""
    bound = [_binds(statement) for statement in body]
    registering = {name for i in kept for name in bound[i]}
    for i, statement in enumerate(body):
        if any(_goes_on(node, registering) for node in _of_this_scope(statement)):
            kept.add(i)
    waiting = list(kept)
    while waiting:
        names = _uses(body[waiting.pop()])
        for i in range(len(body)):
            if i not in kept and bound[i] & names:
                kept.add(i)
                waiting.append(i)
    return kept


def _goes_on(node: ast.AST, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        and _REGISTERS.fullmatch(node.attr) is not None
    )


def _uses(statement: ast.stmt) -> set[str]:
    """Names of the module that ``statement`` reads, also inside functions."""
    module = symtable.symtable(ast.unparse(statement), "", "exec")
    names = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced()}
    waiting = module.get_children()
    while waiting:
        scope = waiting.pop()
        names |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
        waiting += scope.get_children()
    return names


def _binds(statement: ast.stmt) -> set[str]:
    """Names of the module that ``statement`` assigns."""
    names: set[str] = set()
    for node in _of_this_scope(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _of_this_scope(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and its descendants, without the inside of functions and classes, but with their
    decorators."""
    yield node
    is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
    children = getattr(node, "decorator_list", []) if is_scope else ast.iter_child_nodes(node)
    for child in children:
        yield from _of_this_scope(child)


def _written(statement: ast.stmt, lines: list[str], package: str) -> str:
    if isinstance(statement, ast.ImportFrom) and statement.level:
        base = package.rsplit(".", statement.level - 1)[0]
        module = f"{base}.{statement.module}" if statement.module else base
        return ast.unparse(ast.ImportFrom(module, statement.names, 0))
    decorators = getattr(statement, "decorator_list", [])
    begin = min(node.lineno for node in [statement, *decorators])
    return "\n".join(lines[begin - 1 : statement.end_lineno])


# --- in another process ---


def register(bundle: Path, trust: bool = False) -> None:
    """Imports, by name, the modules that registered the operator of ``bundle``, unless it is registered
    already. With ``trust``, executes the source in the bundle, or loads the file that the bundle names."""
    found = _C.registration_of(bundle)
    if found is None or _C.is_registered(found[0]):
        return
    operator, registrations, folder = found
    failed, problems = [], []
    for module, file, source in registrations:
        try:
            problem = _load(operator, module, file, source if trust else "", Path(folder), trust)
        except (Exception, SystemExit) as error:  # the module's code can raise anything
            problem = line_of(error)
        if problem:
            failed.append((module, file, source))
            problems.append(f"{module or file} registered it but was not loaded: {problem}")
    if registrations and not _C.is_registered(operator):
        said = "; ".join(problems) or "The code that registered it in training does not register it here"
        advice = "" if trust else consent(Path(folder), failed)
        raise _C.UnsupportedError(f"{operator} is not registered here. {said}{advice}")
    for (_, file, _), problem in zip(failed, problems, strict=True):
        if file not in _mapped_libraries():  # else a module has loaded it
            warnings.warn(_C.printable(f"nanlocator.replay: {operator}: {problem}"), stacklevel=2)


def _load(operator: str, module: str, file: str, source: str, bundle: Path, trust: bool) -> str:
    """Loads one of them. Returns the reason if that fails, else ""."""
    if source:
        execute(Path(source), _PROGRAM)
        return ""
    is_program = module.startswith("__")
    problem = "it is the training script itself" if is_program else "only its file is known, no module"
    if module and not is_program:
        try:
            import_named(module, bundle)
            if _C.is_registered(operator):
                return ""
            problem = f"the module {module} found here does not register it"
        except (Exception, SystemExit) as error:
            problem = line_of(error)
    if file and not os.path.isfile(file):
        return f"{problem}, and {file} is not on this machine"
    if not file or not trust:
        return problem
    if not is_program and not file.endswith(".py"):
        require_own(file)
        torch.ops.load_library(file)
        return ""
    text = source_of(operator, _text(file), "") if is_program else None  # the whole program would train again
    if text == "":
        return f"{file} has no self-contained statements that register it"
    execute(Path(file), _PROGRAM, text)
    return ""
