"""What a driver says of the step that runs, for adapters that keep nothing of it."""

import weakref

import pytest
import torch
from torch import nn

from nanlocator.engine.options import resolve_options
from nanlocator.loops.plain import PlainAdapter, PlainPass, plain_driver


@pytest.fixture
def driver():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    adapter = PlainAdapter([optimizer], {"": model})
    driver = plain_driver(adapter, resolve_options({}, "optimizer"), None, lambda scaler: None)
    model(torch.ones(3, 2)).sum().backward()
    yield driver
    driver.close()


def test_a_pass_is_the_drivers_until_it_is_judged(driver):
    step_pass = PlainPass(driver.adapter)
    driver.begin_pass(step_pass)
    assert driver.step_pass is step_pass and not driver.has_ended_pass
    driver.end_pass([])
    assert driver.step_pass is None and driver.has_ended_pass
    driver.end_step()
    assert not driver.has_ended_pass


def test_an_exception_leaves_nothing_of_a_pass(driver):
    step_pass = PlainPass(driver.adapter)
    data = weakref.ref(step_pass)
    with pytest.raises(KeyError), driver.abandoning():
        driver.begin_pass(step_pass)
        raise KeyError
    del step_pass
    assert driver.step_pass is None and data() is None


def test_an_agreement_lasts_until_it_is_finished_or_the_step_is_abandoned(driver):
    for end in (driver.finish_agreement, driver.abandon):
        driver.scan_gradients()
        driver.start_agreement()
        assert driver.is_agreeing
        end()
        assert not driver.is_agreeing


def test_parameters_that_change_end_no_step(driver):
    driver.begin_pass(PlainPass(driver.adapter))
    driver.end_pass([])
    driver.take_parameters_again()
    assert driver.has_ended_pass
