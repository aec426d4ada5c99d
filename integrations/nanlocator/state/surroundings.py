"""What a loop can set around a module's call and undo before the step ends: a mode, hooks of a module, of
saved tensors or of autograd's nodes, another layer, another epsilon, another function in torch.nn.functional.
A re-run executes the call without it. If it is finite then, it was another program, and proves nothing about
a machine."""

from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanlocator import _C

_PARTS = ("_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FUNCTIONS = [vars(nn.functional)]


class Surroundings:
    """Of the calls of one module."""

    def __init__(self, module: nn.Module) -> None:
        held = [vars(each) for each in module.modules()]
        self._parts = [each[name] for each in held for name in _PARTS if isinstance(each.get(name), dict)]
        # Of others, ``state.module_attributes`` restores what their own code sets.
        self._settings = [
            vars(each) for each in module.modules() if type(each).__module__.startswith("torch.nn.modules.")
        ]

    def now(self) -> tuple[Any, ...]:
        """To be compared by ``lost``."""
        return (
            _C.digest_of_identities(self._parts),
            _C.digest_of_constants(self._settings),
            _C.digest_of_identities(_FUNCTIONS),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else (),
            _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else (),
        )


def lost(then: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    """What was set then and is not now, as clauses. Modes of now may be our own."""
    names = (
        "a hook or a layer of a module",
        "a setting of a module",
        "a function in torch.nn.functional",
        "hooks of saved tensors",
    )
    found = [name for name, before, after in zip(names, then, now, strict=False) if before != after]
    modes = {id(each) for stack in now[len(names) :] for each in stack}
    found += [
        f"a mode ({type(each).__name__})"
        for stack in then[len(names) :]
        for each in stack
        if id(each) not in modes
    ]
    return list(dict.fromkeys(found))
