"""The operator trace from Python: planted causes, opaque kernels, hooks, recomputation, healthy models."""

import pytest
import torch
from behind_torch import write_behind
from tiny_models import ConvolutionalNet, batch, language_model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from traced_models import declare, gradients, traced_step

from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks, tensor_attributes

INF, NAN = float("inf"), float("nan")


class Block(nn.Module):
    """before -> guilty -> after; `guilty` computes what a test plants, on its own parameter."""

    def __init__(self, plant, width: int = 4) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.guilty = Guilty(plant, width)
        self.after = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.guilty(x + 0 * self.before(x))).sum()


class Guilty(nn.Module):
    def __init__(self, plant, width: int) -> None:
        super().__init__()
        self.plant = plant
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plant(x * self.weight)


def run(plant, x=None, **options):
    model = Block(plant)
    data = torch.ones(2, 4) if x is None else x

    def step():
        loss = model(data)
        loss.backward()
        return loss

    return traced_step(model, step, **options)


def with_zero(row: int, column: int) -> torch.Tensor:
    x = torch.ones(2, 4)
    x[row, column] = 0
    return x


def element(row: int, column: int, value: float, others: float = 1.0) -> torch.Tensor:
    x = torch.full((2, 4), others)
    x[row, column] = value
    return x


def softmax_of_a_masked_row(x):
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1] = True
    return torch.softmax(x.masked_fill(mask, -INF), -1)


