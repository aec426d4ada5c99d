"""What a function's code names: iterators, which yield other data when the function is called again, and
values that its calls may change."""

import dis
import functools
import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

LIBRARIES = (
    "torch",
    "transformers",
    "transformer_engine",
    "megatron",
    "deepspeed",
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "peft",
    "nanlocator",
)
_DEEPEST = 4  # levels of functions that it names
_COUNTERS = (itertools.count, itertools.repeat)  # no data
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CONTAINERS = (torch.Tensor, list, dict, set, deque)  # used as they are, whatever attribute follows


@dataclass(frozen=True)
class Used:
    """A value that a function's code names: a variable, "self.batches"."""

    name: str
    value: Any
    owner: Any = None  # whose attribute it is; a function's global variables; a cell. None: cannot be set
    key: str = ""  # in the owner; "" for a cell


def iterators_of(function: Callable[..., Any]) -> list[str]:
    """Names of the iterators that ``function`` uses, directly or through functions that it names: its own
    variables, global variables, and attributes of both ("self.batches"). Does not find iterators that it
    reaches in another way."""
    found: dict[str, None] = {}

    def take(used: Used) -> None:
        value = used.value
        if isinstance(value, Iterator) and not isinstance(value, _COUNTERS) and not hasattr(value, "fileno"):
            found.setdefault(used.name)

    for_each_used(function, take)
    return list(found)


def attributes_loaded(function: Callable[..., Any]) -> set[str]:
    """Names of attributes, of any object, that ``function`` reads, directly or through functions that it
    names."""
    names: set[str] = set()

    def look(code: types.CodeType) -> None:
        names.update(each.argval for each in dis.get_instructions(code) if each.opname in _ATTRIBUTES)

    for_each_used(function, lambda _: None, look)
    return names


def for_each_used(
    function: Callable[..., Any],
    take: Callable[[Used], None],
    look: Callable[[types.CodeType], None] = lambda code: None,
) -> None:
    """Calls ``take`` with what ``function`` uses, directly or through functions that it names: its own
    variables, global variables, and attributes of both. Functions among them are followed and not passed on.
    ``look`` is called with the code of each function."""
    seen: set[int] = set()

    def use(used: Used, depth: int) -> None:
        try:
            if not _is_function(used.value):
                take(used)
            if not isinstance(used.value, Iterator):
                visit(used.value, depth + 1)
        except Exception:  # a class of the program can raise anything
            return

    def visit(value: Any, depth: int) -> None:
        if depth > _DEEPEST or id(value) in seen:
            return
        if isinstance(value, functools.partial):
            for argument in (*value.args, *value.keywords.values()):
                use(Used("an argument", argument), depth)
            visit(value.func, depth)
            return
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            visit(value.forward, depth)
            visit(value.backward, depth)
            return
        owner = None
        if not _is_function(value):
            owner, value = value, inspect.getattr_static(type(value), "__call__", None)
            if str(getattr(value, "__module__", "")).partition(".")[0] == "torch":  # a torch module
                return
        elif isinstance(value, types.MethodType):
            owner, value = value.__self__, value.__func__
        if isinstance(value, types.FunctionType):
            if depth > 0 and str(value.__module__).partition(".")[0] in LIBRARIES:
                return  # what it names is the library's
            seen.add(id(value))
            for code in _codes_of(value):
                look(code)
            for each in _used_by(value, owner):
                use(each, depth)

    visit(function, 0)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial)


def _used_by(function: types.FunctionType, owner: Any) -> Iterator[Used]:
    """Variables and their attributes that the code names, such as "self.batches"."""
    variables: dict[str, Used] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = Used(name, cell.cell_contents, cell)
        except ValueError:  # not assigned yet
            continue
    if owner is not None and function.__code__.co_argcount:
        name = function.__code__.co_varnames[0]
        variables[name] = Used(name, owner)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Used("a default", value)
    for code in _codes_of(function):
        yield from _loaded_by(code, variables, function.__globals__)


def _codes_of(function: types.FunctionType) -> Iterator[types.CodeType]:
    """With those of the functions inside it."""
    codes = [function.__code__]
    while codes:
        yield (code := codes.pop())
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _loaded_by(code: types.CodeType, variables: dict[str, Used], globals: dict[str, Any]) -> Iterator[Used]:
    chain: Used | None = None
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in _ATTRIBUTES and chain is not None:
            if issubclass(type(chain.value), _CONTAINERS):
                yield chain
            try:
                chain = _attribute_of(chain, name)
            except Exception:  # a proxy may refuse any question
                chain = None
            continue
        if chain is not None:  # the chain of attributes ends here
            yield chain
        chain = None
        if kind in ("LOAD_GLOBAL", "LOAD_NAME") and name in globals:
            chain = Used(name, globals[name], globals, name)
        elif kind.startswith(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST")):
            last = name[-1] if isinstance(name, tuple) else name  # two in one instruction since Python 3.13
            chain = variables.get(last)


def _attribute_of(used: Used, name: str) -> Used:
    owner = used.value
    value = inspect.getattr_static(owner, name, None)
    if isinstance(value, types.FunctionType) and not isinstance(owner, types.ModuleType | type):
        value = types.MethodType(value, owner)
    if name == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        value = owner  # it calls the class's forward and backward
    holder = owner
    if name not in getattr(owner, "__dict__", {}):  # an attribute of its class
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        holder = next((kind for kind in kinds if name in vars(kind)), None)
    return Used(f"{used.name}.{name}", value, holder, name)
