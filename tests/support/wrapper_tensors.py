"""Parameters without memory of their own, like TransformerEngine's QuantizedTensor: a wrapper subclass that
keeps its values in fp8 elsewhere, computes with the dequantised values, and quantises writes."""

import torch
from torch.utils._pytree import tree_map


class Quantized(torch.Tensor):
    """Gives access to its values through ``dequantize()``, like TransformerEngine's."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor) -> None:
        self.payload = values.detach().to(torch.float8_e5m2)

    def dequantize(self) -> torch.Tensor:
        return self._values()

    def _values(self) -> torch.Tensor:
        return self.payload.to(self.dtype)

    def write(self, values: torch.Tensor) -> None:
        self.payload.copy_(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        def plain(value):
            return value._values() if isinstance(value, Quantized) else value

        if func == torch.ops.aten.detach.default:
            same = cls(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device))
            same.payload = args[0].payload
            return same
        given = tree_map(plain, args)
        result = func(*given, **tree_map(plain, kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], Quantized):
            args[0].write(given[0])
            return args[0]
        return result


class Sealed(Quantized):
    """Cannot be dequantised from outside."""

    def dequantize(self) -> torch.Tensor:
        raise NotImplementedError("Sealed does not implement dequantize")


def replace_weight(module: torch.nn.Module, kind: type[Quantized]) -> torch.nn.Parameter:
    """Replaces ``module.weight`` by a tensor of this kind."""
    weight = torch.nn.Parameter(kind(module.weight))
    module.weight = weight
    return weight