# name: (what the module computes, its input, kind, operator, phase, first bad element, has a parent)
CAUSES = {
    "log of zero": (torch.log, with_zero(1, 2), "inf", "aten::log", "forward", [1, 2], False),
    "zero over zero": (lambda x: x / x, with_zero(0, 3), "nan", "aten::div.Tensor", "forward", [0, 3], False),
    "one over zero": (lambda x: 1 / x, with_zero(0, 3), "inf", "aten::reciprocal", "forward", [0, 3], False),
    "rsqrt of zero": (torch.rsqrt, with_zero(1, 0), "inf", "aten::rsqrt", "forward", [1, 0], False),
    "sqrt of a negative": (torch.sqrt, element(0, 2, -1), "nan", "aten::sqrt", "forward", [0, 2], False),
    "acos beyond one": (torch.acos, element(1, 1, 1.01, 0.5), "nan", "aten::acos", "forward", [1, 1], False),
    "exp overflow": (torch.exp, element(0, 1, 100), "inf", "aten::exp", "forward", [0, 1], False),
    "underflowed divisor": (
        lambda x: x / (x * 1e-30 * 1e-30), None, "inf", "aten::div.Tensor", "forward", [0, 0], False,
    ),
    "half overflow in a matmul": (
        lambda x: (x.half() @ x.half().t()).float()[:, 1:].expand(2, 4), element(1, 0, 300), "inf",
        "aten::mm", "forward", [1, 1], False,
    ),
    "half overflow in a cast": (
        lambda x: (x * x).half().float(), element(1, 3, 300), "inf", "aten::_to_copy", "forward", [1, 3],
        False,
    ),
    "std of one element": (
        lambda x: x + x[:1, :1].std(), None, "nan", "aten::std.correction", "forward", [], False,
    ),
    "fully masked row": (
        softmax_of_a_masked_row, None, "nan_from_inf", "aten::_softmax", "forward", [1, 0], False,
    ),
    "logsumexp minus itself": (
        lambda x: torch.exp(x) - torch.exp(x), element(0, 1, 100), "nan_from_inf", "aten::sub.Tensor",
        "forward", [0, 1], True,
    ),
    "derivative of sqrt at zero": (
        torch.sqrt, with_zero(1, 2), "inf", "aten::div.Tensor", "backward", [1, 2], False,
    ),
    "derivative of a norm by hand at zero": (
        lambda x: (x * x).sum(1, keepdim=True).sqrt().expand(2, 4), element(0, 0, 0.0, 0.0), "inf",
        "aten::div.Tensor", "backward", [0, 0], False,
    ),
    "derivative of a root by pow at zero": (
        lambda x: x**0.5, with_zero(1, 3), "inf", "aten::pow.Tensor_Scalar", "backward", [1, 3], False,
    ),
    "derivative of acos at one": (
        torch.acos, element(0, 1, 1, 0.5), "inf", "aten::rsqrt", "backward", [0, 1], False,
    ),
    "derivative through where": (
        lambda x: torch.where(x > 0, torch.log(x), 0.0 * x), with_zero(1, 1), "nan", "aten::div.Tensor",
        "backward", [1, 1], False,
    ),
    "derivative of asin at one": (
        torch.asin, element(0, 2, 1, 0.5), "inf", "aten::rsqrt", "backward", [0, 2], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_named_with_operator_module_direction_and_element(name):
    plant, x, kind, operator, phase, first_bad, has_parent = CAUSES[name]
    explanation = run(plant, x)
    assert explanation.notes == []
    told = [t.birth for t in explanation.births]
    # The plant's own birth; if there are several (Inf before NaN), the one in the table.
    births = [b for b in told if b.kind == kind and b.sighting.phase == phase]
    assert births, [(b.kind, b.sighting.phase, b.sighting.op) for b in told]
    birth = births[0]
    assert birth.sighting.module == "guilty"
    assert operator is None or birth.sighting.op == operator
    assert (birth.parent is not None) == has_parent
    index = list(torch.unravel_index(torch.tensor(birth.sighting.stats.first_bad), birth.sighting.shape))
    assert [int(i) for i in index] == first_bad
    assert told[0].sighting.module == "guilty", "and nothing is told before it"
    assert (birth.node != "") == (phase == "backward")
    if has_parent:
        assert told[birth.parent].kind == "inf"
    if kind != "literal":
        assert explanation.births[told.index(birth)].has_call


def test_a_bad_weight_a_bad_buffer_and_a_bad_batch_are_told_apart():
    for where in ("weight", "buffer", "data"):
        model = Block(lambda x: x)
        model.guilty.register_buffer("scale", torch.ones(4))
        model.guilty.plant = lambda x, m=model: x * m.guilty.scale
        x = torch.ones(2, 4)
        with torch.no_grad():
            bad = {"weight": model.guilty.weight, "buffer": model.guilty.scale, "data": x[0]}[where]
            bad[2] = NAN

        def step(model=model, x=x):
            loss = model(x)
            loss.backward()
            return loss

        births = [t.birth for t in traced_step(model, step).births]
        assert [b.kind for b in births] == [where]
        assert births[0].sighting.stats.first_bad == 2
        if where != "data":
            assert births[0].sighting.parameter == ("guilty.weight" if where == "weight" else "guilty.scale")
            assert births[0].sighting.module == "guilty"


def test_the_python_stack_names_the_line_of_the_plant():
    def plant(x):
        return torch.log(x)

    birth = run(plant, with_zero(0, 0)).births[0].birth
    assert birth.stack[0].endswith(" in plant") and "test_operator_trace.py" in birth.stack[0]


def test_keyword_and_dictionary_inputs_reach_the_trace():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, *, features):
            return torch.log(features["x"] * self.weight)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Keywords()

        def forward(self, features):
            return self.inner(features=features).sum()

    model = Outer()
    step = lambda: model({"x": torch.tensor([1.0, 0, 2])})  # noqa: E731
    birth = traced_step(model, step).births[0].birth
    assert (birth.sighting.module, birth.sighting.stats.first_bad) == ("inner", 1)


def test_a_gradient_element_that_is_written_behind_torchs_back_is_memory():
    model = nn.Linear(3, 3)
    with _C.OperatorTrace() as trace:
        declare(trace, model)
        trace.begin_pass()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        write_behind(model.weight.grad, 4, NAN)
        explanation = trace.explain([("loss", loss)], gradients(model))
    (traced,) = explanation.births
    assert traced.birth.kind == "memory"
    assert traced.birth.sighting.parameter == "weight"
    assert traced.birth.sighting.stats.first_bad == 4


def test_a_gradient_that_is_written_behind_torchs_back_inside_backward_is_memory():
    def corrupt(gradient):
        write_behind(gradient, 0, INF)

    def plant(x):
        y = x * 2
        y.register_hook(corrupt)
        return y * 3

    births = [t.birth for t in run(plant).births]
    assert [b.kind for b in births if b.parent is None] == ["memory"]
    assert births[0].sighting.phase == "backward"
    assert births[0].sighting.stats.first_bad == 0


@pytest.mark.parametrize("place", ["tensor", "node", "leaf", "after accumulation"])
@pytest.mark.parametrize("literal", [True, False])
def test_a_hook_that_corrupts_a_gradient_is_blamed_with_its_line(place, literal):
    zero = torch.zeros(())

    def corrupting_hook(gradient):
        return gradient * NAN if literal else gradient / zero

    def plant(x):
        y = x * 2
        if place == "tensor":
            y.register_hook(corrupting_hook)
        elif place == "node":
            y.grad_fn.register_prehook(lambda grads: (corrupting_hook(grads[0]),))
        return y

    model = Block(plant)
    if place == "leaf":
        model.guilty.weight.register_hook(corrupting_hook)
    elif place == "after accumulation":

        def after(parameter):
            parameter.grad = corrupting_hook(parameter.grad)

        model.guilty.weight.register_post_accumulate_grad_hook(after)

    def step():
        loss = model(torch.ones(2, 4))
        loss.backward()
        return loss

    birth = traced_step(model, step).births[0].birth
    assert birth.kind == "user_hook"
    assert birth.stack[0].endswith(" in corrupting_hook")
    assert birth.sighting.phase == "backward"
    assert ("parameter", "guilty.weight") in birth.reached
    if place in ("tensor", "node"):
        assert birth.sighting.module == "guilty"


def test_nan_from_adam_with_clean_gradients_is_of_the_optimizers_phase():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    model(torch.zeros(1, 3)).sum().backward()  # the weight's gradient is zero: 0 / 0 in the update
    with _C.OperatorTrace() as trace:
        declare(trace, model)
        trace.begin_pass()
        trace.enter_phase("params_after")
        optimizer.step()
        trace.enter_phase(None)
        explanation = trace.explain([], list(model.named_parameters()))
    births = [t.birth for t in explanation.births]
    assert births and all(b.sighting.phase == "params_after" for b in births)
    assert "addcdiv" in births[0].sighting.op or "div" in births[0].sighting.op
    assert births[0].sighting.module == ""
    assert births[0].reached == [("parameter", "weight")]


def test_a_loss_over_no_valid_labels_is_of_the_loss():
    model = Block(lambda x: x)

    def step():
        out = model.after(model.guilty(torch.ones(2, 4)))
        mask = torch.zeros(2, 1)
        loss = (out * mask).sum() / mask.sum()
        loss.backward()
        return loss

    births = [t.birth for t in traced_step(model, step).births]
    assert [(b.sighting.phase, b.sighting.module, b.kind) for b in births] == [("loss", "", "nan")]


def test_siblings_of_a_guilty_projection_are_not_blamed():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x):
            q = self.q(x)
            # Only q has a pole in backward.
            q = q + torch.sqrt((q - q.detach()).abs().sum() * 0)
            return (torch.softmax(q @ self.k(x).t(), -1) @ self.v(x)).sum()

    model = Attention()

    def step():
        loss = model(torch.ones(3, 4))
        loss.backward()
        return loss

    explanation = traced_step(model, step)
    reached = {name for t in explanation.births for _, name in t.birth.reached}
    assert reached == {"q.weight"}
    assert explanation.births[0].birth.sighting.phase == "backward"
    assert explanation.births[0].birth.forward_op.startswith("aten::sqrt")


