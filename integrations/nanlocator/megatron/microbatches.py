"""The microbatch and model chunk that Megatron's schedule is working on, and the losses that it computes.

Source, Megatron-Core 0.16.1, pipeline_parallel/schedules.py: every schedule calls the module's globals
``forward_step`` (with ``current_microbatch``) and ``backward_step`` (with the output that the former
returned). ``TransformerLayer.current_microbatch`` is not used: in a recomputation it holds a later
microbatch.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from nanlocator import _C
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches

Tensors = list[torch.Tensor]


class Listener(Protocol):
    """Called at each forward and backward step of this rank; both numbers count from 0."""

    def begin_forward(self, microbatch: int | None, chunk: int, inputs: Tensors) -> None: ...

    def end_forward(self, microbatch: int | None, chunk: int, outputs: Tensors) -> None: ...

    def begin_backward(self, microbatch: int | None, chunk: int, output_grads: Tensors) -> None: ...

    def end_backward(self, microbatch: int | None, chunk: int, input_grads: Tensors) -> None: ...


class Microbatches:
    """Follows the schedule between ``begin_pass`` and ``end_pass``.

    ``losses`` has one entry per microbatch on the last stage: the loss function's result, which the schedule
    scales in place.
    """

    def __init__(self, chunks: list[torch.nn.Module], patches: Patches) -> None:
        self.losses: list[_C.LossView] = []
        self.named_losses: list[tuple[str, torch.Tensor]] = []
        self.listeners: list[Listener] = []
        self._chunk_of = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._is_in_pass = False
        self._waiting: dict[int, tuple[int | None, int]] = {}  # forward done, backward not, by id(output)
        patches.wrap(points.FORWARD_STEP, self._around_forward_step)
        patches.wrap(points.BACKWARD_STEP, self._around_backward_step)

    def begin_pass(self) -> None:
        self.losses, self.named_losses = [], []
        self._waiting.clear()
        self._is_in_pass = True

    def end_pass(self) -> None:
        self._waiting.clear()
        self._is_in_pass = False
        _C.set_current_microbatch(None, None)

    def _around_forward_step(
        self,
        original: Callable[..., Any],
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        input_tensor: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        chunk = self._chunk_of.get(id(model))
        if not self._is_in_pass or chunk is None:
            return original(
                forward_step_func, data_iterator, model, num_microbatches, input_tensor, *args, **kwargs
            )
        microbatch = kwargs.get("current_microbatch")
        for listener in self.listeners:
            listener.begin_forward(microbatch, chunk, _tensors(input_tensor))
        _C.set_current_microbatch(microbatch, chunk)
        observed = self._observed_forward(forward_step_func, microbatch, chunk)
        output, *rest = original(
            observed, data_iterator, model, num_microbatches, input_tensor, *args, **kwargs
        )
        _C.set_current_microbatch(None, None)
        outputs = _tensors(output)
        if outputs:
            self._waiting[id(outputs[0])] = microbatch, chunk
        for listener in self.listeners:
            listener.end_forward(microbatch, chunk, outputs)
        return (output, *rest)

    def _around_backward_step(
        self,
        original: Callable[..., Any],
        input_tensor: Any,
        output_tensor: Any,
        output_tensor_grad: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outputs = _tensors(output_tensor)
        place = self._waiting.pop(id(outputs[0]), None) if self._is_in_pass and outputs else None
        if place is None:
            return original(input_tensor, output_tensor, output_tensor_grad, *args, **kwargs)
        for listener in self.listeners:
            listener.begin_backward(*place, _tensors(output_tensor_grad))
        _C.set_current_microbatch(*place)
        input_grad = original(input_tensor, output_tensor, output_tensor_grad, *args, **kwargs)
        _C.set_current_microbatch(None, None)
        for listener in self.listeners:
            listener.end_backward(*place, _tensors(input_grad))
        return input_grad

    def _observed_forward(
        self, forward_step_func: Callable[..., Any], microbatch: int | None, chunk: int
    ) -> Callable[..., Any]:
        @functools.wraps(forward_step_func)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            result = forward_step_func(*args, **kwargs)
            if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
                return result
            return result[0], self._observed_loss(result[1], microbatch, chunk)

        return forward_step

    def _observed_loss(
        self, loss_func: Callable[..., Any], microbatch: int | None, chunk: int
    ) -> Callable[..., Any]:
        """``loss_func`` returns (loss, report) or (sum of losses, number of tokens, report)."""

        @functools.wraps(loss_func)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = loss_func(*args, **kwargs)
            if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], torch.Tensor):
                loss = result[0].detach()
                tokens = result[1] if len(result) == 3 and isinstance(result[1], torch.Tensor) else None
                self.losses.append(_C.LossView(loss, microbatch, chunk, tokens))
                self.named_losses.append((f"loss[{len(self.losses) - 1}]", loss))
            return result

        return observed


def _tensors(value: Any) -> Tensors:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for tensor in value if isinstance(tensor, torch.Tensor)]
    return []
