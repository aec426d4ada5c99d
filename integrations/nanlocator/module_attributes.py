"""What modules keep beside tensors and a pass moves: a counter, a temperature that falls, a list that grows.

Nobody saves it at the start of a step. But what one re-run has moved the first pass has moved, too: a fault
that is gone then may have gone with it."""

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

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


class ModuleAttributes:
    """A state (nanlocator.step.StepState) that is only compared: ``restore`` raises where it has moved since
    it was called before in the same step, or where a module's code draws from an iterator."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._seen: dict[tuple[str, str], Any] | None = None
        self._moved: list[str] = []

    def save(self) -> None:
        self._seen, self._moved = None, []

    def restore(self) -> None:
        now = {
            (path, name): content
            for model in self._models
            for path, module in model.named_modules()
            for name, value in list(vars(module).items())
            if name not in _OF_TORCH and (content := _content(value)) is not None
        }
        if self._seen is None:
            self._moved = [f"'{name}' is an iterator" for name in self._iterators()]
        else:
            self._moved += [
                _described(place) for place in now if now[place] != self._seen.get(place, now[place])
            ]
        self._seen = now
        if self._moved:
            raise RuntimeError(", ".join(list(dict.fromkeys(self._moved))[:_MOST_NAMED]))

    def _iterators(self) -> list[str]:
        """That the forwards of the program's own modules draw from."""
        kinds = {type(module) for model in self._models for module in model.modules()}
        return [
            name
            for kind in kinds
            if kind.__module__.partition(".")[0] not in _LIBRARIES
            for name in _iterators_of_forward(kind)
        ]


def _described(place: tuple[str, str]) -> str:
    path, name = place
    return f"'{path}.{name}' changes with each pass" if path else f"'{name}' changes with each pass"


@functools.cache
def _iterators_of_forward(kind: type) -> list[str]:
    return iterators_of(kind.forward)


def _content(value: Any) -> Any:
    """What two of them are compared by; None where that is not known."""
    if isinstance(value, bool | int | float | str):
        return repr(value)  # NaN is itself
    if isinstance(value, list | tuple | deque | set | frozenset | dict):
        elements = list(value.items() if isinstance(value, dict) else value) if len(value) <= _MOST else []
        simple = [repr(each) for each in elements if _is_simple(each)]
        return len(value), sorted(simple) if isinstance(value, set | frozenset) else simple
    return None


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _MOST and all(map(_is_simple, value))
    return value is None or isinstance(value, bool | int | float | str)
