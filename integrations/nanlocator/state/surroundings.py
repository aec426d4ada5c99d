"""What a loop can set around a module's call and undo before the step ends: a mode, hooks of a module, of
saved tensors or of autograd's nodes, another layer, another epsilon, another function in torch.nn.functional.
A re-run executes the call without it. If it is finite then, it was another program, and proves nothing about
a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanlocator import _C

_PARTS = ("_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TORCH = "torch.nn.modules."
_FUNCTIONS = _C.HeldObjects([nn.functional], ())


class Surroundings:
    """Of the calls of one module."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._parts = _C.HeldObjects(modules, _PARTS)
        # Of others, ``state.module_attributes`` restores what their own code sets.
        self._settings = _C.HeldConstants(
            [each for each in modules if type(each).__module__.startswith(_OF_TORCH)]
        )

    def now(self) -> Surrounded:
        return Surrounded(
            self._parts.now(),
            _FUNCTIONS.now(),
            self._settings.now(),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else (),
            _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else (),
        )


class Surrounded(NamedTuple):
    """What surrounds a call."""

    parts: _C.Identities
    functions: _C.Identities
    settings: int
    packing: Any
    function_modes: Sequence[Any]
    dispatch_modes: Sequence[Any]

    def lost(self, now: Surrounded) -> list[str]:
        """What was set here and is not now, as clauses. What is set now may be our own, or a first call's."""
        modes = {id(each) for each in (*now.function_modes, *now.dispatch_modes)}
        gone = [each for each in (*self.function_modes, *self.dispatch_modes) if id(each) not in modes]
        found = [
            (not self.parts.are_in(now.parts), "a hook or a layer of a module"),
            (not self.functions.are_in(now.functions), "a function in torch.nn.functional"),
            (self.settings != now.settings, "a setting of a module"),
            (self.packing != now.packing, "hooks of saved tensors"),
            *((True, f"a mode ({type(each).__name__})") for each in gone),
        ]
        return list(dict.fromkeys(clause for is_lost, clause in found if is_lost))
