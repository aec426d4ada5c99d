"""``nanlocator.watch``: unchanged loops, re-run bit for bit, and faults located in them."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from allocated import LIBRARY, Allocated
from torch import nn
from training_loops import LOOPS, Gpt, cross_entropy, cross_entropy_of, draw

import nanlocator
from nanlocator import LocatingOptimizer, NonFiniteGradientError
from nanlocator.calls.modules import ModuleHooks
from nanlocator.loops.recorder import StepRecorder


@pytest.fixture(autouse=True)
def nothing_is_watched():
    yield
    recorder = StepRecorder._active
    if recorder is not None:
        recorder._follower.remove()


def trained(loop, **options):
    """Losses, weights and buffers, and the final state of the generator."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    watches = []

    def watch(models, optimizers):
        if options:
            watches.append(nanlocator.watch(models, optimizers, **options))

    modules, steps = loop(watch)
    losses = [loss.detach().clone() for loss in steps]
    for each in watches:
        each.remove()
    return [*losses, *(t.clone() for t in modules.state_dict().values()), torch.rand(1)]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_step_is_executed_again_bit_identical_and_training_does_not_change(loop, capfd):
    alone, watched = trained(LOOPS[loop]), trained(LOOPS[loop], rerun="always")
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert capfd.readouterr().err == ""  # no gradient has different bits, and every step could be re-run


class Norm(nn.Module):
    def forward(self, x):
        return x / x.square().sum(-1, keepdim=True).sqrt()


class Root(nn.Module):
    """Its derivative has a pole at zero."""

    def forward(self, x):
        return x.abs().sqrt()


class Log(nn.Module):
    def forward(self, x):
        return x - torch.log(x.clamp(min=0).sum(-1, keepdim=True))


class Exp(nn.Module):
    def forward(self, x):
        return torch.exp(x * 100)


def model_with(module):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 2))


def spoil(model, weight=0.0, bias=0.0):
    with torch.no_grad():
        model[0].weight.fill_(weight)
        model[0].bias.fill_(bias)


FAULTS = {
    "zero_norm": (lambda: model_with(Norm()), lambda m: spoil(m), None),
    "root_at_zero": (lambda: model_with(Root()), lambda m: spoil(m), None),
    "log_of_zero": (lambda: model_with(Log()), lambda m: spoil(m, bias=-1.0), None),
    "overflow": (lambda: model_with(Exp()), lambda m: spoil(m, bias=50.0), None),
    "bad_weight": (
        lambda: model_with(nn.Tanh()),
        lambda m: m[0].weight.detach().numpy().fill(math.nan),
        None,
    ),
    "empty_mask": (lambda: model_with(nn.Tanh()), None, lambda out: (out * 0).sum() / (out > 9).sum()),
    "log_loss": (lambda: model_with(nn.Tanh()), None, lambda out: torch.log(F.relu(-out.abs())).mean()),
    "root_of_loss": (lambda: model_with(nn.Tanh()), None, lambda out: (out - out.detach()).sum().sqrt()),
}