class NumpyFunction(torch.autograd.Function):
    """Computes in numpy, without the dispatcher."""

    plant = ""

    @staticmethod
    def forward(ctx, x):
        y = x.detach().numpy() * 2
        if NumpyFunction.plant == "forward":
            y.flat[1] = NAN
        return torch.from_numpy(y)

    @staticmethod
    def backward(ctx, gradient):
        g = gradient.contiguous().numpy() * 2
        if NumpyFunction.plant == "backward":
            g.flat[1] = NAN
        return torch.from_numpy(g)


@pytest.mark.host
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_off_the_dispatcher_is_said_to_have_borne_it(direction, monkeypatch):
    monkeypatch.setattr(NumpyFunction, "plant", direction)
    births = [t.birth for t in run(lambda x: NumpyFunction.apply(x) + 1).births]
    assert [b.kind for b in births] == ["opaque"]
    birth = births[0]
    assert birth.sighting.phase == direction
    assert birth.sighting.module == "guilty"
    assert birth.sighting.op == ("NumpyFunction" if direction == "forward" else "NumpyFunctionBackward")
    assert birth.sighting.stats.first_bad == 1


@pytest.mark.host
def test_a_kernel_that_writes_into_memory_of_torch_is_opaque_too():
    class IntoEmpty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.empty_like(x)
            out.numpy()[:] = x.numpy()
            out.numpy().flat[3] = INF
            return out

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    births = [t.birth for t in run(lambda x: IntoEmpty.apply(x) * 2).births]
    assert [(b.kind, b.sighting.op, b.sighting.module) for b in births] == [("opaque", "IntoEmpty", "guilty")]
    assert births[0].sighting.stats.first_bad == 3


