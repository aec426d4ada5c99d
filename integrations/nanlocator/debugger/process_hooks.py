"""The two process-wide hooks of a debugger; they do not keep it or its model alive."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class ProcessHooks:
    """Calls ``before_call`` before every module call and ``after_step`` after every optimizer's step.

    Both are bound methods and held weakly, so that the owner ends with its model, like the original, which
    hooks only the model. Module calls that torch.compile traces are ignored.
    """

    def __init__(
        self, before_call: Callable[[nn.Module, tuple[Any, ...]], None], after_step: Callable[[], None]
    ) -> None:
        self._before_call = weakref.WeakMethod(before_call)
        self._after_step = weakref.WeakMethod(after_step)
        self._before_call_handle = nn.modules.module.register_module_forward_pre_hook(self._run_before_call)
        self._after_step_handle = register_optimizer_step_post_hook(self._run_after_step)

    def remove(self) -> None:
        self._before_call_handle.remove()
        self._after_step_handle.remove()

    def _run_before_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if (before_call := self._before_call()) is not None:
            before_call(module, args)
        else:
            # torch runs a copy of the list of these hooks, but not of an optimizer's: that hook stays, and
            # does nothing.
            self._before_call_handle.remove()

    def _run_after_step(self, *_: Any) -> None:
        if (after_step := self._after_step()) is not None:
            after_step()
