"""The places of parameters, gradients, masters and optimizer states in DeepSpeed: one class for each of its
optimizers; zero.py has ZeRO's.

Source, DeepSpeed 0.19.8: runtime/engine.py and runtime/fp16/unfused_optimizer.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16 import unfused_optimizer

from nanlocator.engine.driver import state_tensors

Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank's optimizer updates: its elements [begin, begin + count) are
    elements [at, at + count) of the group's flat partition."""

    id: int
    group: int
    begin: int
    at: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.detach().view(-1).narrow(0, self.at, self.count)


Part = tuple[int, torch.Tensor]  # parameter id; the whole parameter, or this rank's shard


class Layout:
    """Attributes:
    parameters: trainable ones, in the order of DeepSpeed's groups: position = id.
    reducer: the object whose `reduction` reduces gradients.
    norms: functions that compute the norm of a group's or of all gradients: (owner, name).
    """

    reduction = ""
    gathers_weights = False  # whether weights are sharded, too

    def __init__(self, engine: Any, groups: list[list[Parameter]]) -> None:
        self.engine, self.optimizer, self.reducer = engine, engine.optimizer, engine.optimizer
        self.parameters = list(dict.fromkeys(p for group in groups for p in group))
        self.ids = {p: i for i, p in enumerate(self.parameters)}
        self.pieces: list[Piece] = []
        self.norms: list[tuple[Any, str]] = []

    def shards(self) -> dict[int, tuple[int, int]]:
        """By id, for parameters with partitioned optimizer states; the rank has no element of other ids."""
        return {piece.id: (piece.begin, piece.begin + piece.count) for piece in self.pieces}

    def is_partitioned(self) -> bool:
        return True

    def named_by_id(self) -> list[Part]:
        """All tensors that hold a parameter."""
        return list(enumerate(self.parameters))

    def about_to_be_reduced(self, *args: Any) -> list[Part]:
        """This rank's gradients, when `reduction` is called with these arguments."""
        raise NotImplementedError

    def reduced(self) -> list[Part]:
        """The gradients that this rank's optimizer will use."""
        raise NotImplementedError

    def weights(self) -> list[Part]:
        return [(i, p.detach()) for i, p in enumerate(self.parameters)]

    def clear_padding_of_weights(self) -> None:
        """Zeroes the padding of the buffers that weights are gathered from, which DeepSpeed never writes. It
        has no effect, but a watch would report old NaN in it."""

    def masters(self) -> list[torch.Tensor]:
        """Each group's flat partition, for which the inner optimizer keeps its state."""
        raise NotImplementedError

    def optimizer_state(self, wanted: set[int]) -> Iterator[tuple[int, str, torch.Tensor, int]]:
        masters = self.masters()
        for piece in self.pieces:
            if piece.id not in wanted:
                continue
            master = masters[piece.group]
            for name, tensor in state_tensors(self.optimizer.optimizer, master):
                yield piece.id, name, piece.of(tensor), piece.begin
            yield piece.id, "main_param", piece.of(master), piece.begin

    def skips_bad_updates(self) -> bool:
        """Whether DeepSpeed leaves out an update with bad gradients."""
        return True

    def clear_gradients(self) -> None:
        """Restores the state after a step: removes what a backward has left, so that the next one counts as
        the first."""
        raise NotImplementedError


class Replicated(Layout):
    """Stage 0: the engine reduces ``param.grad``, and each rank updates everything."""

    reduction = "buffered_allreduce_fallback"

    def __init__(self, engine: Any) -> None:
        groups = getattr(engine.optimizer, "fp16_groups", None)
        if groups is None:
            groups = [group["params"] for group in engine.optimizer.param_groups]
        super().__init__(engine, [[p for p in group if p.requires_grad] for group in groups])
        self.reducer = engine
        if isinstance(engine.optimizer, torch.optim.Optimizer):
            self.norms = [(deepspeed.runtime.engine, "clip_grad_norm_")]
        else:
            self.norms = [(unfused_optimizer, "get_weight_norm"), (unfused_optimizer, "get_global_norm")]

    def is_partitioned(self) -> bool:
        return False

    def about_to_be_reduced(self, *_: Any, **__: Any) -> list[Part]:
        return self.reduced()

    def reduced(self) -> list[Part]:
        return [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]

    def optimizer_state(self, wanted: set[int]) -> Iterator[tuple[int, str, torch.Tensor, int]]:
        masters = {
            parameter: master
            for parameters, copies in zip(
                getattr(self.optimizer, "fp16_groups", []),
                getattr(self.optimizer, "fp32_groups", []),
                strict=False,
            )
            for parameter, master in zip(parameters, copies, strict=False)
        }
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        for i in sorted(wanted):
            parameter = self.parameters[i]
            master = masters.get(parameter, parameter)
            for name, tensor in state_tensors(inner, master):
                yield i, name, tensor, 0
            if master is not parameter:
                yield i, "main_param", master.detach(), 0

    def skips_bad_updates(self) -> bool:
        return not isinstance(self.optimizer, torch.optim.Optimizer)

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
