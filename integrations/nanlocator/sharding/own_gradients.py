"""The common part of ``ddp``, ``fsdp2`` and ``fsdp1``, which show each rank's own gradients before a
framework reduces them over its ranks, and the weights that it gathers."""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup

from nanlocator.calls.modules import common_module
from nanlocator.exchange.boundaries import Boundaries


class OwnGradients(Protocol):
    def begin_step(self) -> None:
        """Called when the gradients are zero or None."""

    def remove(self) -> None: ...


class _HasParameters(Protocol):
    parameters: list[tuple[str, torch.Tensor]]


class ScanningDriver(Protocol):
    """The part of a Driver (nanlocator.engine.driver) used here; its room is above this one."""

    @property
    def adapter(self) -> _HasParameters: ...

    @property
    def boundaries(self) -> Boundaries | None: ...

    @property
    def is_in_pass(self) -> bool: ...

    def scan(
        self, phase: str, group: int, role: str, parameters: list[int], tensors: list[torch.Tensor]
    ) -> None: ...


class LocalScans:
    """Scans of phase ``grad_local``.

    Args:
        driver: scans, in a pass; not kept alive. Without a pass, the reduced gradients may be clipped before
            they are scanned, and the reduction would be blamed for what the clip did.
        on_uncovered: called once with each description of unseen gradients.
    """

    def __init__(self, driver: ScanningDriver, on_uncovered: Callable[[str], None]) -> None:
        self._driver = weakref.ref(driver)
        self._on_uncovered = on_uncovered
        self._uncovered: set[str] = set()

    def say_uncovered(self, uncovered: str) -> None:
        if uncovered not in self._uncovered:
            self._uncovered.add(uncovered)
            self._on_uncovered(uncovered)

    def are_on(self, framework: str) -> bool:
        """Whether there is a pass. If not, reports that ``framework`` reduces gradients unseen."""
        driver = self._driver()
        if driver is not None and driver.is_in_pass:
            return True
        self.say_uncovered(
            f"gradients before {framework} reduces them, because step() is called without a closure"
        )
        return False

    def scan(self, group: int, gradients: list[tuple[int, torch.Tensor]]) -> None:
        """``gradients``: (id of the parameter, its gradient on this rank)."""
        driver = self._driver()
        if driver is not None and driver.is_in_pass and gradients:
            driver.scan("grad_local", group, "grad", [n for n, _ in gradients], [g for _, g in gradients])

    def exchanging(
        self, ids: Iterable[int], *, reduces_gradients: bool
    ) -> contextlib.AbstractContextManager[None]:
        """A context around the collectives that gather these parameters or reduce their gradients. ``ids`` is
        read only if boundaries are watched."""
        driver = self._driver()
        if driver is None or driver.boundaries is None:
            return contextlib.nullcontext()
        names = [driver.adapter.parameters[i][0] for i in ids]
        return driver.boundaries.transferring(common_module(names), reduces_gradients=reduces_gradients)

    def exchange_unseen(self, group: ProcessGroup) -> None:
        """Reports that the members of ``group`` exchange tensors that boundaries do not see."""
        driver = self._driver()
        if driver is not None and driver.boundaries is not None:
            driver.boundaries.has_unseen(group)
