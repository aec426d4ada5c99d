"""Attributes of modules, other than buffers, that a pass changes: a counter, a falling temperature, a flag, a
cache that is None before the first pass, a growing list.

A re-run restores numbers, strings, None, references to tensors, and random generators, but not writes into
a tensor. Other values are not saved at the start of a step. But if a re-run changes one, the first pass has
changed it too, and a fault that the re-run does not show may have depended on it. That holds also for what
the modules' code, or that of their hooks, names beside its attributes: a global variable, a default argument,
a class, a closure's variable."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanlocator.state.closures import LIBRARIES, Used, attributes_loaded, for_each_used, iterators_of
from nanlocator.state.communication_hooks import communication_hooks_of
from nanlocator.state.containers import is_simple_value
from nanlocator.state.named_values import NamedValues

_OF_TORCH = frozenset(vars(nn.Module()))
_MOST = 64  # compared elements of a container, besides its length
_MOST_NAMED = 4
_MOST_BYTES = 1 << 24  # of a tensor that is kept during a step: larger ones are results
_MOST_MODULES = 256

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_ABSENT = object()  # a module has no attribute of this name


@dataclass
class _Kept:
    """An attribute of a module, and its value when the step began."""

    held: dict[str, Any]
    name: str
    path: str
    began: Any
    left: Any = _ABSENT  # the bad pass's final value

    @property
    def now(self) -> Any:
        return self.held.get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        if value is not _ABSENT:
            self.held[self.name] = value
        else:
            self.held.pop(self.name, None)

    @property
    def was_set_by_program(self) -> bool:
        """After a re-run: whether the loop set it, or a branch that only the bad pass took."""
        return _is_same(self.now, self.began) and not _is_same(self.left, self.began)

    @property
    def is_mode(self) -> bool:
        """Whether it is a setting, also where no forward reads it. Tensors and floats may be results;
        private attributes may be a trainer's."""
        return not self.name.startswith("_") and all(
            value is None or isinstance(value, bool | int | str) for value in (self.began, self.left)
        )


