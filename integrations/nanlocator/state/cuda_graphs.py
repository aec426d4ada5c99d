"""Executes modules without their CUDA graphs in a re-run: a replay calls no operator that could be watched,
and reads and writes the memory of its capture.

Supports ``torch.cuda.make_graphed_callables`` of modules and TransformerEngine's function of that name, which
replace the module's ``forward`` (torch/cuda/graphs.py, make_graphed_forward;
transformer_engine/pytorch/graph.py), and Megatron-Core's graphs of layers (core/transformer/module.py and
cuda_graphs.py). Eager execution of compiled code has none of torch.compile's graphs. All other replays, by
the program itself or by graphed functions outside modules, stay, and are reported.
"""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nanlocator.hooks import patches, points
from nanlocator.hooks.patches import Patches

Undo = Callable[[], None]

_LOCAL = "cudagraph_manager"  # Megatron-Core 0.12 to 0.16: a layer that has one is replayed
_BY_ENGINE = "cuda_graphs"  # the same versions: TransformerEngine's graphs, one per microbatch
# Files whose replays a re-run avoids, by executing the module's operators or by eager execution.
_OF_MODULES = ("torch/cuda/graphs.py", "megatron/core/transformer/cuda_graphs.py", "pytorch/graph.py")
_COMPILED = "/torch/_inductor/"
_OWN = (__file__, patches.__file__)

_depth = 0  # of nested blocks without graphs; above 0 in a re-run


@contextlib.contextmanager
def without_graphs(models: Iterable[nn.Module]) -> Iterator[None]:
    """Executes the modules in ``models`` by their operators."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_rerun())
        for module in _modules_of(models):
            for leave_out in list(_graphs_of(module)):
                stack.callback(leave_out())
        yield


@contextlib.contextmanager
def _in_rerun() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


class OwnReplays:
    """Reports graphs that a program itself replays in its steps, each place once, from construction until
    ``remove``: calls ``say`` with a sentence. Adds a look-up to each replay."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.places: set[tuple[str, int]] = set()
        self._patches = Patches(__name__)
        self._patches.wrap(points.GRAPH_REPLAY, self._around_replay)

    def remove(self) -> None:
        self._patches.remove()

    def _around_replay(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caller: types.FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_code.co_filename in _OWN:
            caller = caller.f_back
        if caller is not None:
            self._name(caller)
        return original(*args, **kwargs)

    def _name(self, caller: types.FrameType) -> None:
        place = (caller.f_code.co_filename, caller.f_lineno)
        if place in self.places or _COMPILED in place[0]:
            return
        is_own = torch.is_grad_enabled() and not place[0].endswith(_OF_MODULES)  # not in evaluation
        if is_own or _depth > 0:
            self.places.add(place)
            self._say(
                f"A CUDA graph is replayed at {place[0]}:{place[1]}, in re-runs, too: operators inside it "
                "are not seen, and bad values that it produces look as if they had been bad before."
            )


class ReplayedGraphs:
    """A state of a step whose ``restore`` raises RuntimeError if the step replayed graphs, which a re-run
    does not restore."""

    def __init__(self, models: Iterable[nn.Module], own: "OwnReplays | None" = None) -> None:
        self._models, self._own = list(models), own

    def save(self) -> None:
        pass

    def restore(self) -> None:
        number = sum(any(True for _ in _graphs_of(module)) for module in _modules_of(self._models))
        if number:
            modules = "1 module" if number == 1 else f"{number} modules"
            raise RuntimeError(f"{modules} ran from them, but operator by operator in the re-run")
        if self._own is not None and self._own.places:
            places = ", ".join(f"{file}:{line}" for file, line in sorted(self._own.places))
            raise RuntimeError(f"memory written by the replay at {places} keeps its content in the re-run")


def _modules_of(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _graphs_of(module: nn.Module) -> Iterator[Callable[[], Undo]]:
    """For each graph that the module's next training call replays: a function that disables it."""
    forward = _graphed_forward(module)
    if forward is not None and forward.graph_training_state.cell_contents == module.training:
        yield forward.execute
    if _LOCAL in module._modules and not _is_replayed_in_inference_only(module):
        yield functools.partial(_without_child, module, _LOCAL)
    for name, value in vars(module).items():
        # 0.16: parts of a mixture-of-experts layer, CudaGraphManager(..., function_name=name).
        if getattr(value, "__qualname__", "") == "CudaGraphManager.__init__.<locals>.wrapped_func":
            yield functools.partial(_without_attribute, module, name)
    if vars(module).get(_BY_ENGINE) and hasattr(type(module), _replay_by_engine(module)):
        yield functools.partial(_without_graphs_of_engine, module)


@dataclasses.dataclass
class _GraphedForward:
    """Variables of the function that replays a graph or calls the module's original ``forward``."""

    graph_training_state: types.CellType
    graphed: types.CellType
    orig_fwd: types.CellType

    def execute(self) -> Undo:
        graphed = self.graphed.cell_contents
        self.graphed.cell_contents = self.orig_fwd.cell_contents

        def undo() -> None:
            self.graphed.cell_contents = graphed

        return undo


def _graphed_forward(module: nn.Module) -> _GraphedForward | None:
    forward: Any = vars(module).get("forward")
    if "make_graphed_callables.<locals>" not in getattr(forward, "__qualname__", ""):
        return None
    names = [field.name for field in dataclasses.fields(_GraphedForward)]
    variables = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    if not variables.keys() >= set(names):
        return None
    return _GraphedForward(*(variables[name] for name in names))


def _is_replayed_in_inference_only(module: nn.Module) -> bool:
    blocks = sys.modules.get("megatron.core.transformer.transformer_block")
    return blocks is not None and isinstance(module, blocks.TransformerBlock)


def _replay_by_engine(module: nn.Module) -> str:
    is_new = hasattr(type(module), "_should_call_te_cudagraph")  # from 0.15 on
    return "_te_cuda_graph_replay" if is_new else "_cuda_graph_replay"


def _without_graphs_of_engine(module: nn.Module) -> Undo:
    """Hides TransformerEngine's graphs, except in 0.13, where an empty list would start a capture."""
    names = type(module).__call__.__code__.co_names
    if "_should_call_te_cudagraph" in names or "is_graph_capturing" in names:
        without = Patches(__name__)
        without.put(points.ENGINE_GRAPHS, [], of=module)
        return without.remove
    return lambda: None


def _without_attribute(module: nn.Module, name: str) -> Undo:
    value = vars(module).pop(name)
    return functools.partial(vars(module).__setitem__, name, value)


def _without_child(module: nn.Module, name: str) -> Undo:
    children = dict(module._modules)  # keeps the order
    del module._modules[name]

    def undo() -> None:
        module._modules.clear()
        module._modules.update(children)

    return undo
