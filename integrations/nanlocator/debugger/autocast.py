"""``no_autocast``: runs in fp32 a module that overflows in half precision.

It applies the documented remedy (transformers' guide to debugging: ``forward`` inside
``autocast(enabled=False)``, with its input converted) without editing the model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_HALF = (torch.float16, torch.bfloat16)


def no_autocast(module: nn.Module) -> "NoAutocast":
    """From now on ``module.forward`` runs in fp32, without autocast, and with fp16 and bf16 tensors among its
    arguments, parameters and buffers converted.

        nanlocator.transformers.no_autocast(model.get_submodule("encoder.block.2.layer.1.DenseReluDense"))

    Under autocast the output stays fp32: later operators convert it if needed, and a value beyond fp16's
    range survives up to the next normalisation. Without autocast, in a model whose weights are fp16 or bf16,
    the output is converted back to the dtype of the arguments, and such a value becomes Inf again: choose a
    larger module, up to the one that makes the values small.

    Parameters stay the optimizer's objects, in their dtype; those in half precision are used through a
    converted copy, and their gradients arrive in their own dtype. Checkpointing around the module works;
    inside of it only if no parameter is in half precision.

    Args:
        module: any module. Calls of ``module(...)`` and of ``module.forward(...)``, from any autocast.

    Returns:
        A handle that undoes it: ``remove()``, or the end of a ``with``. A second call for a module
        returns the same handle.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"no_autocast takes a module, for instance model.get_submodule('lm_head'), not a "
            f"{type(module).__name__}"
        )
    return _handle_of(module) or NoAutocast(module)


class NoAutocast:
    """Returned by ``no_autocast``. Copies and pickles of the module have their own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._had_own = "forward" in vars(module)
        self._original: Callable[..., Any] = module.forward
        self._is_on = True
        # Not a bound method, because accelerate would bind its function to the module. Keeps the signature,
        # because Trainer removes columns that are not in it.
        forward = functools.update_wrapper(functools.partial(NoAutocast._forward, self), self._original)
        module.forward = forward

    def remove(self) -> None:
        """The module runs as before. May be called twice. If other code has wrapped ``forward`` since, this
        wrapper stays inside and passes calls on."""
        if self._is_on and _handle_of(self._module) is self:
            if self._had_own:
                self._module.forward = self._original
            else:
                del self._module.forward
        self._is_on = False

    def __enter__(self) -> "NoAutocast":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_on:
            return self._original(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        owned = [*self._module.parameters(), *self._module.buffers()]
        devices = {tensor.device.type for tensor in (*given, *owned)}
        devices = {device for device in devices if torch.amp.is_autocast_available(device)}
        is_autocasting = any(torch.is_autocast_enabled(device) for device in devices)
        dtype = next((tensor.dtype for tensor in (*given, *owned) if tensor.dtype in _HALF), None)
        args, kwargs = pytree.tree_map(_in_fp32, (args, kwargs))
        with contextlib.ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(_weights_in_fp32(self._module))
            output = self._original(*args, **kwargs)
        if is_autocasting or dtype is None:
            return output
        return pytree.tree_map(lambda leaf: _converted(leaf, (torch.float32,), dtype), output)


def _handle_of(module: nn.Module) -> NoAutocast | None:
    """The handle of a module whose ``forward`` is ours."""
    forward = vars(module).get("forward")
    if isinstance(forward, functools.partial) and forward.func is NoAutocast._forward:
        return forward.args[0]
    return None


def _in_fp32(leaf: Any) -> Any:
    return _converted(leaf, _HALF, torch.float32)


def _converted(leaf: Any, of: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    return leaf.to(to) if isinstance(leaf, torch.Tensor) and leaf.dtype in of else leaf


@contextlib.contextmanager
def _weights_in_fp32(module: nn.Module) -> Iterator[None]:
    """Replaces parameters and buffers in half precision by converted copies; autograd leads from a copy to
    its parameter. Values that forward writes to a buffer are kept."""
    converted: dict[torch.Tensor, torch.Tensor] = {}  # tied tensors stay tied
    places: list[tuple[nn.Module, dict[str, Any], str, torch.Tensor]] = [
        (owner, table, name, tensor)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers)
        for name, tensor in table.items()
        if tensor is not None and tensor.dtype in _HALF
    ]
    for _, table, name, tensor in places:
        if tensor not in converted:
            converted[tensor] = tensor.float()
        table[name] = converted[tensor]
    versions = {tensor: copy._version for tensor, copy in converted.items()}
    try:
        yield
    finally:
        for owner, table, name, tensor in places:
            current, table[name] = table[name], tensor
            # batch_norm's writes to its statistics do not count in _version.
            may_be_statistics = owner.training and table is owner._buffers
            if may_be_statistics or current._version != versions[tensor]:
                with torch.no_grad():
                    tensor.copy_(current)
