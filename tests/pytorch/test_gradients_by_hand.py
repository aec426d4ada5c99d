"""Loops that compute gradients or change weights themselves: ``torch.autograd.grad`` and
``parameter.grad = ...``, and sharpness-aware minimisation, which moves the weights between two backwards."""

import pytest
import torch
from torch import nn

import nanlocator

BAD_STEP = 3


def two_headed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def losses_of(model, fault):
    """Losses of two tasks. The first loss or its gradient is bad."""
    first, second = model(torch.randn(8, 4)).unbind(1)
    if fault == "loss":
        first = torch.log(first - 100)
    elif fault == "gradient":
        first = (first * 0).sqrt()
    return first.mean(), second.square().mean()


def set_gradients(model, losses):
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(sum(losses), parameters), strict=True):
        p.grad = g


def project_gradients(model, losses):
    """Removes from one task's gradients the component that conflicts with the other's (PCGrad)."""
    parameters = list(model.parameters())
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
    for p, a, b in zip(parameters, first, second, strict=True):
        dot = (a * b).sum()
        if dot < 0:
            a = a - dot / b.square().sum().clamp_min(1e-12) * b
        p.grad = a + b


def sum_gradients_where_nobody_scans(model, losses):
    parameters = list(model.parameters())
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
    with torch.no_grad():
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = a + b


WAYS = [set_gradients, project_gradients]


