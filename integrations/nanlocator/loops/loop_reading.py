"""LoopReading: state of a training loop that outlives a driven step.

``watch`` has no signal for the end of a step: the first optimizer that uses gradients ends it, and more may
follow; ``zero_grad`` may come before a forward, after it, or never.
"""

from collections.abc import Callable

import torch

from nanlocator import _C


class LoopReading:
    """Methods are called in the loop's order.

    Attributes:
        decision: on the present gradients, which outlive the step that the first optimizer has ended.
        zeroed: ids of parameters whose gradients exist, and were zeroed after the last scan of gradients.
    """

    def __init__(self) -> None:
        self.zeroed: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """After an exception has ended the step."""
        self.decision = _C.Decision.PROCEED
        self._is_left = False  # gradients were zeroed before the backward of the values computed so far
        self._left_losses: list[torch.Tensor] = []
        self._are_zeroed = False

    def begin_forward(
        self,
        read: list[torch.Tensor],
        bad_among: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> None:
        """``read``: values that wait for a backward, which the program has read since the last forward."""
        if read and not self._left_losses:
            self._left_losses, self._are_zeroed = bad_among(read), self._is_left

    def begin_computation(self) -> None:
        """A forward or a backward of any step."""
        self._is_left = False

    def take_left_losses(self) -> tuple[list[torch.Tensor], bool]:
        """At the start of a backward: returns the bad values before it that had none, and whether gradients
        were zeroed since."""
        left, self._left_losses = self._left_losses, []
        return left, self._are_zeroed

    def write_gradients(self) -> None:
        self.decision = _C.Decision.PROCEED

    def scan_gradients(self) -> None:
        """The gradients scanned are those with new contributions."""
        self.zeroed.clear()

    def zero_gradients(self, parameters: list[torch.Tensor], *, had_backward: bool) -> None:
        """After zeroing; ``had_backward``: the current step already had one."""
        self._is_left = not had_backward
        left, _ = _C.gradients_of(parameters)
        self.zeroed |= {id(parameters[number]) for number in left}
