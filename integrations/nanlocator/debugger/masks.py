"""Intended infinities: additive attention masks, and scores to which a mask was added."""

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from nanlocator.debugger.frames import Role
from nanlocator.debugger.places import Place
from nanlocator.debugger.values import Values


class IntendedMasks:
    """Accepts intended −Inf, and remembers the accepted tensors of this process.

    The −Inf of a tensor without other bad values are intended in

    1. an input that holds only zeros and −Inf, some of each;
    2. an output with −Inf at exactly the elements where a mask among the inputs has it, or where a bool mask
       among them is True, or False, in the shape to which the mask is broadcast: any other −Inf is overflow;
    3. an input that was accepted as such an output and not written since.

    Rules 2 and 3 need the tensors themselves; if these are gone (`Place.value` is None), the result is
    undecided.
    """

    def __init__(self) -> None:
        self._scores: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> its version when accepted

    def is_meant(
        self, place: Place, values: Values, inputs: Iterable[tuple[Place, Values | None]]
    ) -> bool | None:
        """Judges a bad value. None: undecided."""
        if place.role is Role.INPUT and values.is_additive_mask:
            return True
        if not values.has_only_negative_infinities:
            return False
        if place.value is None:
            return None
        if place.role is Role.INPUT:
            return self._is_accepted(place.value)
        if type(place.value) is not torch.Tensor:
            return False
        with torch.no_grad():
            masked = place.value.detach() == -torch.inf
            if not any(_is_at(masked, where) for where in self._masked_by(inputs)):
                return False
        if not place.value.is_inference():
            self._scores[place.value] = place.value._version
        return True

    def _masked_by(self, inputs: Iterable[tuple[Place, Values | None]]) -> Iterable[torch.Tensor]:
        for place, values in inputs:
            tensor = place.value
            if values is None:
                continue
            if tensor.dtype is torch.bool and values.magnitudes == (0, 1):  # some of each
                yield tensor
                yield ~tensor
            elif values.is_additive_mask or (values.is_bad and self._is_accepted(tensor)):
                yield tensor.detach() == -torch.inf

    def _is_accepted(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_inference() and self._scores.get(tensor) == tensor._version


def _is_at(masked: torch.Tensor, where: torch.Tensor) -> bool:
    if masked.device != where.device or where.dim() > masked.dim():
        return False
    try:
        return torch.equal(masked, where.expand_as(masked))
    except RuntimeError:  # the shape does not broadcast
        return False
