"""What modules keep beside buffers and a pass moves: a counter, a temperature that falls, a flag, a cache
that is None before the first pass, a list that grows.

Numbers, texts, None and tensors are put back before a re-run; what is written into a tensor stays. Nobody
saves the others at the start of a step; but what one re-run has moved the first pass has moved, too: a fault
that is gone then may have gone with it."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanlocator.state.closures import iterators_of

_OF_TORCH = frozenset(vars(nn.Module()))
_LIBRARIES = (
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
_MOST = 64  # elements of a container that are compared, beside its length
_MOST_NAMED = 4
_MOST_BYTES = 1 << 24  # of a tensor that is kept while a step runs: larger ones are results
_MOST_MODULES = 256

_ABSENT = object()  # a module has no attribute of this name


@dataclass
class _Kept:
    """An attribute of a module, and what it was when the step began."""

    held: dict[str, Any]
    name: str
    path: str
    began: Any
    left: Any = _ABSENT  # by the bad pass

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
        """After a re-run: by a statement of the loop, or on a way that only the bad pass took."""
        return _is_same(self.now, self.began) and not _is_same(self.left, self.began)

    @property
    def is_mode(self) -> bool:
        """Tensors and fractions are results, and trainers keep private ones on the program's modules."""
        return not self.name.startswith("_") and all(
            value is None or isinstance(value, bool | int | str) for value in (self.began, self.left)
        )


class ModuleAttributes:
    """A state (nanlocator.step.StepState). ``restore`` raises where the program has set an attribute in the
    step, where one that is not put back is moved by each re-run, or where a module's code draws from an
    iterator. What the bad pass has left is not compared with what a re-run leaves: that may be a result."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._began: list[Any] = []  # of each place; a result is held by nobody but its module
        # The attributes of each module of the program, and its path.
        self._own: list[tuple[dict[str, Any], str]] = []
        self._numbers: list[int] = []  # of attributes in each of them
        self._kept: list[_Kept] = []
        self._restored = 0  # times in this step
        self._seen: dict[tuple[int, str, str], Any] = {}
        self._moved: list[str] = []
        self.follow()

    def follow(self) -> None:
        """Attributes that there are now, and those that the next step makes."""
        self._looks_left = 2

    def save(self) -> None:
        if self._looks_left > 0:
            self._looks_left -= 1
            self._look()
        self._numbers = [len(held) for held, _ in self._own]
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
            self._moved = [f"'{name}' is an iterator" for name in self._iterators()]
        elif self._restored == 2:
            self._moved += [
                f"{_shown(kept.path, kept.name)} was set in the step, and is not in its re-run"
                for kept in self._kept
                if kept.is_mode and kept.was_set_by_program
            ]
        for kept in self._kept:
            kept.put(kept.began)
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
        """After the last re-run: what the program had set in the step is again as it had set it."""
        if self._restored == 0:
            return
        self._restored = 0
        for kept in self._kept:
            if kept.was_set_by_program:
                kept.put(kept.left)
        self._kept = []

    def _look(self) -> None:
        """Libraries keep more to themselves than what may be put back: of their modules the tensors alone."""
        self._places, self._own = [], []
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

    def _moved_places(self) -> Iterator[_Kept]:
        for place, began in zip(self._places, self._began, strict=True):
            if _is_kept(began):
                yield _Kept(*place, began)

    def _made_places(self) -> Iterator[_Kept]:
        """New ones are last."""
        for (held, path), number in zip(self._own, self._numbers, strict=True):
            for name in list(held)[number:]:
                if name not in _OF_TORCH and _is_kept(held[name]):
                    yield _Kept(held, name, path, _ABSENT)

    def _contents(self) -> dict[tuple[int, str, str], Any]:
        """By number of the model, path and name."""
        return {
            (number, path, name): content
            for number, model in enumerate(self._models)
            for path, module in model.named_modules()
            for name, value in list(vars(module).items())
            if name not in _OF_TORCH and (content := _content(value)) is not None
        }

    def _iterators(self) -> list[str]:
        """That the forwards of the program's own modules draw from."""
        modules = (module for model in self._models for module in model.modules())
        own = [each for each in modules if not _is_of_library(each)]
        return [name for module in own[:_MOST_MODULES] for name in iterators_of(module.forward)]


def _is_of_library(module: nn.Module) -> bool:
    """Each of its classes: fully_shard makes one of its own of a program's."""
    packages = (each.__module__.partition(".")[0] for each in type(module).__mro__)
    return all(package in _LIBRARIES or package in sys.stdlib_module_names for package in packages)


def _shown(path: str, name: str) -> str:
    return f"'{path}.{name}'" if path else f"'{name}'"


def _is_kept(value: Any) -> bool:
    return _is_simple_value(value) or _is_kept_state(value)


def _is_kept_state(value: Any) -> bool:
    """Not a view: FullyShardedDataParallel lets modules hold views of memory that comes and goes."""
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.device.type in ("cpu", "cuda")
        and value.layout is torch.strided
        and value.nbytes == value.untyped_storage().nbytes() <= _MOST_BYTES
    )


def _is_simple_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (_is_simple_value(one) and type(one) is type(other) and repr(one) == repr(other))


def _content(value: Any) -> Any:
    """What two of them are compared by; None where that is not known."""
    if isinstance(value, bool | int | float | str):
        return repr(value)  # NaN is itself
    if isinstance(value, list | tuple | deque | set | frozenset | dict):
        elements = list(value.items() if isinstance(value, dict) else value) if len(value) <= _MOST else []
        simple = [repr(each) for each in elements if _is_simple(each)]
        return len(value), sorted(simple) if isinstance(value, set | frozenset) else simple
    if _is_kept_state(value):
        return _WrittenTo(id(value), repr(value.flatten()[:_MOST].tolist()))
    return None


@dataclass(frozen=True, eq=False)
class _WrittenTo:
    """A tensor whose place has another one afterwards may be a result."""

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
    return _is_simple_value(value)