def test_a_custom_function_is_named_by_its_inner_operator():
    class Pole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient / x

    birth = run(Pole.apply, with_zero(1, 0)).births[0].birth
    assert birth.sighting.op == "aten::div.Tensor"
    assert (birth.node, birth.forward_op, birth.sighting.module) == ("PoleBackward", "Pole", "guilty")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_checkpointed_module_is_named_in_both_directions(reentrant, direction):
    plant = torch.log if direction == "forward" else torch.sqrt

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(4, 4)
            self.guilty = Guilty(plant, 4)

        def forward(self, x):
            h = x + 0 * self.before(x)
            return checkpoint(self.guilty, h, use_reentrant=reentrant).sum()

    model = Checkpointed()

    def step():
        loss = model(with_zero(1, 2))
        loss.backward()
        return loss

    birth = traced_step(model, step).births[0].birth
    assert birth.sighting.phase == direction
    assert birth.sighting.module == "guilty"
    assert birth.sighting.stats.first_bad == 6
    assert birth.sighting.op == ("aten::log" if direction == "forward" else "aten::div.Tensor")


def test_training_under_the_trace_is_bit_identical():
    def train(armed: bool):
        torch.manual_seed(3)
        model = language_model("gpt2", "sdpa")
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()

            def step():
                loss = model(**batch()).loss
                loss.backward()
                return loss

            if armed:
                with _C.OperatorTrace() as trace, ModuleHooks(model):
                    declare(trace, model)
                    trace.begin_pass()
                    losses.append(step().item())
                    optimizer.step()
            else:
                losses.append(step().item())
                optimizer.step()
        return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    plain, traced = train(False), train(True)
    assert plain[0] == traced[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], traced[1], strict=True))
    assert torch.equal(plain[2], traced[2])


@pytest.fixture(params=[False, True], ids=["", "memory filled with NaN"])
def filled_memory(request):
    torch.use_deterministic_algorithms(request.param, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["fp32", "autocast", "half", "checkpoint"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "llama", "mixtral"])
def test_a_healthy_language_model_has_no_origins(kind, attention, mode, filled_memory):
    model = language_model(kind, attention).train()
    if mode == "half":
        model = model.half()
    if mode == "checkpoint":
        reentrant = kind in ("gpt2", "llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})

    def step():
        with torch.autocast(
            torch.get_default_device().type, dtype=torch.bfloat16, enabled=mode == "autocast"
        ):
            loss = model(**batch()).loss
        loss.backward()
        return loss

    losses = []
    explanation = traced_step(model, lambda: losses.append(step()) or losses[0])
    assert torch.isfinite(losses[0]), "or this shows nothing"
    assert all(torch.isfinite(g).all() for _, g in gradients(model)), "or this shows nothing"
    assert [t.birth for t in explanation.births] == []
    assert explanation.operators > 500
    assert explanation.notes == []


@pytest.mark.parametrize("mode", ["fp32", "autocast"])
def test_a_healthy_convolutional_net_with_batch_norm_has_no_origins(mode, filled_memory):
    model = ConvolutionalNet()
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)

    def step():
        with torch.autocast(
            torch.get_default_device().type, dtype=torch.bfloat16, enabled=mode == "autocast"
        ):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    explanation = traced_step(model, step)
    assert [t.birth for t in explanation.births] == []


def test_a_plant_in_a_healthy_model_is_the_only_origin_among_its_masks():
    model = language_model("llama", "sdpa").train()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = INF

    def step():
        loss = model(**batch()).loss
        loss.backward()
        return loss

    births = [t.birth for t in traced_step(model, step).births]
    roots = [b for b in births if b.parent is None]
    assert [b.kind for b in roots] == ["weight"]
    assert roots[0].sighting.parameter == "model.layers.1.mlp.down_proj.weight"
    assert roots[0].sighting.stats.first_bad == 3 * 48 + 5