class ModuleAttributes:
    """A state (nanlocator.step.StepState). ``restore`` raises RuntimeError if the program has set an
    attribute in the step, if each re-run changes one that is not restored, or if a module's code draws from
    an iterator. The bad pass's final values are not compared with a re-run's, because they may be results."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._began: list[Any] = []  # of each place; without results, so that only their module holds them
        # The attributes of each of the program's own modules, and its path.
        self._own: list[tuple[dict[str, Any], str]] = []
        self._numbers: list[int] = []  # of attributes of each
        self._generators: list[Any] = []
        self._generators_began: list[Any] = []
        self._generators_left: list[Any] = []  # by the bad pass
        self._kept: list[_Kept] = []
        self._restored = 0  # times in this step
        self._seen: dict[tuple[int, str, str], Any] = {}
        self._moved: list[str] = []
        self._named = NamedValues((), _is_of_a_library)
        self.compares_names = False  # the loop around the calls is not executed again
        self.follow()

    def follow(self) -> None:
        """Follows the current attributes, and those that the next step adds."""
        self._looks_left = 2

    def save(self) -> None:
        if self._looks_left > 0:
            self._looks_left -= 1
            self._look()
        self._named.save()
        self._numbers = [len(held) for held, _ in self._own]
        self._generators_began = [_state_of(each) for each in self._generators]
        now = (held.get(name, _ABSENT) for held, name, _ in self._places)
        self._began = [
            value if type(value) is not torch.Tensor or _is_kept_state(value) else _ABSENT for value in now
        ]
        self._restored = 0
        self._seen, self._moved = {}, []

    def restore(self) -> None:
        self._restored += 1
        if self._restored == 1:
            self._kept = [*self._moved_places(), *self._made_places()]
            for kept in self._kept:
                kept.left = kept.now
            self._generators_left = [_state_of(each) for each in self._generators]
            self._moved = [f"'{name}' is an iterator" for name in self._iterators()]
            self._named.begin_rerun()
            if self.compares_names and self._reads_gradients():
                self._moved.append("a module's forward reads '.grad'")
        elif self._restored == 2:
            self._moved += [f"'{name}' was changed during the step" for name in self._named.changed()]
            loaded = self._loaded()
            self._moved += [
                f"{_shown(kept.path, kept.name)} was set during the step, but is not in its re-run"
                for kept in self._kept
                if kept.was_set_by_program and (kept.is_mode or kept.name in loaded)
            ]
        for kept in self._kept:
            kept.put(kept.began)
        _set_states(self._generators, self._generators_began)
        before, self._seen = self._seen, self._contents()
        if self._restored > 2:
            self._moved += [
                f"{_shown(*place[1:])} changes with each pass"
                for place, content in self._seen.items()
                if content != before.get(place, content)
            ]
        if self._moved:
            raise RuntimeError(", ".join(list(dict.fromkeys(self._moved))[:_MOST_NAMED]))

    def leave(self) -> None:
        """After the last re-run: restores the values that the program had set in the step."""
        if self._restored == 0:
            return
        self._restored = 0
        _set_states(self._generators, self._generators_left)
        for kept in self._kept:
            if kept.was_set_by_program:
                kept.put(kept.left)
        self._kept = []

    def _look(self) -> None:
        """Finds the attributes. Of libraries' modules only the tensors: their other attributes may not be
        safe to restore."""
        self._places, self._own = [], []
        generators: dict[int, Any] = {}
        for model in self._models:
            for path, module in model.named_modules():
                held, is_own = vars(module), not _is_of_library(module)
                may_keep = _is_kept if is_own else _is_kept_state
                self._places += [
                    (held, name, path)
                    for name, value in held.items()
                    if name not in _OF_TORCH and may_keep(value)
                ]
                if is_own:
                    self._own.append((held, path))
                    generators |= {id(each): each for each in held.values() if _is_generator(each)}
        self._generators = list(generators.values())
        functions = self._own_functions() if self.compares_names else []
        self._named = NamedValues(functions, _is_of_a_library)

    def _moved_places(self) -> Iterator[_Kept]:
        for place, began in zip(self._places, self._began, strict=True):
            if _is_kept(began):
                yield _Kept(*place, began)

    def _made_places(self) -> Iterator[_Kept]:
        """Attributes that the step has added: dictionaries keep them last."""
        for (held, path), number in zip(self._own, self._numbers, strict=True):
            for name in list(held)[number:]:
                if name not in _OF_TORCH and _is_kept(held[name]):
                    yield _Kept(held, name, path, _ABSENT)

    def _contents(self) -> dict[tuple[int, str, str], Any]:
        """Contents by the model's number, path and name; -1 and no path for what only code names."""
        contents = {
            (number, path, name): content
            for number, model in enumerate(self._models)
            for path, module in model.named_modules()
            for name, value in list(vars(module).items())
            if name not in _OF_TORCH and (content := _content(value)) is not None
        }

        def take(used: Used) -> None:
            value = used.value
            if isinstance(value, type):
                content = _attributes_of(value)
            elif isinstance(value, torch.Tensor | nn.Module):
                return
            else:
                content = _content(value)
            if content is not None:
                contents.setdefault((-1, "", used.name), []).append(content)

        for function in self._own_functions():
            for_each_used(function, take)
        return contents

    def own_code(self) -> list[str]:
        """Names of the program's functions that the step calls, each once."""
        return list(dict.fromkeys(_name_of(each) for each in self._own_functions()))

    def _own_modules(self) -> list[nn.Module]:
        modules = (module for model in self._models for module in model.modules())
        return [each for each in modules if not _is_of_library(each)][:_MOST_MODULES]

    def _own_functions(self) -> list[Callable[..., Any]]:
        """What the step calls of the program's own: forwards, and hooks of modules and of gradients."""
        modules = [module for model in self._models for module in model.modules()]
        hooks = [
            hook for module in modules for name in _HOOKS for hook in vars(module).get(name, {}).values()
        ]
        hooks += [hook for hook, _ in communication_hooks_of(self._models)]
        return [each.forward for each in self._own_modules()] + [
            each for each in hooks if not _is_of_libraries(each)
        ]

    def _loaded(self) -> set[str]:
        """Attributes that these functions read."""
        return {name for function in self._own_functions() for name in attributes_loaded(function)}

    def _reads_gradients(self) -> bool:
        """They are those of the step before, and a re-run begins without them."""
        return any("grad" in attributes_loaded(module.forward) for module in self._own_modules())

    def _iterators(self) -> list[str]:
        """Iterators that they draw from."""
        return [name for function in self._own_functions() for name in iterators_of(function)]


