"""Modules that run from CUDA graphs: a re-run executes their operators, so that verdicts can name them.

The graphs are fakes that run on a CPU. Like a real replay, theirs calls no operator that is seen, and the
function that replaces ``forward`` is built like that of torch.cuda.make_graphed_callables (2.11,
torch/cuda/graphs.py).
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import run_in_tmp_path  # noqa: F401
from torch import nn
from watched_steps import line_of, verdict_of_steps

import nanlocator
from nanlocator.state.cuda_graphs import OwnReplays, ReplayedGraphs, without_graphs


class Logarithm(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return torch.log(x - self.shift)


class Replay(torch.autograd.Function):
    """The replay of a Logarithm; `lost` is an element that a broken replay does not write."""

    @staticmethod
    def forward(ctx, x, shift, lost):
        ctx.save_for_backward(x, shift)
        values = [math.log(v) if v > 0 else math.nan for v in (x - shift).flatten().tolist()]
        if lost is not None:
            values[lost] = math.nan
        return torch.tensor(values).reshape(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        x, shift = ctx.saved_tensors
        inner = gradient / (x - shift)
        return inner, -inner.sum(0), None


def make_graphed_callables(module, lost=None):
    calls = []

    def graphed(x):
        calls.append("replayed")
        return Replay.apply(x, module.shift, lost)

    def make_graphed_forward(func, graph_training_state, graphed, orig_fwd):
        def new_fwd(*user_args, **user_kwargs):
            if func.training == graph_training_state:
                return graphed(*user_args, **user_kwargs)
            return orig_fwd(*user_args, **user_kwargs)

        return new_fwd

    module.forward = make_graphed_forward(module, module.training, graphed, module.forward)
    return calls


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.log, self.last = nn.Linear(4, 4), Logarithm(), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.log(self.first(x).abs() + 1)).mean()


def train(model, **options):
    return verdict_of_steps(model, lambda: model(torch.randn(3, 4)), **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def test_the_operator_inside_of_a_graph_is_named(model):
    calls = make_graphed_callables(model.log)
    with torch.no_grad():
        model.log.shift[2] = 50.0
    verdict = train(model)
    (origin,) = verdict["origins"]
    assert (origin["operator"], origin["module"]) == ("aten::log", "log")
    assert origin["code"]["text"] == "return torch.log(x - self.shift)"
    assert verdict["rerun"]["reproduced"] is True
    assert any(text.startswith("CUDA graphs: 1 module ran") for text in verdict["rerun"]["not_restored"])
    assert calls == ["replayed"]
    model.log(torch.ones(1, 4) * 60)
    assert calls == ["replayed"] * 2  # the graph is restored


def test_a_model_that_is_a_graph_as_a_whole_is_executed_too():
    model = Logarithm()
    with torch.no_grad():
        model.shift[2] = 50.0
    calls = make_graphed_callables(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = nanlocator.watch(model, optimizer)
    model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        optimizer.step()
    watch.remove()
    (origin,) = raised.value.verdict["origins"]
    assert origin["operator"] == "aten::log"
    assert calls == ["replayed"]


def test_what_a_broken_replay_leaves_is_no_evidence_against_a_machine(model):
    make_graphed_callables(model.log, lost=5)
    verdict = train(model)
    assert verdict["rerun"]["reproduced"] is False
    (origin,) = verdict["origins"]
    assert origin["cause"] != "not_reproduced" and origin["owner"] != "cluster_operator"
    assert any(fact["kind"] == "not_restored" for fact in origin["facts"])


def test_healthy_graphs_stay_as_they_are(model):
    calls = make_graphed_callables(model.log)
    before = vars(model.log)["forward"]
    assert train(model, steps=3) is None
    assert vars(model.log)["forward"] is before and calls == ["replayed"] * 3


class Layer(nn.Linear):
    """``__call__`` is that of Megatron-Core's layers (0.16.1, core/transformer/module.py)."""

    cuda_graphs = ()

    def _should_call_te_cudagraph(self):
        return bool(self.cuda_graphs)

    def _te_cuda_graph_replay(self, x):
        return self.cuda_graphs[0](x)

    def __call__(self, x):
        if hasattr(self, "cudagraph_manager"):
            return self.cudagraph_manager(self, x)
        if self._should_call_te_cudagraph():
            return self._te_cuda_graph_replay(x)
        return super().__call__(x)

    def forward(self, x):
        return self.part(x)

    def part(self, x):
        return super().forward(x)


def is_graph_capturing():
    return False


