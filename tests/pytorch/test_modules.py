"""The module stack and the module watch: names, containers, planted faults, and no effect on training."""

import collections
import dataclasses
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanlocator
from nanlocator import _C
from nanlocator.calls.modules import ModuleHooks, local_part, shown, tensor_attributes

NAN, INF = float("nan"), float("inf")


class WatchedModules:
    """The `modules` level for one model, as in a driver."""

    def __init__(self, model):
        self._model = model
        self._watch = _C.ModuleWatch(torch.get_num_threads())
        self._hooks = ModuleHooks(model, self._watch)

    def begin_step(self):
        self._watch.begin_step()

    def collect(self, iteration):
        """The bad tensors since `begin_step`, in execution order, and their births."""
        return self._watch.collect(
            iteration,
            [(shown(name), local_part(p)) for name, p in self._model.named_parameters()],
            [(shown(name), local_part(b)) for name, b in self._model.named_buffers()]
            + [(shown(name), t) for name, t in tensor_attributes(self._model)],
        )

    def remove(self):
        self._hooks.remove()
        self._watch.begin_step()


class Named(nn.Module):
    """Appends the name under which it runs."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x=None):
        self.seen.append(_C.current_module())
        return x


def put(value, index=0):
    """A forward hook that plants `value` in the output."""

    def hook(module, arguments, output):
        output = output.clone()
        output.view(-1)[index] = value
        return output

    return hook


class PlantInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[3] = ctx.value
        return gradient, None


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.attention = Attention()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.attention(x))


def births_of(model, run, iteration=3):
    watched = WatchedModules(model)
    try:
        watched.begin_step()
        run()
        return watched.collect(iteration)[1]
    finally:
        watched.remove()


def places(births):
    return [(b.kind, b.sighting.phase, b.sighting.module, b.sighting.role) for b in births]


# --- names ---------------------------------------------------------------------------------------


def test_a_module_is_named_by_its_path_and_the_root_by_its_class():
    seen = []

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Identity(), Named(seen))

        def forward(self, x):
            seen.append(_C.current_module())
            return self.inner(x)

    with ModuleHooks(root := Root()):
        root(torch.ones(1))
    assert seen == ["Root", "inner.1"]
    root(torch.ones(1))
    assert seen[2:] == [None, None]


def test_a_shared_module_has_the_name_of_the_path_it_was_called_through():
    seen = []
    shared = nn.Sequential(Named(seen))

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = shared

        def forward(self):
            return self.block(None)

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.direct = Half(), Half(), shared

        def forward(self):
            self.left()
            self.right()
            self.direct(None)
            self.left()

    with ModuleHooks(root := Root()):
        root()
    assert seen == ["left.block.0", "right.block.0", "direct.0", "left.block.0"]


def test_modules_that_come_later_or_are_made_on_the_fly_are_named_below_their_caller():
    seen = []

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList()
            self.plain = [Named(seen)]

        def forward(self):
            self.late(None)
            self.blocks[0](None)
            self.plain[0](None)
            Named(seen)(None)

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self):
            self.inner()

    root = Root()
    with ModuleHooks(root):
        root.inner.late = Named(seen)
        root.inner.blocks.append(Named(seen))
        root()
        root.inner.late = Named(seen)  # replaces the other
        root()
        root.inner.late(None)  # outside its parent: only its class is known
    names = ["inner.late", "inner.blocks.0", "inner.plain.0", "inner.Named"]
    assert seen == [*names, *names, "Named"]


def test_a_data_parallel_wrapper_is_not_part_of_the_names():
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Named(seen)

        def forward(self):
            seen.append(_C.current_module())
            self.fc(None)

    class Wrapper(nn.Module):  # like DistributedDataParallel: the model is its `module`
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self):
            seen.append(_C.current_module())
            return self.module()

    with ModuleHooks(wrapped := Wrapper(Net())):
        wrapped()
    net = Net()
    with ModuleHooks(net):  # watched without its wrapper
        Wrapper(net)()
    assert seen == ["Wrapper", "Net", "fc"] * 2


def test_two_models_each_have_their_own_names():
    seen = []
    a, b = nn.Sequential(Named(seen)), nn.ModuleDict({"x": Named(seen)})
    with ModuleHooks(a), ModuleHooks(b):
        a(None)
        b["x"](None)
        nn.Sequential(Named(seen))(None)  # of neither
    assert seen == ["0", "x", "Sequential.0"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_forward_leaves_no_module_behind(error):
    class Raises(nn.Module):
        def forward(self, x):
            raise error

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(Raises()))
    watched = WatchedModules(model)
    with pytest.raises(error):
        model(torch.ones(1, 2))
    assert _C.module_depth() == 0
    seen = []
    model[1] = Named(seen)
    model(torch.ones(1, 2))
    assert seen == ["1"]
    watched.remove()


def test_threads_have_stacks_of_their_own():
    seen = {name: [] for name in "ab"}
    barrier = threading.Barrier(2)

    class Waits(nn.Module):
        def forward(self, name):
            for _ in range(20):
                barrier.wait(10)
                seen[name].append(_C.current_module())

    model = nn.ModuleDict({"a": Waits(), "b": Waits()})
    watched = WatchedModules(model)
    threads = [threading.Thread(target=model[name], args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watched.remove()
    assert seen == {"a": ["a"] * 20, "b": ["b"] * 20}


def test_removal_restores_torch_and_may_be_done_in_any_order():
    original = nn.Module.__call__
    model = nn.Linear(2, 2)
    first, second = ModuleHooks(model), WatchedModules(model)
    assert nn.Module.__call__ is not original
    first.remove()
    first.remove()
    assert nn.Module.__call__ is not original
    second.remove()
    assert nn.Module.__call__ is original


def test_hooks_may_be_removed_while_a_forward_runs():
    original = nn.Module.__call__
    seen = []

    class Removes(nn.Module):
        def forward(self, x):
            watched.remove()
            return self.next(x)

    model = Removes()
    model.next = Named(seen)
    watched = WatchedModules(model)
    model(torch.ones(1, requires_grad=True) * 2).sum().backward()
    assert nn.Module.__call__ is original and _C.module_depth() == 0


def test_compiled_and_scripted_modules_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    x = torch.randn(2, 8)
    expected = model(x), scripted(x)
    outer = nn.ModuleDict({"compiled": compiled, "scripted": scripted})
    for watched in (WatchedModules(outer), ModuleHooks(outer)):
        assert torch.equal(compiled(x), expected[0])
        assert torch.equal(scripted(x), expected[1])
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), expected[0])
        watched.remove()


# --- watched tensors -----------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    first: object
    second: object = None


Point = collections.namedtuple("Point", ["x", "y"])
BAD, GOOD = torch.tensor([1.0, NAN]), torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "keywords", "role"),
    [
        ((GOOD, BAD), {}, "input[1]"),
        ((), {"attention_mask": BAD}, "input[attention_mask]"),
        (((GOOD, [GOOD, BAD]),), {}, "input[0][1][1]"),
        (({"a": GOOD, "b": {"c": BAD}},), {}, "input[0][b][c]"),
        ((Pair(GOOD, Pair(BAD)),), {}, "input[0].second.first"),
        ((Point(GOOD, BAD),), {}, "input[0].y"),
        ((collections.OrderedDict(h=(BAD,)), 3, None, "x"), {}, "input[0][h][0]"),
        ((collections.UserDict(h=BAD),), {}, "input[0][h]"),
        ((torch.arange(3), None, BAD.to(torch.complex64)), {}, "input[2]"),
        ((torch.sparse_coo_tensor([[0, 2]], BAD, (3,)),), {}, "input[0]"),
    ],
)
def test_every_container_is_looked_into(arguments, keywords, role):
    class Takes(nn.Module):
        def forward(self, *args, **kwargs):
            return None

    model = Takes()
    watched = WatchedModules(model)
    model(*arguments, **keywords)
    sightings, births = watched.collect(1)
    watched.remove()
    assert [(s.phase, s.module, s.role) for s in sightings] == [("forward", "Takes", role)]
    assert places(births) == [("data", "forward", "Takes", role)]
    assert sightings[0].stats.nan == 1


def test_outputs_of_transformers_are_looked_into():
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Gives(nn.Module):
        def forward(self, x):
            return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(x, x / 0))

    births = births_of(model := Gives(), lambda: model(torch.ones(2)))
    assert places(births) == [("inf", "forward", "Gives", "output.hidden_states[1]")]


def test_a_container_that_holds_itself_ends():
    loop = [torch.ones(1)]
    loop.append(loop)
    assert births_of(model := nn.Identity(), lambda: model(loop)) == []


# --- births --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "kind"), [(NAN, "nan"), (INF, "inf"), (-INF, "inf")])
def test_a_fault_in_a_forward_is_born_in_its_module_and_nowhere_else(value, kind):
    model = Model()
    model.layers[1].down.register_forward_hook(put(value, index=9))
    births = births_of(model, lambda: model(torch.randn(3, 8)).sum().backward())
    first = births[0]
    assert places(births)[0] == (kind, "forward", "layers.1.down", "output[0]")
    assert all(b.kind == "nan_from_inf" and b.parent == 0 for b in births[1:])
    assert first.sighting.iteration == 3 and first.sighting.stats.first_bad == 9
    assert first.sighting.shape == [3, 8] and first.sighting.dtype == "float32"
    assert [(i.name, i.dtype, i.shape, i.stats.is_finite) for i in first.operands] == [
        ("input[0]", "float32", [3, 16], True)
    ]
    assert first.reached == [("module", "Model")]


def test_a_fault_in_a_containers_own_code_is_the_containers():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x) * torch.tensor([1.0, NAN, 1.0, 1.0]))

    model = nn.Sequential(nn.Linear(4, 4), Own())
    births = births_of(model, lambda: model(torch.randn(2, 4)))
    assert places(births) == [("nan", "forward", "1", "1.b input[0]")]


@pytest.mark.parametrize("target", ["q", "k", "v"])
def test_siblings_are_not_blamed_for_each_others_gradients(target):
    model = Model()
    getattr(model.attention, target).register_forward_pre_hook(
        lambda module, arguments: (PlantInBackward.apply(arguments[0], NAN),)
    )
    births = births_of(model, lambda: model(torch.randn(3, 8)).sum().backward())
    # The pre-hook runs inside the module's call.
    assert places(births) == [("nan", "backward", f"attention.{target}", "grad_input[0]")]
    assert births[0].node == "PlantInBackwardBackward"
    assert [(i.name, i.shape, i.stats.is_finite) for i in births[0].operands] == [
        ("grad_output[0]", [3, 8], True)
    ]


def test_a_weight_gradient_is_born_in_the_module_that_makes_it():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * PlantInBackward.apply(self.weight, NAN)

    model = nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 8))
    births = births_of(model, lambda: model(torch.randn(2, 8)).sum().backward())
    assert places(births) == [("nan", "backward", "1", "grad")]
    assert births[0].sighting.parameter == "1.weight"
    assert births[0].sighting.stats.first_bad == 3


def test_a_fault_in_a_backward_through_an_in_place_module_is_its_callers():
    model = Model()

    def between(module, arguments, output):
        return PlantInBackward.apply(output, NAN)

    nn.init.constant_(model.layers[1].up.bias, 10.0)  # all is positive: no gradient is masked
    model.layers[1].act.register_forward_hook(between)
    births = births_of(model, lambda: model(torch.randn(3, 8)).sum().backward())
    assert places(births) == [("nan", "backward", "layers.1.act", "grad_input[0]")]


def test_a_loss_outside_any_module_has_no_module():
    model = Model()

    def run():
        out = model(torch.randn(3, 8))
        (out.sum() * 0 + torch.sqrt(out.detach() * 0 + out * 0).sum()).backward()

    births = births_of(model, run)
    assert places(births) == [("nan", "loss", "", "Model grad_output[0]")]


def test_a_bad_weight_is_named():
    model = Model()
    with torch.no_grad():
        model.layers[2].up.weight[3, 1] = INF
    births = births_of(model, lambda: model(torch.randn(3, 8)).sum().backward())
    assert places(births)[0] == ("weight", "forward", "layers.2.up", "weight")
    assert births[0].sighting.parameter == "layers.2.up.weight"
    assert births[0].sighting.stats.first_bad == 25 and births[0].sighting.shape == [16, 8]


def test_a_bad_buffer_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    model[1].running_mean[2] = NAN
    births = births_of(model, lambda: model(torch.randn(3, 4)))
    assert places(births) == [("buffer", "forward", "1", "buffer")]
    assert births[0].sighting.parameter == "1.running_mean"


def test_bad_data_is_data():
    model = Model()
    x = torch.randn(3, 8)
    x[1, 2] = NAN
    births = births_of(model, lambda: model(x).sum().backward())
    assert places(births) == [("data", "forward", "Model", "input[0]")]


def test_an_additive_mask_is_no_finding():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.attention(x, x, x, attn_mask=mask)[0]

    model = Masked()
    assert births_of(model, lambda: model(torch.randn(2, 5, 8)).sum().backward()) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_checkpointed_modules_are_watched_in_the_forward_that_autograd_uses(use_reentrant, direction):
    class Checkpointed(Model):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.head(self.attention(x))

    model = Checkpointed()
    hook = put(NAN) if direction == "forward" else lambda m, a, o: PlantInBackward.apply(o, NAN)
    model.layers[1].down.register_forward_hook(hook)
    x = torch.randn(3, 8, requires_grad=True)
    births = births_of(model, lambda: model(x).sum().backward())
    role = "output[0]" if direction == "forward" else "grad_input[0]"
    found = [p for p in places(births) if p[3] == role]
    assert found == [("nan", direction, "layers.1.down", role)]
    assert places(births)[0] == found[0]


def test_modules_that_hand_on_their_input_or_a_view_of_it_are_innocent():
    class View(nn.Module):
        def forward(self, x, *_):
            return x.view(-1, 4), x

    model = nn.ModuleDict({"view": View(), "fc": nn.Linear(4, 4)})
    model["fc"].register_forward_hook(lambda m, a, o: PlantInBackward.apply(o, NAN))

    def run():
        x = torch.randn(2, 2, 4, requires_grad=True) * 1
        flat, same = model["view"](nn.Identity()(x), None, torch.arange(3))
        (model["fc"](flat).sum() + same.sum()).backward()

    assert places(births_of(model, run)) == [("nan", "backward", "fc", "grad_input[0]")]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients_is_watched(mode):
    model = Model()
    model.layers[0].up.register_forward_hook(put(NAN))

    def run():
        with mode():
            model(torch.randn(3, 8))

    assert places(births_of(model, run)) == [("nan", "forward", "layers.0.up", "output[0]")]


def test_what_is_written_in_place_between_two_modules_is_seen():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            with torch.no_grad():
                h[1, 1] = NAN
            return self.b(h)

    model = Writes()
    births = births_of(model, lambda: model(torch.randn(2, 4)))
    assert places(births) == [("nan", "forward", "Writes", "b input[0]")]


def test_each_step_is_on_its_own():
    model = Model()
    watched = WatchedModules(model)
    handle = model.layers[0].up.register_forward_hook(put(NAN))
    model(torch.randn(3, 8)).sum().backward()
    assert watched.collect(1)[1]
    handle.remove()
    watched.begin_step()
    loss = model(torch.randn(3, 8)).sum()
    loss.backward(retain_graph=True)
    assert watched.collect(2) == ([], [])
    watched.begin_step()
    (loss * NAN).backward()  # a graph from the step before
    assert watched.collect(3) == ([], [])
    watched.remove()


def test_the_watch_may_go_before_the_graph():
    model = Model()
    watched = WatchedModules(model)
    loss = model(torch.randn(3, 8)).sum()
    watched.remove()
    del watched
    loss.backward()
    assert model.head.weight.grad is not None


# --- healthy training ----------------------------------------------------------------------------


def transformer(name, attention):
    import transformers as t

    torch.manual_seed(1)
    common = {"vocab_size": 64, "attn_implementation": attention}
    if name == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **common))
    if name == "bert":
        return t.BertForMaskedLM(
            t.BertConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **common
            )
        )
    if name == "llama":
        return t.LlamaForCausalLM(
            t.LlamaConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **common
            )
        )
    return t.T5ForConditionalGeneration(
        t.T5Config(
            d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, decoder_start_token_id=0, **common
        )
    )


def train(model, steps=3, autocast=False, after=lambda i: None, before=lambda: None):
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for i in range(steps):
        ids = torch.randint(1, 64, (3, 12))
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        before()
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
            losses.append(
                model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            )
        losses[-1].backward()
        after(i)
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)
    return [loss.item() for loss in losses], torch.get_rng_state()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama"])
def test_healthy_models_have_no_births_and_train_the_same(name, attention, autocast, checkpointing):
    def run(is_watched):
        model = transformer(name, attention)
        if checkpointing:
            model.gradient_checkpointing_enable()
        if not is_watched:
            return model, train(model, autocast=autocast)
        watched = WatchedModules(model)
        found = []
        result = train(
            model,
            autocast=autocast,
            before=watched.begin_step,
            after=lambda i: found.append(watched.collect(i + 1)),
        )
        watched.remove()
        assert found == [([], [])] * 3
        return model, result

    (bare, (losses, rng)), (seen, (watched_losses, watched_rng)) = run(False), run(True)
    assert losses == watched_losses
    assert torch.equal(rng, watched_rng)
    for (name_, a), b in zip(bare.named_parameters(), seen.parameters(), strict=True):
        assert torch.equal(a, b), name_


# --- detect --------------------------------------------------------------------------------------


def test_detect_prints_one_line_where_something_is_bad(capfd):
    assert not nanlocator.detect(None, "none")
    assert not nanlocator.detect(torch.arange(3), "integers")
    assert not nanlocator.detect(torch.zeros(0), "empty")
    assert not nanlocator.detect(torch.ones(3, dtype=torch.bool), "flags")
    assert not nanlocator.detect(torch.ones(3), "good")
    assert capfd.readouterr().err == ""
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    x[1, 2], x[1, 0] = NAN, -INF
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(lambda m, a, o: nanlocator.detect(o, "hidden"))
    with ModuleHooks(model):
        model(x)
    assert capfd.readouterr().err == (
        f"nanlocator: hidden (in 0) bfloat16 [2, 3] on {x.device}: 1 NaN, 1 -Inf of 6; "
        "first bad element [1, 0]; finite |x| <= 1\n"
    )
    with pytest.raises(FloatingPointError, match=rf"all float32 \[2\] on {x.device}: 2 NaN of 2"):
        nanlocator.detect(torch.full((2,), NAN), "all", raise_error=True)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_detect_scans_the_gradient_too(capfd, is_leaf):
    x = torch.ones(3, requires_grad=True)
    h = x if is_leaf else x * 2
    assert not nanlocator.detect(h, "h", backward=True)
    (h * torch.tensor([1.0, INF, 1.0])).sum().backward()
    error = capfd.readouterr().err
    assert f"gradient of h float32 [3] on {x.device}: 1 +Inf of 3; first bad element [1]" in error
    assert error.count("\n") == 1
    assert x.grad[0] == (1 if is_leaf else 2)
