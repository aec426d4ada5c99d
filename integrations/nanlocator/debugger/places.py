"""The values of a call that have a row in a frame, in the frame's order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanlocator.debugger.frames import Role

_MOST_NESTED = 8  # containers in containers; also ends one that holds itself


@dataclass(slots=True, eq=False)
class Place:
    """One value that a call received or returned."""

    role: Role
    context: str  # "input[0]", "output[1][0]", "input[attention_mask]"
    value: Any  # None after its release
    is_extra: bool = False  # the original has no row for it: keyword arguments, nested values


def input_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Place]:
    for i, value in enumerate(args):
        yield from _places(Role.INPUT, f"input[{i}]", value)
    for name, value in kwargs.items():
        yield from _nested_places(Role.INPUT, f"input[{name}]", value, 0)


def output_places(output: Any) -> Iterator[Place]:
    """The original descends two tuples deep."""
    if not isinstance(output, tuple):
        yield from _places(Role.OUTPUT, "output", output)
        return
    for i, value in enumerate(output):
        if isinstance(value, tuple):
            for j, item in enumerate(value):
                yield from _places(Role.OUTPUT, f"output[{i}][{j}]", item)
        else:
            yield from _places(Role.OUTPUT, f"output[{i}]", value)


def _places(role: Role, context: str, value: Any) -> Iterator[Place]:
    """The place for which the original has a row, and the nested ones that it ignores."""
    yield Place(role, context, value)
    if not isinstance(value, torch.Tensor):
        yield from _nested_places(role, context, value, 0)


def _nested_places(role: Role, context: str, value: Any, depth: int) -> Iterator[Place]:
    """The tensors in ``value``; items as ``[key]``, fields as ``.name``."""
    if isinstance(value, torch.Tensor):
        yield Place(role, context, value, is_extra=True)
        return
    if value is None or depth >= _MOST_NESTED:
        return
    fields = getattr(type(value), "__dataclass_fields__", None)
    if isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{context}.{key}" if fields else f"{context}[{key}]"
            yield from _nested_places(role, where, item, depth + 1)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _nested_places(role, f"{context}[{i}]", item, depth + 1)
    elif fields:
        for name in fields:
            yield from _nested_places(role, f"{context}.{name}", getattr(value, name, None), depth + 1)
