"""LoopReading: what the calls of a training loop say that belong to no step that could be driven.

``watch`` is not told where a step ends: the first optimizer that uses gradients ends it, and more may follow;
``zero_grad`` may come before a forward, after it, or never.
"""

from collections.abc import Callable, Iterable

import torch

from nanlocator import _C


class LoopReading:
    """Methods are called in the loop's order.

    Attributes:
        decision: on the gradients that are there, which outlive the step that the first optimizer has ended.
        zeroed: parameters whose gradients are there, and have been zeroed since gradients were scanned.
    """

    def __init__(self) -> None:
        self.zeroed: set[torch.Tensor] = set()
        self.forget()

    def forget(self) -> None:
        """An exception has ended the step."""
        self.decision = _C.Decision.PROCEED
        self._is_left = False  # gradients were zeroed, and what was computed before waits for a backward
        self._left_losses: list[torch.Tensor] = []

    def begin_forward(
        self,
        read: list[torch.Tensor],
        bad_among: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> None:
        """``read``: values that the program has read since the forward before. Where it has zeroed its
        gradients after them, it has left their step."""
        if read and self._is_left and not self._left_losses:
            self._left_losses = bad_among(read)

    def begin_computation(self) -> None:
        """A forward or a backward, of whatever step this is."""
        self._is_left = False

    def take_left_losses(self) -> list[torch.Tensor]:
        """A backward begins: the bad losses of a step that was left before it."""
        left, self._left_losses = self._left_losses, []
        return left

    def write_gradients(self) -> None:
        self.decision = _C.Decision.PROCEED

    def scan_gradients(self) -> None:
        """Those that something was added to."""
        self.zeroed.clear()

    def zero_gradients(self, parameters: Iterable[torch.Tensor], *, had_backward: bool) -> None:
        """They were zeroed just now; ``had_backward``: in a step that is not over."""
        self._is_left = not had_backward
        self.zeroed |= {p for p in parameters if p.grad is not None}
