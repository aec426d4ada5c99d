"""Changes by a test in a rank's process before the rank builds and trains: data drawn elsewhere, and a
nanlocator whose re-run does not restore one state after the first pass.

The latter is the control of "the re-run has the same bits": a state whose omission changed nothing would not
have been tested. It replaces names inside nanlocator; a missing name is an error.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import sys
from collections.abc import Callable

import numpy
import torch
from gpt_training import Trainer

PREPARATIONS: dict[str, Callable[..., None]] = {}


def prepare(preparations: list[dict]) -> None:
    """Calls each: {"name": one of PREPARATIONS, its keyword arguments}."""
    for options in preparations:
        PREPARATIONS[options["name"]](**{key: value for key, value in options.items() if key != "name"})


def _preparation(function: Callable[..., None]) -> Callable[..., None]:
    PREPARATIONS[function.__name__] = function
    return function


def _replace(owner: object, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replaces an attribute, which must exist, by `make(attribute)`."""
    inner = getattr(owner, name)
    setattr(owner, name, functools.wraps(inner)(make(inner)))


@_preparation
def environment(**variables: str) -> None:
    """For options of nanlocator that exist only as environment variables."""
    os.environ.update(variables)


@_preparation
def opaque_engine(folder: str) -> None:
    """Linear layers, norms, attention and cross entropy off the dispatcher: opaque_engine.py in `folder`."""
    sys.path.insert(0, folder)
    importlib.import_module("opaque_engine").replace_megatrons()


@_preparation
def compiled_fusions() -> None:
    """Compiles the functions that Megatron's `jit_fuser` decorates, as on GPUs; cpu_platform imports them
    uncompiled."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its workers would be forks of ranks with threads
    from megatron.core.fusions import fused_bias_dropout, fused_bias_gelu
    from torch._inductor import config

    # Scalar code: to try an instruction set, each rank imports torch in an interpreter of its own.
    config.cpp.vec_isa_ok = False
    for module, names in (
        (fused_bias_gelu, ("bias_gelu", "bias_gelu_back")),
        (fused_bias_dropout, ("bias_dropout_add_fused_train",)),
    ):
        for name in names:
            setattr(module, name, torch.compile(getattr(module, name)))


# ---- the step ----------------------------------------------------------------------------------------


@_preparation
def note_each_forward() -> None:
    """Adds a line to `planted` for each forward of a microbatch: how often a step was executed."""

    def make(inner):
        def forward_step(trainer: Trainer, data_iterator, model):
            result = inner(trainer, data_iterator, model)
            trainer.planted.append(
                {"fault": "forward", "iteration": trainer.iteration, "microbatch": trainer.microbatch}
            )
            return result

        return forward_step

    _replace(Trainer, "forward_step", make)


@_preparation
def data_from_the_global_generators() -> None:
    """Each microbatch weighs its labels by numbers drawn from torch's, Python's and numpy's generators."""

    def make(inner):
        def draw_batch(trainer: Trainer, iteration: int, microbatch: int) -> dict:
            batch = inner(trainer, iteration, microbatch)
            drawn = torch.rand_like(batch["loss_mask"])
            drawn[0] += random.random()
            drawn[1] += numpy.random.random()
            batch["loss_mask"] = drawn
            return batch

        return draw_batch

    _replace(Trainer, "draw_batch", make)


@_preparation
def data_drawn_in_forward_step() -> None:
    """Megatron gets None for its data iterator; forward_step draws from the global generators itself."""
    data_from_the_global_generators()
    drawn = 0

    def make(inner):
        def forward_step(trainer: Trainer, data_iterator, model):
            nonlocal drawn
            assert data_iterator is None
            microbatch = drawn % trainer.config.num_microbatches
            drawn += 1
            return inner(trainer, iter([trainer.draw_batch(trainer.iteration, microbatch)]), model)

        return forward_step

    _replace(Trainer, "_data_iterator", lambda _: lambda trainer: None)
    _replace(Trainer, "forward_step", make)


@_preparation
def loss_mask_written_in_place(microbatch: int) -> None:
    """forward_step halves the mask of one microbatch in place: the mean loss is equal, its bits are not."""

    def make(inner):
        def forward_step(trainer: Trainer, data_iterator, model):
            batch = next(data_iterator)
            if batch["microbatch"] == microbatch:
                batch["loss_mask"].mul_(0.5)
            return inner(trainer, iter([batch]), model)

        return forward_step

    _replace(Trainer, "forward_step", make)


# ---- a re-run that does not restore a state -----------------------------------------------------------


@_preparation
def leave_as_moved(state: str) -> None:
    """The re-run of a step finds `state`, one of MOVED_STATES, as the first pass left it."""
    MOVED_STATES[state]()


def _not_restored(owner: object, name: str) -> None:
    _replace(owner, name, lambda _: lambda *_: None)


def _put_back_after_the_restoring(capture: Callable[[object], Callable[[], None]]) -> None:
    """For states that the engine restores: `capture(adapter)` after the first pass returns the undo."""
    from nanlocator.megatron.adapter import MegatronPass
    from nanlocator.rerun import GeneratorStates

    put_back: Callable[[], None] = lambda: None  # noqa: E731

    def around_first_pass(inner):
        def run(step, data_iterator):
            nonlocal put_back
            inner(step, data_iterator)
            if data_iterator is step.data.recording:
                put_back = capture(step._adapter)

        return run

    def around_restore(inner):  # called when the engine has restored its own part
        def restore(owner) -> None:
            inner(owner)
            put_back()

        return restore

    _replace(MegatronPass, "run", around_first_pass)
    _replace(GeneratorStates, "restore", around_restore)


def _torch_generator() -> None:
    _put_back_after_the_restoring(lambda _: functools.partial(torch.set_rng_state, torch.get_rng_state()))


def _buffers() -> None:
    def capture(adapter) -> Callable[[], None]:
        moved = [(buffer, buffer.clone()) for _, buffer in adapter.buffers.now()]

        @torch.no_grad()
        def put_back() -> None:
            for buffer, copy in moved:
                buffer.copy_(copy)

        return put_back

    _put_back_after_the_restoring(capture)


def _python_and_numpy() -> None:
    from nanlocator.rerun import GeneratorStates

    _not_restored(GeneratorStates, "restore")


def _rng_tracker() -> None:
    from nanlocator.megatron.state import RngTracker

    _not_restored(RngTracker, "restore")


def _losses_of_layers() -> None:
    from nanlocator.megatron.state import LoggingTracker

    _not_restored(LoggingTracker, "restore")


def _draws_of_the_data() -> None:
    from nanlocator.megatron import step_data

    _not_restored(step_data._Replay, "_restore_generators")


def _megatrons_machine() -> None:
    from nanlocator.megatron.state import RerunMachine

    _not_restored(RerunMachine, "forget")


def _gradients() -> None:
    from nanlocator.megatron.adapter import MegatronAdapter

    _not_restored(MegatronAdapter, "clear_gradients")


MOVED_STATES = {
    "torch_generator": _torch_generator,
    "python_and_numpy": _python_and_numpy,
    "rng_tracker": _rng_tracker,
    "router_losses": _losses_of_layers,
    "multi_token_losses": _losses_of_layers,
    "buffers": _buffers,
    "draws_of_the_data": _draws_of_the_data,
    "gradients": _gradients,
    "megatrons_machine": _megatrons_machine,
}
