"""What modules keep beside buffers and a pass moves: a counter, a temperature that falls, a list that grows.

Nobody saves it at the start of a step. But what one re-run has moved the first pass has moved, too: a fault
that is gone then may have gone with it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from nanlocator.buffers import is_kept_state
from nanlocator.closures import iterators_of

_OF_TORCH = frozenset(vars(nn.Module()))
_LIBRARIES = (
    "torch",
    "transformers",
    "megatron",
    "deepspeed",
    "accelerate",
    "lightning",
    "peft",
    "nanlocator",
)
_MOST = 64  # elements of a container that are compared, beside its length
_MOST_NAMED = 4
_MOST_MODULES = 256


class ModuleAttributes:
    """A state (nanlocator.step.StepState) that is only compared, from re-run to re-run of a step: ``restore``
    raises where one has moved it, or where a module's code draws from an iterator. What the bad pass has left
    is not compared: that may hold a result."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._restored = 0  # times in this step
        self._seen: dict[tuple[str, str], Any] = {}
        self._moved: list[str] = []

    def save(self) -> None:
        self._restored = 0
        self._seen, self._moved = {}, []

    def restore(self) -> None:
        now = {
            (path, name): content
            for model in self._models
            for path, module in model.named_modules()
            for name, value in list(vars(module).items())
            if name not in _OF_TORCH and (content := _content(value)) is not None
        }
        self._restored += 1
        if self._restored == 1:
            self._moved = [f"'{name}' is an iterator" for name in self._iterators()]
        elif self._restored > 2:
            before = self._seen
            self._moved += [_described(place) for place in now if now[place] != before.get(place, now[place])]
        self._seen = now
        if self._moved:
            raise RuntimeError(", ".join(list(dict.fromkeys(self._moved))[:_MOST_NAMED]))

    def _iterators(self) -> list[str]:
        """That the forwards of the program's own modules draw from."""
        modules = (module for model in self._models for module in model.modules())
        own = [each for each in modules if type(each).__module__.partition(".")[0] not in _LIBRARIES]
        return [name for module in own[:_MOST_MODULES] for name in iterators_of(module.forward)]


def _described(place: tuple[str, str]) -> str:
    path, name = place
    return f"'{path}.{name}' changes with each pass" if path else f"'{name}' changes with each pass"


def _content(value: Any) -> Any:
    """What two of them are compared by; None where that is not known."""
    if isinstance(value, bool | int | float | str):
        return repr(value)  # NaN is itself
    if isinstance(value, list | tuple | deque | set | frozenset | dict):
        elements = list(value.items() if isinstance(value, dict) else value) if len(value) <= _MOST else []
        simple = [repr(each) for each in elements if _is_simple(each)]
        return len(value), sorted(simple) if isinstance(value, set | frozenset) else simple
    if is_kept_state(value):
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
    return value is None or isinstance(value, bool | int | float | str)