def test_a_constant_of_the_program_that_is_the_only_reason_is_told_as_a_literal():
    births = [t.birth for t in run(lambda x: x * torch.tensor(NAN)).births]
    assert [b.kind for b in births] == ["literal"]


PYBIND_KERNEL = """
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <limits>
at::Tensor twice(const at::Tensor& x, bool is_faulty) {  // as TransformerEngine's kernels: no operator
  auto y = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = 2 * x.const_data_ptr<float>()[i];
  if (is_faulty) y.data_ptr<float>()[2] = std::numeric_limits<float>::quiet_NaN();
  return y;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""


@pytest.mark.compiles
@pytest.mark.host
@pytest.mark.slow
def test_a_pybind_kernel_is_said_to_have_borne_it(tmp_path):
    from torch.utils import cpp_extension

    source = tmp_path / "pybind_kernel.cpp"
    source.write_text(PYBIND_KERNEL)
    kernel = cpp_extension.load("pybind_kernel", [source], ["-O0"], build_directory=str(tmp_path))

    class Twice(torch.autograd.Function):
        faulty = ""

        @staticmethod
        def forward(ctx, x):
            return kernel.twice(x.contiguous(), Twice.faulty == "forward")

        @staticmethod
        def backward(ctx, gradient):
            return kernel.twice(gradient.contiguous(), Twice.faulty == "backward")

    for Twice.faulty in ("forward", "backward"):
        (birth,) = [t.birth for t in run(lambda x: Twice.apply(x) + 1).births]
        assert (birth.kind, birth.sighting.phase, birth.sighting.module) == ("opaque", Twice.faulty, "guilty")
        assert birth.sighting.stats.first_bad == 2
    Twice.faulty = ""
    assert run(lambda x: Twice.apply(x) + 1).births == []


def test_a_batch_that_numpy_makes_within_the_step_is_data():
    numpy = pytest.importorskip("numpy")
    model = Block(lambda x: x)

    def step():
        made = torch.from_numpy(numpy.array([[1, 2, NAN, 4]], dtype="float32"))
        loss = model(made.to(torch.get_default_device()))
        loss.backward()
        return loss

    births = [t.birth for t in traced_step(model, step).births]
    assert [(b.kind, b.sighting.stats.first_bad) for b in births] == [("data", 2)]


_kept_groups = []


@pytest.fixture
def one_rank(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    # Up to torch 2.6 its destructor joins gloo's thread while holding the GIL, which that thread may need.
    _kept_groups.append(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


def test_what_a_collective_leaves_bad_was_received_and_what_went_in_bad_was_not(one_rank):
    def all_reduce(x, is_broken):
        y = x.detach() * 2
        work = torch.distributed.all_reduce(y, async_op=True)
        work.wait()
        if is_broken:  # like a bad link or reduction kernel
            write_behind(y, 1, NAN)
        return y

    (traced,) = run(lambda x: x * all_reduce(x, True)).births
    assert traced.birth.kind == "collective"
    assert traced.birth.sighting.op.startswith("c10d::allreduce_")
    assert (traced.birth.sighting.module, traced.birth.sighting.stats.first_bad) == ("guilty", 1)

    births = [t.birth for t in run(lambda x: x * all_reduce(torch.log(x), False), with_zero(0, 1)).births]
    assert births[0].sighting.op == "aten::log"
    assert "collective" not in [b.kind for b in births]


def test_a_gradient_that_overflows_in_the_engines_own_cast_is_no_hooks_fault():
    class Widen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.float()

        @staticmethod
        def backward(ctx, gradient):
            return gradient  # float32, for an input in float16: the engine casts it

    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with _C.OperatorTrace() as trace:
        (Widen.apply(x) * 1e6).sum().backward()
        births = [t.birth for t in trace.explain([], [("x", x.grad)]).births]
    assert [(b.kind, b.sighting.phase) for b in births] == [("inf", "backward")]


def test_what_was_handed_to_other_ranks_is_an_origin_where_this_rank_has_no_loss(one_rank):
    x = torch.tensor([1.0, 0.0])
    with _C.OperatorTrace() as trace:
        torch.distributed.all_reduce(torch.log(x))
        torch.log(x)  # its result is not used
        explanation = trace.explain([], [])
    (traced,) = explanation.births
    assert traced.birth.sighting.op == "aten::log"
    assert traced.birth.reached == [("other_ranks", "")]
    assert explanation.masked == 1


def test_what_came_back_bad_from_other_ranks_does_not_hide_what_was_handed_to_them(one_rank):
    """An expert's tokens leave in one exchange and return in another, in other memory."""
    with _C.OperatorTrace() as trace:
        torch.distributed.all_reduce(torch.log(torch.zeros(1)))
        received = torch.ones(1)
        torch.distributed.all_reduce(received, async_op=True).wait()
        write_behind(received, 0, NAN)  # from a rank that does not exist
        births = trace.explain([("loss", received.sum())], []).births
    assert [(t.birth.kind, t.birth.reached) for t in births] == [
        ("inf", [("other_ranks", "")]),
        ("collective", [("loss", "loss")]),
    ]