class LayerOf014(nn.Linear):
    """A layer of Megatron-Core 0.14 (core/transformer/transformer_layer.py)."""

    cuda_graphs = ()

    def _cuda_graph_replay(self, x):
        return self.cuda_graphs[0](x)

    def __call__(self, x):
        if is_graph_capturing() or self.cuda_graphs:
            return self._cuda_graph_replay(x)
        return super().__call__(x)


class LayerOf013(LayerOf014):
    def __call__(self, x):
        return self._cuda_graph_replay(x) if self.cuda_graphs else "captured"


class CudaGraphManager(nn.Module):
    def __init__(self, base_module=None, function_name=None):
        super().__init__()
        if function_name is not None:

            def wrapped_func(*args, **kwargs):
                return "replayed"

            setattr(base_module, function_name, wrapped_func)

    def __call__(self, layer, x):
        return "replayed"


def replayed(x):
    return "replayed"


def test_megatrons_graphs_of_layers_are_left_out_and_come_back():
    local, by_engine, of_014, in_part = Layer(2, 2), Layer(2, 2), LayerOf014(2, 2), Layer(2, 2)
    local.cudagraph_manager, local.last = CudaGraphManager(), nn.Identity()
    by_engine.cuda_graphs = of_014.cuda_graphs = graphs = [replayed]
    in_part.manager = CudaGraphManager(in_part, "part")
    layers = nn.ModuleList([local, by_engine, of_014, in_part])
    x = torch.ones(1, 2)
    assert [layer(x) for layer in layers] == ["replayed"] * 4
    with pytest.raises(RuntimeError, match="4 modules ran"):
        ReplayedGraphs([layers]).restore()
    with without_graphs([layers]):
        assert all(isinstance(layer(x), torch.Tensor) for layer in layers)
        ReplayedGraphs([layers]).restore()
    assert [layer(x) for layer in layers] == ["replayed"] * 4
    assert list(local._modules) == ["cudagraph_manager", "last"]
    assert by_engine.cuda_graphs is graphs


def test_graphs_that_cannot_be_left_out_are_told():
    """In 0.13, an empty list would start a capture."""
    layer = LayerOf013(2, 2)
    layer.cuda_graphs = [replayed]
    with without_graphs([layer]):
        assert layer(torch.ones(1, 2)) == "replayed"
    with pytest.raises(RuntimeError, match="1 module ran"):
        ReplayedGraphs([layer]).restore()


def test_a_graph_of_training_is_no_business_of_an_evaluation(model):
    make_graphed_callables(model.log)
    model.eval()
    ReplayedGraphs([model]).restore()


class Graph:
    """A fake torch.cuda.CUDAGraph: reads and writes the memory of its capture."""

    def __init__(self, given, result):
        self.given, self.result = given.numpy(), result.numpy()

    def replay(self):
        with np.errstate(invalid="ignore"):
            np.log(self.given, out=self.result)


class ReplaysByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.given, self.result = torch.ones(3, 4), torch.ones(3, 4)
        self.graph = torch.cuda.CUDAGraph(self.given, self.result)
        self.shift = 0.0

    def forward(self, x):
        self.given.copy_(self.first(x).detach().abs() + 1 - self.shift)
        self.graph.replay()  # its own
        return self.last(self.first(x) + self.result).mean()


@pytest.mark.host
def test_a_graph_that_the_program_replays_by_itself_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    replay = Graph.replay
    torch.manual_seed(0)
    model = ReplaysByItself()
    model.shift = 50.0
    verdict = train(model)
    line = line_of(Path(__file__), "replay()  # its " + "own")
    (note,) = (note for note in verdict["notes"] if "CUDA graph" in note)
    assert f"replayed at {__file__}:{line}, in re-runs, too" in note
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["cause_confidence"]) == ("bad_buffer", "low")
    (left,) = verdict["rerun"]["not_restored"]
    assert left.startswith("CUDA graphs: memory written by the replay at ")
    assert Graph.replay is replay


@pytest.mark.host
def test_replays_of_an_evaluation_and_of_modules_that_run_without_are_not_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    said = []
    replays = OwnReplays(said.append)
    graph = Graph(torch.ones(3), torch.ones(3))
    with torch.no_grad():
        graph.replay()
    of_modules = compile("graph.replay()", "/site-packages/torch/cuda/graphs.py", "exec")
    exec(of_modules, {"graph": graph})
    assert said == []
    with without_graphs([]):  # still replayed here, by a function outside modules
        exec(of_modules, {"graph": graph})
    assert len(said) == 1 and "torch/cuda/graphs.py:1" in said[0]
    for _ in range(2):
        graph.replay()
    assert len(said) == 2
    replays.remove()
