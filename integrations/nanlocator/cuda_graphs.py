"""Modules that are replayed from CUDA graphs: a replay calls no operator that could be watched, and reads and
writes the memory of its capture. In a re-run such a module is executed by its operators.

Known are ``torch.cuda.make_graphed_callables`` of modules and TransformerEngine's function of that name,
which put a function in place of the module's ``forward`` (torch/cuda/graphs.py, make_graphed_forward;
transformer_engine/pytorch/graph.py), and Megatron-Core's graphs of layers (core/transformer/module.py and
cuda_graphs.py). Those of torch.compile are gone where compiled code is executed eagerly.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from nanlocator.patches import replace

_LOCAL = "cudagraph_manager"  # Megatron-Core 0.12 to 0.16: a layer that has it is replayed
_BY_ENGINE = "cuda_graphs"  # 0.14 to 0.16: a layer whose list of graphs is empty is executed


class WithoutGraphs:
    """The modules in ``models`` are executed by their operators until ``remove``."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._undo: list[Callable[[], None]] = []
        for module in _graphed(models):
            if (forward := _graphed_forward(module)) is not None:
                self._undo.append(forward.execute())
            if _LOCAL in module._modules:
                self._undo.append(_without_child(module, _LOCAL))
            if _is_replayed_by_engine(module):
                self._undo.append(replace(module, _BY_ENGINE, []))

    def __enter__(self) -> "WithoutGraphs":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


class ReplayedGraphs:
    """What a step had that is not restored: with ``save`` and ``restore``, as the state of a step is."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)

    def save(self) -> None:
        pass

    def restore(self) -> None:
        number = sum(1 for _ in _graphed(self._models))
        if number:
            modules = "1 module" if number == 1 else f"{number} modules"
            raise RuntimeError(f"{modules} ran from them, and by operators in the re-run")


def _graphed(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        for module in model.modules():
            is_captured = _graphed_forward(module) is not None
            if is_captured or _LOCAL in module._modules or _is_replayed_by_engine(module):
                yield module


@dataclasses.dataclass
class _GraphedForward:
    """Variables of the function that replays a graph, or calls what was the module's ``forward``."""

    graphed: types.CellType
    orig_fwd: types.CellType

    def execute(self) -> Callable[[], None]:
        graphed = self.graphed.cell_contents
        self.graphed.cell_contents = self.orig_fwd.cell_contents

        def undo() -> None:
            self.graphed.cell_contents = graphed

        return undo


def _graphed_forward(module: nn.Module) -> _GraphedForward | None:
    forward = vars(module).get("forward")
    if "make_graphed_callables.<locals>" not in getattr(forward, "__qualname__", ""):
        return None
    names = [field.name for field in dataclasses.fields(_GraphedForward)]
    variables = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    return _GraphedForward(*map(variables.get, names)) if variables.keys() >= set(names) else None


def _is_replayed_by_engine(module: nn.Module) -> bool:
    return bool(vars(module).get(_BY_ENGINE)) and hasattr(type(module), "_should_call_te_cudagraph")


def _without_child(module: nn.Module, name: str) -> Callable[[], None]:
    children = dict(module._modules)  # in their order
    del module._modules[name]

    def undo() -> None:
        module._modules.clear()
        module._modules.update(children)

    return undo
