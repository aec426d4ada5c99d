"""A step of transformers' ``Trainer`` that can be executed again: its microbatches, each one call of
``training_step``."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nanlocator import _C
from nanlocator.engine.driver import Named
from nanlocator.loops.loaded_batches import LoadedBatches, are_equal
from nanlocator.loops.plain import PlainAdapter, PlainPass
from nanlocator.state.batches import KeptBatch
from nanlocator.state.rerun import losses_of
from nanlocator.transformers.versions import summed_loss

if TYPE_CHECKING:
    from transformers import Trainer


class Microbatch:
    """One call of ``training_step``."""

    def __init__(
        self,
        number: int | None,
        trainer: "Trainer",
        step: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        inputs: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self.number = number  # None for a single microbatch
        self.is_last = trainer.accelerator.sync_gradients
        # DistributedDataParallel's own flag: Trainer calls no_sync by different rules than accelerate.
        self.is_reduced = getattr(model, "require_backward_grad_sync", True)
        self.model = model
        self._accelerator = trainer.accelerator
        self._step = step
        self._batch = KeptBatch(inputs)
        self._arguments, self._keywords = arguments, keywords

    def run(self) -> torch.Tensor:
        _C.set_current_microbatch(self.number, None)
        try:
            return self._step(self.model, self._batch.copy(), *self._arguments, **self._keywords)
        finally:
            _C.set_current_microbatch(None, None)

    def run_again(self) -> torch.Tensor:
        self._accelerator.gradient_state._set_sync_gradients(self.is_last)
        with contextlib.nullcontext() if self.is_reduced else self._accelerator.no_sync(self.model):
            return self.run()

    def loss_view(self, loss: torch.Tensor) -> _C.LossView:
        """With the number of labels that the Trainer has counted over all microbatches and ranks."""
        items = self._keywords.get("num_items_in_batch", next(iter(self._arguments), None))
        is_count = isinstance(items, torch.Tensor) and items.numel() == 1
        return _C.LossView(loss, self.number, None, items if is_count else None)

    def changed(self) -> list[str]:
        return self._batch.changed(self.number)

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Whether it is among the inputs, which the Trainer has moved to its device."""
        return any(are_equal(tensor, each) for each in _C.tensors_in(self._batch.item))


class TrainerPass(PlainPass):
    """The microbatches of one step."""

    def __init__(self, adapter: PlainAdapter, trainer: "Trainer", batches: LoadedBatches) -> None:
        super().__init__(adapter)
        self._trainer = trainer
        self._batches = batches
        summed = summed_loss(trainer)
        self._logged_loss = None if summed is None else summed.clone()  # before this step
        self._all: list[Microbatch] = []
        self.losses: list[torch.Tensor] = []  # of the latest execution

    def run(
        self,
        step: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        inputs: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Microbatch:
        """Runs the next microbatch for the first time."""
        is_only = self._trainer.args.gradient_accumulation_steps == 1
        number = None if is_only else len(self._all)
        microbatch = Microbatch(number, self._trainer, step, model, inputs, arguments, keywords)
        self._all.append(microbatch)
        self.losses.append(microbatch.run())
        return microbatch

    def loss_views(self) -> list[_C.LossView]:
        return [each.loss_view(loss) for each, loss in zip(self._all, self.losses, strict=True)]

    def run_again(self) -> Named:
        try:
            with self._adapter.naming_modules():
                self.losses = [microbatch.run_again() for microbatch in self._all]
        finally:
            # accelerate's optimizer steps only if this is set, also after a microbatch of the re-run has
            # raised.
            self._trainer.accelerator.gradient_state._set_sync_gradients(True)
        return losses_of(self.losses)

    def microbatches(self) -> list[tuple[int, int | None, list[str]]]:
        return [(i, None, self._batches.describe(each.has_read)) for i, each in enumerate(self._all)]

    def changed_data(self) -> list[str]:
        return [text for microbatch in self._all for text in microbatch.changed()]

    def log_latest_losses(self) -> None:
        """Replaces the first execution's losses in the log; the Trainer itself adds the last microbatch's."""
        summed = summed_loss(self._trainer)
        if summed is None or self._logged_loss is None:
            return
        summed.copy_(self._logged_loss)
        for loss in self.losses[:-1]:
            summed += loss
