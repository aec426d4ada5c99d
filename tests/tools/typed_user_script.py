"""Programs like users', for mypy with all its checks (tools/lint, test_types.py). They are never executed."""

import os
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from typing_extensions import assert_type

import nanlocator
import nanlocator.deepspeed
import nanlocator.megatron
from nanlocator.driver import Adapter, Driver, Pass
from nanlocator.engine.options import Options
from nanlocator.rerun import ObjectState
from nanlocator.transformers import NanLocatorCallback, no_autocast

Findings = list[nanlocator.Verdict]


def plain_loop(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]
) -> Findings:
    watch = nanlocator.watch(model, optimizer, on_bad="report", gather_deadline=10, output_dir=os.curdir)
    assert_type(watch, nanlocator.Watch)
    for batch in batches:
        loss = model(batch).sum()
        nanlocator.detect(loss, "the loss", raise_error=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with watch.evaluating() as found:
        model(batches[0])
    watch.register_state("the scaler", GradScaler())
    watch.remove()
    assert_type(watch.run_dir, str)
    return watch.verdicts + found


def several(generator: torch.nn.Module, critic: torch.nn.Module, optimizers: list[torch.optim.SGD]) -> None:
    options: Options = {"on_bad": "skip", "level": None, "check_params": True}
    nanlocator.watch({"generator": generator, "critic": critic}, optimizers, **options)


def wrapped_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    scaler = GradScaler()
    locating = nanlocator.LocatingOptimizer(optimizer, model, grad_scaler=scaler, on_bad="recover")
    torch.optim.lr_scheduler.StepLR(locating, step_size=10)
    norm = locating.clip_grad_norm(1.0)
    try:
        locating.step()
    except nanlocator.NonFiniteGradientError as error:
        assert_type(error.verdict, nanlocator.Verdict)
    except nanlocator.Error:
        raise SystemExit(1) from None
    return norm


def megatron(model_chunks: list[torch.nn.Module], optimizer: Any) -> Findings:
    locator = nanlocator.megatron.install(model_chunks, optimizer, on_bad="stop", level="modules")
    assert_type(locator, nanlocator.megatron.MegatronLocator)
    assert_type(locator.dismissed, int)
    return locator.verdicts


def deepspeed(engine: Any) -> Findings:
    locator = nanlocator.deepspeed.install(engine, on_bad="report", rerun=False)
    assert_type(locator.run_dir, str)
    return locator.verdicts


def trainer(model: torch.nn.Module) -> NanLocatorCallback:
    no_autocast(model).remove()
    callback = NanLocatorCallback(on_bad="report", output_dir="runs")
    assert_type(callback.verdicts, Findings)
    return callback


class Reinforcing(Adapter):
    """A program's own integration."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.models = [model]
        self.parameters = list(model.named_parameters())

    def gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        found = [(i, p.grad) for i, (_, p) in enumerate(self.parameters) if p.grad is not None]
        return [i for i, _ in found], [gradient for _, gradient in found]


def own_integration(driver: Driver, step_pass: Pass, sampler: ObjectState, loss: torch.Tensor) -> None:
    driver.add_state("the sampler", sampler)
    driver.begin_pass(step_pass)
    driver.scan("grad_local", 0, "grad", [0], [loss])
    if not driver.is_rerunning:
        driver.end_step()