def _is_of_library(module: nn.Module) -> bool:
    """Whether all its classes are a library's: fully_shard derives a class of its own from a program's."""
    return all(_is_of_a_library(each.__module__.partition(".")[0]) for each in type(module).__mro__)


def _is_of_a_library(package: str) -> bool:
    return package in LIBRARIES or package in sys.stdlib_module_names


def _is_of_libraries(function: Callable[..., Any]) -> bool:
    return _is_of_a_library(str(getattr(function, "__module__", "")).partition(".")[0])


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _shown(path: str, name: str) -> str:
    return f"'{path}.{name}'" if path else f"'{name}'"


def _is_kept(value: Any) -> bool:
    return is_simple_value(value) or _is_kept_state(value)


def _is_kept_state(value: Any) -> bool:
    """Whether it is a small tensor, and not a view: with FullyShardedDataParallel, modules hold views of
    memory that is freed and allocated again."""
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.device.type in ("cpu", "cuda")
        and value.layout is torch.strided
        and value.nbytes == value.untyped_storage().nbytes() <= _MOST_BYTES
    )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (is_simple_value(one) and type(one) is type(other) and repr(one) == repr(other))


def _content(value: Any) -> Any:
    """A value by which two contents are compared; None if they cannot be compared."""
    if isinstance(value, bool | int | float | str):
        return repr(value)  # so that NaN equals NaN
    if isinstance(value, list | tuple | deque | set | frozenset | dict):
        elements = list(value.items() if isinstance(value, dict) else value) if len(value) <= _MOST else []
        simple = [repr(each) for each in elements if _is_simple(each)]
        return len(value), sorted(simple) if isinstance(value, set | frozenset) else simple
    if _is_kept_state(value):
        return _WrittenTo(id(value), repr(value.flatten()[:_MOST].tolist()))
    if _is_generator(value):
        state = _state_of(value)
        return state.tolist() if isinstance(state, torch.Tensor) else repr(state)
    return None if isinstance(value, nn.Module | torch.Tensor | type) else _attributes_of(value)


def _attributes_of(owner: Any) -> Any:
    """The simple attributes of an object or a class of the program; None if it has none. Objects of a library
    count their own work, as FullyShardedDataParallel does."""
    kind = owner if isinstance(owner, type) else type(owner)
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return None
    attributes = getattr(owner, "__dict__", None)
    if attributes is None or len(attributes) > _MOST:
        return None
    simple = [(name, repr(each)) for name, each in list(attributes.items()) if _is_simple(each)]
    return simple or None


def _is_generator(value: Any) -> bool:
    """Whether it draws random numbers."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state()


def _set_states(generators: list[Any], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif (bits := getattr(generator, "bit_generator", None)) is not None:
            bits.state = state
        else:
            generator.set_state(state)


@dataclass(frozen=True, eq=False)
class _WrittenTo:
    """A tensor's content. Equal to another tensor's, because a replaced tensor may be a result."""

    identity: int
    content: str

    def __eq__(self, other: object) -> bool:
        return (
            not isinstance(other, _WrittenTo)
            or self.identity != other.identity
            or self.content == other.content
        )


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _MOST and all(map(_is_simple, value))
    return is_simple_value(value)
