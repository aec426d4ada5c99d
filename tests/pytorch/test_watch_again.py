"""A notebook's second run, a later optimizer, the program's own numbers of steps: what is watched."""

import gc
import threading

import pytest
import torch
from torch import nn

import nanlocator
from nanlocator.loops.watch import Watch


@pytest.fixture(autouse=True)
def nothing_is_watched():
    yield
    if (watch := Watch.latest()) is not None:
        watch.remove()


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), 1e-3)


def train(model, optimizer, steps=3, *, bad=None):
    for step in range(1, steps + 1):
        x = torch.randn(2, 4)
        if step == bad:
            x[1, 2] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def watched_and_trained():
    model, optimizer = model_and_optimizer()
    nanlocator.watch(model, optimizer)
    train(model, optimizer)
    return model, optimizer


def is_finite(model):
    return all(bool(each.isfinite().all()) for each in model.parameters())


def test_a_second_watch_of_the_same_model_takes_over(capfd):
    model, optimizer = watched_and_trained()
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    train(model, optimizer, bad=2)
    assert is_finite(model) and [each.step for each in watch.verdicts] == [2]
    assert "no longer" not in capfd.readouterr().err


def test_a_cell_that_runs_again_watches_its_new_model_in_silence(capfd):
    watched_and_trained()
    model, optimizer = model_and_optimizer()
    nanlocator.watch(model, optimizer)
    assert capfd.readouterr().err == ""
    with pytest.raises(nanlocator.NonFiniteGradientError):
        train(model, optimizer, bad=2)
    assert is_finite(model)


def test_a_model_that_is_no_longer_watched_is_named(capfd):
    _first, _ = watched_and_trained()
    model, optimizer = model_and_optimizer()
    nanlocator.watch(model, optimizer)
    assert "no longer what it watched before (Sequential): to watch both" in capfd.readouterr().err


def test_a_refused_watch_leaves_the_one_before():
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    with pytest.raises(nanlocator.UsageError, match="not a str"):
        nanlocator.watch(model, "adam")
    train(model, optimizer, bad=2)
    assert len(watch.verdicts) == 1


@pytest.mark.parametrize("is_early", [True, False], ids=["before the first step", "after some steps"])
def test_an_optimizer_that_is_constructed_later_joins(is_early):
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer)
    if not is_early:
        train(model, optimizer)
    del optimizer
    gc.collect()
    with pytest.raises(nanlocator.NonFiniteGradientError):
        train(model, torch.optim.Adam(model.parameters()), bad=3)
    assert is_finite(model)
    assert watch.verdicts[0].step == (3 if is_early else 6)


def test_the_first_step_of_a_later_optimizer_is_scanned_and_left_out_under_skip():
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    later = torch.optim.Adam(model.parameters())
    train(model, later, bad=1)
    assert is_finite(model) and len(watch.verdicts) == 1


def test_an_optimizer_of_another_model_is_reported_once(capfd):
    model, optimizer = model_and_optimizer()
    nanlocator.watch(model, optimizer)
    other, its_optimizer = model_and_optimizer()
    train(model, optimizer)
    train(other, its_optimizer)
    said = capfd.readouterr().err
    assert said.count("SGD trains parameters that no watched model holds: its gradients are not scanned") == 1


def test_a_compiled_update_is_as_it_was():
    model, optimizer = model_and_optimizer()
    nanlocator.watch(model, optimizer)
    other, its_optimizer = model_and_optimizer()
    other(torch.ones(2, 4)).sum().backward()
    torch.compile(its_optimizer.step, backend="eager")()
    assert is_finite(other)


def test_steps_have_the_numbers_of_the_program():
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer, step=12001, on_bad="report")
    train(model, optimizer, bad=2)
    assert (watch.verdicts[0].step, watch.step) == (12002, 12004)
    watch.begin_at(0)
    assert watch.step == 0
    train(model, optimizer, 1)
    assert watch.step == 1


def test_several_updates_of_an_iteration_have_its_number():
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    for watch.step in range(25, 28):
        train(model, optimizer, 2, bad=2 if watch.step == 26 else None)
    assert [each.step for each in watch.verdicts] == [26]
    with pytest.raises(nanlocator.UsageError, match="0 or more"):
        watch.step = -1


def test_a_watch_and_its_verdicts_can_be_read():
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    assert repr(watch) == f"<Watch: step 1, no finding, {watch.run_dir}>"
    train(model, optimizer, bad=2)
    (verdict,) = watch.verdicts
    assert repr(watch) == f"<Watch: step 4, 1 finding, {watch.run_dir}>"
    assert verdict.origins[0].cause == verdict["origins"][0]["cause"] == "bad_input"
    assert verdict.decision.kind == "NONE_NEEDED"
    assert repr(verdict).startswith("<nanlocator WARNING[bad_data] ")
    assert verdict._repr_html_().startswith("<pre>nanlocator WARNING[bad_data]")
    with pytest.raises(AttributeError, match="has no 'origin'; it has version, "):
        _ = verdict.origin


def test_a_model_that_trains_on_another_thread_is_reported(capfd):
    model, optimizer = model_and_optimizer()
    watch = nanlocator.watch(model, optimizer, on_bad="report")
    thread = threading.Thread(target=train, args=(model, optimizer), kwargs={"bad": 2})
    thread.start()
    thread.join()
    assert "Sequential is called on another thread than nanlocator.watch was" in capfd.readouterr().err
    assert "another thread" in str(watch.verdicts[0].notes)