def described(verdict):
    (origin,) = verdict["origins"]
    code = origin.get("code") or {}
    return {
        **{key: origin[key] for key in ("module", "operator", "cause", "phase", "parameter", "tensor")},
        "function": code.get("function"),
        "text": code.get("text"),
        "reproduced": verdict["rerun"]["reproduced"],
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loop_without_a_closure_gets_the_verdict_of_one_with_a_closure(fault):
    make, plant, loss_of = FAULTS[fault]
    loss_of = loss_of or (lambda out: out.square().mean())
    batch = torch.randn(6, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(1))

    def bad_step(optimizer, model):
        optimizer.zero_grad()
        out = model(batch)
        loss = loss_of(out)
        loss.backward()
        return loss

    with_closure = make()
    optimizer = LocatingOptimizer(torch.optim.SGD(with_closure.parameters(), 0.1), with_closure)
    if plant:
        plant(with_closure)
    with pytest.raises(NonFiniteGradientError) as expected:
        optimizer.step(lambda: bad_step(optimizer, with_closure))

    without = make()
    inner = torch.optim.SGD(without.parameters(), 0.1)
    nanlocator.watch(without, inner)
    if plant:
        plant(without)
    bad_step(inner, without)
    with pytest.raises(NonFiniteGradientError) as raised:
        inner.step()
    assert described(raised.value.verdict) == described(expected.value.verdict)


def watched_gpt(**options):
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, nanlocator.watch(model, optimizer, **options)


def empty_loss_of(model, tokens, labels):
    return cross_entropy(model(tokens), torch.full_like(labels, -100))


def empty_batch_loss(model):
    return empty_loss_of(model, *draw())


def asked_by_clip(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def asked_by_a_norm(model, optimizer):
    torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


def used(model, optimizer):
    optimizer.step()


def thrown_away(model, optimizer):
    optimizer.zero_grad()


def thrown_away_by_the_model(model, optimizer):
    model.zero_grad()


@pytest.mark.parametrize("ask", [asked_by_clip, asked_by_a_norm, used, thrown_away, thrown_away_by_the_model])
def test_bad_gradients_are_found_where_the_loop_first_could(ask):
    model, optimizer, _ = watched_gpt()
    cross_entropy(model(draw()[0]), draw()[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    empty_batch_loss(model).backward()
    with pytest.raises(NonFiniteGradientError) as raised:
        ask(model, optimizer)
    (origin,) = raised.value.verdict["origins"]
    assert origin["cause"] == "empty_loss_mask" and raised.value.verdict["iteration"] == 2
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_loop_that_throws_bad_gradients_away_gets_a_verdict_and_goes_on():
    """Like verl's engines."""
    model, optimizer, watch = watched_gpt(on_bad="report")
    for step in range(4):
        loss = empty_batch_loss(model) if step == 1 else cross_entropy(model(draw()[0]), draw()[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
    assert [verdict["iteration"] for verdict in watch.verdicts] == [2]
    assert all(p.isfinite().all() for p in model.parameters())


def test_what_is_not_executed_again_is_said_and_the_next_bad_step_is_traced():
    model, optimizer, watch = watched_gpt(on_bad="skip")

    inner = []  # results that no result of the model passes on
    model.blocks[0].register_forward_hook(lambda *call: inner.append(call[-1]))
    for _ in range(2):
        model(draw()[0])
        zero = (inner.pop() * 0).sum()
        (zero / zero).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = watch.verdicts
    assert first["rerun"]["done"] is False
    assert any("cannot be executed again" in note for note in first["notes"])
    assert second["origins"][0]["operator"].startswith("aten::div")


def test_an_input_that_is_overwritten_is_named_and_nothing_is_said_to_repeat():
    model, optimizer, _ = watched_gpt()
    tokens, _ = draw()
    tokens.belongs_to = "the program"  # such a tensor is not copied: its other state is unknown
    loss = model(tokens)["logits"].sum() * math.nan
    loss.backward()
    tokens.fill_(1)
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step()
    assert any("written in place" in each for each in raised.value.verdict["rerun"]["not_restored"])


def test_memory_for_operators_outside_of_modules_is_limited(monkeypatch):
    monkeypatch.setenv("NANLOCATOR_RECORDED_BYTES", "1000")
    model, optimizer, watch = watched_gpt(on_bad="skip")
    teacher = torch.randn(4, 6, 40)
    (F.mse_loss(model(draw()[0])["logits"], teacher) * math.nan).backward()
    optimizer.step()
    (verdict,) = watch.verdicts
    assert any("NANLOCATOR_RECORDED_BYTES" in note for note in verdict["notes"])


def test_an_exception_between_forward_and_step_leaves_nothing_of_the_step():
    model, optimizer, watch = watched_gpt()
    for interruption in (ValueError, KeyboardInterrupt):

        def fail(*_, raised=interruption):
            raise raised

        handle = model.head.register_forward_hook(fail)
        with pytest.raises(interruption):
            model(draw()[0])
        handle.remove()
        cross_entropy(model(draw()[0]), draw()[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watch.verdicts == []
    empty_batch_loss(model).backward()
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step()
    assert raised.value.verdict["rerun"]["reproduced"] is True


def live_tensors():
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def test_two_hundred_steps_keep_no_tensor():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = nanlocator.watch(model, optimizer)
    mean, losses = torch.zeros(()), []

    def train(steps):
        nonlocal mean
        for _ in range(steps):
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = 0.9 * mean + 0.1 * loss.detach()
            losses.append(loss)  # the program leaks the loss, and nothing else
            with torch.no_grad():
                model(torch.randn(3, 4)).sum()

    train(20)
    before, (_, events) = live_tensors(), watch._recorder._engine.size()
    train(200)
    assert live_tensors() - before <= 200
    assert watch._recorder._engine.size()[1] == events


def test_two_models_have_names_of_their_own():
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (critic, actor)]
    nanlocator.watch({"critic": critic, "actor": actor}, optimizers)
    with torch.no_grad():
        actor.weight[1, 2] = math.nan
    (critic(torch.randn(3, 4)).mean() + actor(torch.randn(3, 4)).mean()).backward()
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizers[0].step()
    (origin,) = raised.value.verdict["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "actor.weight")


def test_hooks_that_outlive_the_watch_below_them_leave_nothing_either():
    before = nn.Module.__call__
    model, _, watch = watched_gpt()
    hooks = ModuleHooks(model)
    watch.remove()
    hooks.remove()
    assert nn.Module.__call__ is before
    hooks = ModuleHooks(model)
    _model, _, watch = watched_gpt()
    hooks.remove()
    watch.remove()
    assert nn.Module.__call__ is before


def test_removed_it_leaves_everything_as_it_was():
    def patched():
        return (
            nn.Module.__call__,
            nn.Module.zero_grad,
            torch.autograd._engine_run_backward,
            vars(nn.utils.clip_grad)["_get_total_norm"],
            nn.utils.get_total_norm,
            torch.amp.GradScaler.unscale_,
            torch.amp.GradScaler.scale,
        )

    before = patched()
    model, optimizer, watch = watched_gpt()
    watch.remove()
    watch.remove()
    assert patched() == before
    assert "step" not in vars(optimizer) and "zero_grad" not in vars(optimizer)
    empty_batch_loss(model).backward()
    optimizer.step()


def test_what_cannot_be_watched_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(nanlocator.UsageError, match="needs a model"):
        nanlocator.watch([], optimizer)
    with pytest.raises(nanlocator.UsageError, match="not a str"):
        nanlocator.watch(model, "adam")
    with pytest.raises(nanlocator.UsageError, match="does its own scans"):
        nanlocator.watch(model, LocatingOptimizer(optimizer, model))


@pytest.mark.host
@pytest.mark.skipif(not LIBRARY.exists(), reason=f"{LIBRARY.name} is built with the C++ tests")
@pytest.mark.parametrize("loss_is_inside", [True, False])
def test_a_healthy_step_takes_no_more_memory(loss_is_inside):
    torch.manual_seed(0)
    allocated = Allocated()
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(2000, 256), *layers, nn.Linear(256, 2000))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    whole = WithLoss()

    def step():
        tokens = torch.randint(0, 2000, (4, 128))
        if loss_is_inside:
            loss = whole(tokens)
        else:
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def peak():
        step()
        before = allocated.current()
        allocated.restart_peak()
        step()
        return allocated.peak() - before

    alone = peak()
    nanlocator.watch(whole, optimizer)
    assert peak() <= 1.02 * alone


@pytest.mark.parametrize(("clips", "iteration"), [(True, 3), (False, 2)])
def test_a_step_that_had_begun_before_is_counted_and_never_scanned_too_late(clips, iteration):
    """Lightning's optimizers step around the first forward, which is when nanlocator attaches to a script."""
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watches, losses = [], [cross_entropy_of, cross_entropy_of, empty_loss_of]

    def closure():
        if not watches:
            watches.append(nanlocator.watch(model, optimizer))
        loss = losses.pop(0)(model, *draw())
        optimizer.zero_grad()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    assert raised.value.verdict["iteration"] == iteration


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_names_the_operator_of_a_nan_in_logits(grad_mode):
    model = model_with(Log())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer)
    spoil(model, bias=1.0)
    with watch.evaluating() as verdicts, grad_mode():
        model(torch.randn(3, 4))
        assert verdicts == []
        spoil(model, bias=-1.0)
        with pytest.raises(NonFiniteGradientError) as raised:
            model(torch.randn(3, 4))
    (origin,) = raised.value.verdict["origins"]
    assert (origin["operator"], origin["module"], origin["phase"]) == ("aten::log", "1", "forward")
    assert raised.value.verdict["iteration"] == 2
    assert "it reached the model's output[0]" in origin["evidence"]
    spoil(model, bias=1.0)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    assert watch.verdicts == []


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_report_says_whether_the_loss_scaler_leaves_the_update_out(is_scaled):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, enabled=is_scaled)
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    scaler.scale(model(torch.full((3, 4), math.nan)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    (verdict,) = watch.verdicts
    assert verdict["job"]["framework_skips_update"] == is_scaled == bool(model.weight.isfinite().all())


def test_evaluation_leaves_masks_and_generators_alone():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return F.dropout(self.linear(x), 0.5).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)

    torch.manual_seed(0)
    model = Masked()
    watch = nanlocator.watch(model, torch.optim.SGD(model.parameters(), 0.1), on_bad="report")
    torch.manual_seed(1)
    alone = [model(torch.ones(4, 4)) for _ in range(2)]
    torch.manual_seed(1)
    with watch.evaluating() as verdicts:
        watched = [model(torch.ones(4, 4)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True)) and verdicts == []


def test_parameters_that_are_added_later_are_watched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    nanlocator.watch(model, optimizer)
    model(torch.randn(3, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    model(torch.randn(3, 4)).mean().backward()
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step()
    (origin,) = raised.value.verdict["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "0.weight")


def test_a_skip_holds_for_every_optimizer_of_the_same_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in model]
    watch = nanlocator.watch(model, optimizers, on_bad="skip")
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    model(torch.full((3, 4), math.inf)).mean().backward()
    optimizers[0].step()
    model(torch.randn(3, 4))  # for the log
    optimizers[1].step()
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    assert len(watch.verdicts) == 1


def test_parameters_that_are_added_between_clip_and_step_take_no_decision_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    for batch in (torch.full((3, 4), math.inf), torch.randn(3, 4)):
        before = model[1].weight.detach().clone()
        model(batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[1].weight, before) == (not batch.isfinite().all())
    assert [verdict["iteration"] for verdict in watch.verdicts] == [1]


@pytest.mark.parametrize("is_bad", [False, True])
def test_nothing_keeps_the_model_of_a_watch_that_was_removed(is_bad):
    def of_a_run():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        watch = nanlocator.watch(model, optimizer, on_bad="report")
        for _ in range(2):
            (model(torch.randn(2, 4)).sum() * (math.nan if is_bad else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.remove()
        return weakref.ref(model), weakref.ref(optimizer)

    model, optimizer = of_a_run()
    gc.collect()
    assert model() is None and optimizer() is None


@pytest.mark.host
def test_a_forked_worker_of_a_data_loader_records_nothing():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.tensor(float(StepRecorder._active is not None))

    *_, watch = watched_gpt()
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork")
    assert [batch.item() for batch in loader] == [0.0, 0.0]
    assert StepRecorder._active is watch._recorder


def test_a_chain_of_fifteen_thousand_operators_is_forgotten_one_by_one():
    """Each event holds the one before: freeing them must not recurse."""
    model, optimizer, watch = watched_gpt()
    value = model(draw()[0])["logits"].mean()
    for _ in range(15_000):
        value = value * 1.0
    value.backward()
    del value
    optimizer.step()
    assert watch.verdicts == [] and watch._recorder._engine.size()[1] == 0


@pytest.mark.host
def test_steps_on_weights_that_a_bad_update_spoilt_are_counted_and_a_new_fault_is_located(capfd):
    model = nn.Linear(4, 4)
    good = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    for step in range(1, 9):
        if step == 6:
            model.load_state_dict(good)
        divisor = torch.tensor(0.0 if step in (2, 7) else 1.0)
        (model(torch.ones(2, 4)).sum() / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.remove()
    located = [verdict["iteration"] for verdict in watch.verdicts if verdict["origins"]]
    assert located == [2, 7] and len(watch.verdicts) == 6
    told = [line for line in capfd.readouterr().err.splitlines() if "counted, not located" in line]
    assert len(told) == 2 and "as after step 2," in told[0] and "as after step 7," in told[1]
