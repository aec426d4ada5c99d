"""Refuses models and optimizers that a DeepSpeed engine trains or is about to train: the engine owns their
gradients, and nothing would be found.

Does not import DeepSpeed, which most programs do not have.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator_after_import import AfterImport

_WHAT_TO_DO = (
    "call nanlocator.deepspeed.install(engine) after deepspeed.initialize, and pass DeepSpeed the plain "
    "optimizer"
)
_followed: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers


def keep_from_deepspeed(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """DeepSpeed would step a followed optimizer on DeepSpeed's own partitions, and nothing would be found.
    From now on giving it to DeepSpeed raises UsageError; the returned function ends that."""
    _followed.add(optimizer)
    _check_optimizers()
    return functools.partial(_give_up, weakref.ref(optimizer))


def _give_up(followed: "weakref.ref[torch.optim.Optimizer]") -> None:
    if (optimizer := followed()) is not None:
        _followed.discard(optimizer)


@functools.cache
def _check_optimizers() -> None:
    AfterImport({"deepspeed.runtime.engine": _wrap_check})


def _wrap_check(module: ModuleType) -> None:
    def check(original: Callable[..., Any], engine: Any, basic_optimizer: Any) -> Any:
        """Checks every optimizer that DeepSpeed is about to wrap."""
        if basic_optimizer in _followed:
            raise _C.UsageError(
                "deepspeed.initialize was given an optimizer that nanlocator already watches "
                f"({type(basic_optimizer).__name__}): DeepSpeed steps it with its own partitions, so nothing "
                f"would be found; {_WHAT_TO_DO}"
            )
        return original(engine, basic_optimizer)

    Patches(__name__).wrap(points.SANITY_CHECK, check, of=module.DeepSpeedEngine)


def refuse_owned(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> None:
    """Raises UsageError for models and optimizers that a DeepSpeed engine trains: it keeps their gradients
    itself."""
    engine_module = sys.modules.get("deepspeed.runtime.engine")
    if engine_module is None:
        return
    others = [each for each in optimizers if not isinstance(each, torch.optim.Optimizer)]
    if any(type(each).__module__.startswith("deepspeed.") for each in others):
        raise _C.UsageError(f"this optimizer belongs to DeepSpeed: {_WHAT_TO_DO}")
    parameters = {p for model in models for p in model.parameters()}
    for each in gc.get_objects():
        if not issubclass(type(each), engine_module.DeepSpeedEngine) or "optimizer" not in vars(each):
            continue
        if each.optimizer is not None and not parameters.isdisjoint(each.parameters()):
            raise _C.UsageError(f"DeepSpeed trains this model: {_WHAT_TO_DO}")
