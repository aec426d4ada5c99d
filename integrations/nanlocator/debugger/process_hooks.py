"""The two hooks that a debugger needs on the process as a whole; they do not keep it, or its model, alive."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class ProcessHooks:
    """Calls ``before_call`` before every module call and ``after_step`` after every optimizer's step.

    Both are bound methods and are held weakly: the owner ends with its model, as the original does, whose
    hooks are on the model alone. Module calls that torch.compile traces are passed over.
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
            # Of these hooks torch runs a copy of the list; of an optimizer's it does not: that one idles on.
            self._before_call_handle.remove()

    def _run_after_step(self, *_: Any) -> None:
        if (after_step := self._after_step()) is not None:
            after_step()