def train(way, fault, watches=True, clips=False):
    model = two_headed()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch = nanlocator.watch(model, optimizer, on_bad="skip") if watches else None
    for step in range(1, 6):
        optimizer.zero_grad()
        way(model, losses_of(model, fault if step == BAD_STEP else ""))
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if watch is not None:
        watch.remove()
    return watch, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("fault", "operator", "line"),
    [
        ("loss", "aten::log", "first = torch.log(first - 100)"),
        ("gradient", "aten::div.Tensor", "first = (first * 0).sqrt()"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_the_program_has_set_are_scanned_and_their_step_is_explained(
    way, fault, operator, line, clips
):
    watch, weights = train(way, fault, clips=clips)
    (verdict,) = watch.verdicts
    (origin,) = verdict["origins"]
    assert (verdict["iteration"], origin["operator"], origin["cause"]) == (
        BAD_STEP,
        operator,
        "operator_undefined",
    )
    assert origin["code"]["text"] == line
    assert (verdict["rerun"]["reproduced"], verdict["rerun"]["not_restored"]) == (True, [])
    assert all(weight.isfinite().all() for weight in weights)  # on_bad="skip"


@pytest.mark.parametrize("way", [*WAYS, sum_gradients_where_nobody_scans])
def test_healthy_steps_are_the_same_bit_for_bit(way):
    watch, watched = train(way, "")
    assert watch.verdicts == []
    assert all(map(torch.equal, watched, train(way, "", watches=False)[1]))


def test_a_step_of_which_each_optimizer_uses_a_part_is_scanned_once():
    """As with an actor and a critic: a clip between the two updates changes gradients already scanned."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in (actor, critic)]
    watch = nanlocator.watch([actor, critic], optimizers, on_bad="skip")
    for step in range(1, 6):
        x = torch.randn(8, 4)
        loss = actor(x).mean() + critic(x).mean() * (float("nan") if step == BAD_STEP else 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for model, optimizer in zip((actor, critic), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    watch.remove()
    assert [verdict["iteration"] for verdict in watch.verdicts] == [BAD_STEP]
    assert all(p.isfinite().all() for model in (actor, critic) for p in model.parameters())


def test_gradients_of_two_optimizers_that_come_of_one_call_are_scanned_together():
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in models]
    watch = nanlocator.watch(models, optimizers, on_bad="skip")
    parameters = [p for model in models for p in model.parameters()]
    for step in range(1, 6):
        first, second = (model(torch.randn(8, 4)).mean() for model in models)
        if step == BAD_STEP:
            second = (second * 0).sqrt()
        for p, g in zip(parameters, torch.autograd.grad(first + second, parameters), strict=True):
            p.grad = g
        for optimizer in optimizers:
            optimizer.step()
    watch.remove()
    assert [verdict["iteration"] for verdict in watch.verdicts] == [BAD_STEP]
    assert all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_catches_the_error_and_zeroes_its_gradients_goes_on(way):
    model = two_headed()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch = nanlocator.watch(model, optimizer)
    for step in range(1, 6):
        try:
            optimizer.zero_grad()
            way(model, losses_of(model, "gradient" if step == BAD_STEP else ""))
            optimizer.step()
        except nanlocator.NonFiniteGradientError:
            assert step == BAD_STEP
            optimizer.zero_grad()
    watch.remove()
    assert len(watch.verdicts) == 1


def test_a_loop_that_continues_with_a_bad_norm_is_told_once():
    model = two_headed()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    for step in range(1, 6):
        loss = sum(losses_of(model, "gradient" if step == BAD_STEP else ""))
        optimizer.zero_grad()
        loss.backward()
        if not torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            continue
        optimizer.step()
    watch.remove()
    assert len(watch.verdicts) == 1


def test_a_model_that_writes_to_its_own_weights_in_forward_is_restored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    for step in range(1, BAD_STEP + 1):
        output = model(torch.arange(8))
        (torch.log(output - 100) if step == BAD_STEP else output).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.remove()
    (verdict,) = watch.verdicts
    assert verdict["rerun"]["not_restored"] == [] and verdict["job"]["weights_finite"] is True


def sharpness_aware(bad_pass):
    """Verdicts by the number of the loop's step."""
    model = two_headed()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    found = {}
    for step in range(1, BAD_STEP + 1):
        for name in ("first", "second"):
            sum(losses_of(model, "loss" if (name, step) == (bad_pass, BAD_STEP) else "")).backward()
            with torch.no_grad():
                if name == "first":
                    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                    moved = [p.grad * (0.05 / norm) + 0 * norm for p in model.parameters()]
                    if (name, step) == (bad_pass, BAD_STEP):
                        moved[0] = moved[0] * torch.nan
                for p, by in zip(model.parameters(), moved, strict=True):
                    p.add_(by) if name == "first" else p.sub_(by)
            if name == "second":
                optimizer.step()
            optimizer.zero_grad()
            found[name, step] = watch.verdicts[len([v for each in found.values() for v in each]) :]
    watch.remove()
    return found


def test_weights_that_the_program_moves_between_passes_are_not_blamed():
    found = sharpness_aware("second")
    assert [key for key, verdicts in found.items() if verdicts] == [("second", BAD_STEP)]
    ((verdict,),) = (verdicts for verdicts in found.values() if verdicts)
    assert [origin["operator"] for origin in verdict["origins"]] == ["aten::log"]
    (not_restored,) = verdict["rerun"]["not_restored"]
    assert not_restored.startswith("the weights: the program changed them")


def test_weights_that_a_bad_gradient_has_spoilt_before_it_was_scanned_are_not_blamed():
    verdict = sharpness_aware("first")["first", BAD_STEP][0]
    assert [origin["cause"] for origin in verdict["origins"]] == ["unknown"]
    assert any("weights changed after it used them" in note for note in verdict["notes"])


def update_in_backward(fault, watches=True, on_bad="report"):
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = two_headed()
    optimizers = {p: torch.optim.SGD([p], 1e-2) for p in model.parameters()}

    def use(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(use)
    watch = nanlocator.watch(model, optimizers.values(), on_bad=on_bad) if watches else None
    try:
        for step in range(1, BAD_STEP + 1):
            sum(losses_of(model, fault if step == BAD_STEP else "")).backward()
    finally:
        if watch is not None:
            watch.remove()
    return watch, [p.detach().clone() for p in model.parameters()]


def test_optimizers_that_step_within_backward_are_scanned_where_they_use_their_gradients():
    watch, _ = update_in_backward("gradient")
    (verdict,) = watch.verdicts
    assert verdict["iteration"] == BAD_STEP and verdict["rerun"]["done"] is False
    assert verdict["spread"]["first_seen"] == "grad_local"
    (origin,) = verdict["origins"]
    assert (origin["phase"], origin["cause"]) == ("grad_local", "unknown")
    assert any("steps during its backward pass" in note for note in verdict["notes"])
    assert (verdict["job"]["weights_updated"], verdict["job"]["weights_finite"]) == (True, None)
    assert all(map(torch.equal, update_in_backward("")[1], update_in_backward("", watches=False)[1]))


def test_optimizers_that_step_within_backward_stop_after_it():
    with pytest.raises(nanlocator.NonFiniteGradientError):
        update_in_backward("gradient", on_bad="stop")