def test_copies_that_a_process_group_makes_on_its_own_thread_are_no_origin(one_rank):
    received = torch.empty(4)
    with _C.OperatorTrace() as trace:
        torch.distributed.all_gather_into_tensor(received, torch.log(-torch.ones(4)))
        births = trace.explain([("loss", received.sum())], []).births
    assert [t.birth.sighting.op for t in births] == ["aten::log"]


def test_memory_that_a_kernel_reshapes_before_and_after_it_fills_it_is_no_origin():
    x = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    with _C.OperatorTrace() as trace:
        trace.declare(x, "data", "x")
        births = trace.explain([("loss", x.max(dim=-1)[0].sum())], []).births
    assert [t.birth.kind for t in births] == ["data"]


def test_a_birth_has_the_microbatch_and_chunk_of_the_schedule():
    _C.set_current_microbatch(3, 1)
    try:
        with _C.OperatorTrace() as trace:
            loss = torch.log(-torch.ones(1)).sum()
            (traced,) = trace.explain([("loss", loss)], []).births
    finally:
        _C.set_current_microbatch(None, None)
    assert (traced.birth.sighting.microbatch, traced.birth.sighting.chunk) == (3, 1)


def test_a_closed_trace_says_so():
    trace = _C.OperatorTrace()
    trace.close()
    with pytest.raises(_C.UsageError, match="closed"):
        trace.begin_pass()


# ---- The facts of a birth ------------------------------------------------------------------------------


def only_birth(explanation):
    births = [t.birth for t in explanation.births if t.birth.kind != "literal"]
    assert births
    return births[0]


def test_a_birth_in_forward_has_the_line_that_called_the_operator():
    def plant(x):
        y = x * 2
        return torch.log(y)  # the planted line

    birth = only_birth(run(plant, with_zero(0, 0)))
    assert birth.code.text == "return torch.log(y)  # the planted line"
    assert birth.code.file.endswith("test_operator_trace.py")
    assert birth.code.function.endswith("plant")
    assert birth.framework_code is None


def test_a_birth_in_backward_has_the_line_of_the_forward_call():
    def plant(x):
        y = torch.sqrt(x)  # its derivative has a pole
        return y * 2

    birth = only_birth(run(plant, with_zero(0, 0)))
    assert (birth.sighting.phase, birth.forward_op) == ("backward", "aten::sqrt")
    assert birth.code.text == "y = torch.sqrt(x)  # its derivative has a pole"


def test_the_line_of_a_functional_is_the_users_own():
    def plant(x):
        return functional.normalize(x - x, eps=0.0)  # 0 / 0 inside of torch

    birth = only_birth(run(plant))
    assert "functional.normalize" in birth.code.text


def test_operands_have_counts_of_negatives_and_zeros_and_the_element_at_the_first_bad_one():
    x = torch.full((2, 4), 4.0)
    x[1, 2], x[1, 3] = -0.25, -1

    birth = only_birth(run(torch.sqrt, x))
    (operand,) = birth.operands
    assert (operand.name, operand.dtype, operand.shape) == ("self", "float32", [2, 4])
    assert (operand.negatives, operand.at_first_bad) == (2, -0.25)
    assert operand.stats.absmax == 4

    zero = torch.zeros(4)
    birth = only_birth(run(lambda x: x / zero))
    numerator, divisor = birth.operands
    assert (numerator.negatives, numerator.stats.zeros) == (0, 0)
    assert divisor.stats.zeros == divisor.stats.numel == 4
    assert birth.extent == ([(0, 1, 2), (0, 3, 4)], True)  # all of it


