"""A module as a pickle without its tensors; a bundle keeps them separately."""

import io
import pickle
from typing import Any

import torch

_WITHOUT_TENSOR = "nanlocator: a tensor of the bundle"


def pickled(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> tuple[bytes, str]:
    """The pickle without ``weights``, the module's parameters and buffers by name; and the reason if it
    cannot be pickled, else ""."""
    file = io.BytesIO()
    try:
        _ModulePickler(file, weights).dump(module)
    except Exception as error:  # a module's own __reduce__ can raise anything
        return b"", f"{type(error).__name__}: {error}"
    return file.getvalue(), ""


def unpickled(content: bytes, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The module with copies of ``weights``. Runs any code that the pickle names."""
    return _ModuleUnpickler(io.BytesIO(content), weights).load()


class _ModulePickler(pickle.Pickler):
    """Replaces the module's tensors by references to the bundle's weights by name."""

    def __init__(self, file: io.BytesIO, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._names = {id(tensor): name for name, tensor in weights.items()}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._names:
            raise pickle.PicklingError("it holds a tensor that is neither a parameter nor a buffer")
        return (_WITHOUT_TENSOR, self._names[id(obj)], isinstance(obj, torch.nn.Parameter), obj.requires_grad)


class _ModuleUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._weights = weights
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, name, is_parameter, requires_grad = pid
        if name not in self._made:
            tensor = self._weights[name].detach().clone()
            self._made[name] = torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor
        return self._made[name]