def test_a_number_among_the_arguments_is_an_operand():
    birth = only_birth(run(lambda x: torch.pow(x, 0.5), with_zero(1, 2)))
    assert birth.forward_op.startswith("aten::pow")
    exponent = only_birth(run(lambda x: torch.pow(x - 1, -0.5))).operands[1]
    assert (exponent.name, exponent.number) == ("exponent", -0.5)


@pytest.mark.parametrize(
    ("bad", "extent"),
    [
        ((slice(None), 1), ([(0, 2, 3), (1, 1, 1), (0, 4, 5)], True)),  # all of token 1
        ((2, 3), ([(2, 2, 1), (3, 3, 1), (0, 4, 5)], True)),  # one row
        ((0, 0, 0), ([(0, 0, 1), (0, 0, 1), (0, 0, 1)], True)),
        (([0, 2], [1, 3], [0, 4]), ([(0, 2, 2), (1, 3, 2), (0, 4, 2)], False)),  # scattered
    ],
)
def test_the_extent_says_which_slices_are_bad(bad, extent):
    x = torch.ones(3, 4, 5)
    x[bad] = 0
    with _C.OperatorTrace() as trace:
        trace.begin_pass()
        loss = torch.log(x).sum()
        explanation = trace.explain([("loss", loss)], [])
    assert only_birth(explanation).extent == extent


def test_an_overflow_has_the_magnitudes_of_its_modules_weights():
    class Exploding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x).sum()

    model = Exploding()
    with torch.no_grad():
        model.inner.weight.fill_(3e38)
        model.inner.bias.fill_(0.5)
    birth = only_birth(traced_step(model, lambda: model(torch.full((1, 2), 100.0))))
    assert birth.kind == "inf"
    assert birth.weights["inner.weight"] == pytest.approx(3e38)
    assert birth.weights["inner.bias"] == 0.5
    assert max(o.stats.absmax for o in birth.operands if o.shape == [1, 2]) == 100


class SquareBug(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x / (x - x)  # its divisor is zero


def test_nan_of_a_custom_functions_own_backward_names_the_function_and_its_line():
    birth = only_birth(run(SquareBug.apply))
    assert birth.custom_function == "SquareBug"
    assert birth.code.text == "return gradient * x / (x - x)  # its divisor is zero"
    assert birth.sighting.phase == "backward"


def test_a_module_inside_a_checkpoint_is_no_custom_functions_code():
    def plant(x):
        return checkpoint(torch.log, x, use_reentrant=True)

    assert only_birth(run(plant, with_zero(0, 0))).custom_function == ""


def test_a_number_that_an_operator_reads_from_a_tensor_has_that_tensors_birth():
    """Like _scaled_mm with its scales on a CPU without fp8."""

    def scaled(x, scale):
        product = torch.ops.aten.mul.Scalar(x, scale.item())
        return product - product

    with torch.library._scoped_library("nanlocator_test", "DEF") as library:
        library.define("scaled(Tensor x, Tensor scale) -> Tensor")
        library.impl("scaled", scaled, "CPU")
        births = run(
            lambda x: x + torch.ops.nanlocator_test.scaled(x.detach(), 448 / x.detach().new_zeros(()))
        ).births
    roots = [t.birth for t in births if t.birth.parent is None]
    assert [(b.kind, b.sighting.op) for b in roots] == [("inf", "aten::reciprocal")]


@pytest.mark.host
def test_a_custom_operator_is_marked_as_one():
    with torch.library._scoped_library("nanlocator_test", "DEF") as library:
        library.define("reciprocal(Tensor x) -> Tensor")
        library.impl("reciprocal", lambda x: torch.from_numpy(1 / x.detach().numpy()), "CPU")
        x = torch.tensor([1.0, 0.0])
        with _C.OperatorTrace() as trace:
            trace.begin_pass()
            y = torch.ops.nanlocator_test.reciprocal(x)
            explanation = trace.explain([("loss", y)], [])
    birth = only_birth(explanation)
    assert birth.sighting.op == "nanlocator_test::reciprocal"
    assert birth.is_custom_operator
    assert not only_birth(run(torch.log, with_zero(0, 0))).is_custom_operator


# ---- Tensors without a name ----------------------------------------------------------------------------


def test_a_bad_tensor_that_a_module_holds_as_an_attribute_is_a_buffer_with_its_name():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.cos = torch.ones(4)
            self.tables = [torch.ones(4), torch.ones(4)]
            self.cache = {"sin": torch.ones(4)}

        def forward(self, x):
            return x * self.cos + self.tables[1] * self.cache["sin"]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary = Rotary()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.rotary(x * self.weight).sum()

    for name, tensor_of in {
        "rotary.cos": lambda r: r.cos,
        "rotary.tables[1]": lambda r: r.tables[1],
        "rotary.cache[sin]": lambda r: r.cache["sin"],
    }.items():
        model = Outer()
        tensor_of(model.rotary)[3] = NAN
        with _C.OperatorTrace() as trace, ModuleHooks(model):
            declare(trace, model)
            for attribute, tensor in tensor_attributes(model):
                trace.declare(tensor, "buffer", attribute)
            trace.begin_pass()
            explanation = trace.explain([("loss", model(torch.ones(4)))], [])
        birth = only_birth(explanation)
        assert (birth.kind, birth.sighting.parameter, birth.sighting.module) == ("buffer", name, "rotary")
        assert birth.sighting.stats.first_bad == 3


def test_attributes_of_a_model_that_calls_a_list_buffers_are_found():
    model = nn.Linear(2, 2)
    model.buffers = [torch.ones(1)]  # like Megatron's DistributedDataParallel
    assert [name for name, _ in tensor_attributes(model)] == ["buffers[0]"]


def test_what_is_computed_outside_of_modules_has_no_module_and_the_loss_is_known_without_its_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with _C.OperatorTrace() as trace, ModuleHooks(model):
        declare(trace, model)
        trace.begin_pass()
        prediction = model(torch.ones(3, 4))
        loss = ((prediction - prediction).sum() / torch.zeros(())).reshape(())
        loss.backward()
        explanation = trace.explain([], gradients(model))
    birth = only_birth(explanation)
    assert birth.sighting.op.startswith("aten::div")
    assert (birth.sighting.phase, birth.sighting.module) == ("loss", "")
    assert not birth.is_module_inferred
    assert birth.reached == [("loss", "loss")]


def test_a_finite_loss_outside_of_modules_blames_nothing_but_what_made_the_gradients_bad():
    model = nn.Linear(4, 4)
    with _C.OperatorTrace() as trace, ModuleHooks(model):
        declare(trace, model)
        trace.begin_pass()
        prediction = model(torch.ones(3, 4))
        torch.sqrt(prediction - prediction).sum().backward()
        explanation = trace.explain([], gradients(model))
    birth = only_birth(explanation)
    assert birth.sighting.phase == "backward"
    assert birth.sighting.module == ""
    assert {kind for t in explanation.births for kind, _ in t.birth.reached} == {"parameter"}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_that_comes_out_bad_only_when_it_is_recomputed_is_of_backward_and_reaches_no_loss(
    use_reentrant,
):
    calls = []

    def plant(x):
        def body(y):
            calls.append(1)
            logarithm = torch.log(y * (1.0 if len(calls) == 1 else 0.0))
            return logarithm * logarithm

        return checkpoint(body, x, use_reentrant=use_reentrant)

    model = Block(plant)

    def step():
        loss = model(torch.ones(2, 4))
        loss.backward()
        return loss

    birth = only_birth(traced_step(model, step))
    assert len(calls) == 2
    assert birth.sighting.op == "aten::log"
    assert birth.node != "" and birth.sighting.phase == "forward"
    assert birth.code.text.startswith("logarithm = torch.log(")
    assert all(kind == "parameter" for kind, _ in birth.reached)


def test_of_many_bad_weights_all_are_found_in_the_order_in_which_they_are_read():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(NAN)
    births = [t.birth for t in traced_step(model, lambda: model(torch.ones(3, 4)).sum()).births]
    assert [b.kind for b in births] == ["weight"] * 4
    names = [b.sighting.parameter for b in births]
    assert set(names[:2]) == {"0.weight", "0.bias"} and set(names[2:]) == {"2.weight", "2.bias"}
