"""Training loops of every Python adapter behind one interface, for the contract of a step."""

import ctypes
import os
from types import SimpleNamespace

import torch
from torch import nn

import nanlocator
from nanlocator import LocatingOptimizer


def corrupt(tensor):
    """A bit error: no operator writes it."""
    ctypes.c_float.from_address(tensor.data_ptr() + 4).value = float("nan")


class Loop:
    """``run(steps)`` trains on. ``fault(step, execution)``, both counted from 1, is called after each
    backward; True corrupts a gradient. ``found`` has the steps with a verdict."""

    def __init__(self, *, watched=True, microbatches=1, clip=False, scaler=False, **options):
        self.fault = lambda step, execution: False
        self.number = self.execution = 0
        self.microbatches, self.clip, self.scaler = microbatches, clip, scaler
        self.found = []
        self._noted = 0
        torch.manual_seed(0)
        self.build()
        self.is_watched = watched
        if watched:
            self.watch(**options)

    def bad_in(self, *steps, executions=(1, 2, 3, 4)):
        self.fault = lambda step, execution: step in steps and execution in executions

    def begin_step(self):
        self.note_findings()
        self.number += 1
        self.execution = 0

    def after_backward(self):
        self.execution += 1
        if self.fault(self.number, self.execution):
            corrupt(self.gradient())

    def note_findings(self):
        self.found += [self.number] * (len(self.verdicts()) - self._noted)
        self._noted = len(self.verdicts())

    def run(self, steps):
        try:
            for _ in range(steps):
                self.begin_step()
                torch.manual_seed(self.number)  # dropout
                self.step()
        finally:
            self.note_findings()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return {"loss": (self.head(self.body(x)) - x.sum(1, keepdim=True)).square().mean()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Plain(Loop):
    with_closure = True

    def build(self):
        self.model = Tiny()
        self.inner = sgd(self.model)
        self.optimizer = self.inner
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127) if self.scaler else None

    def watch(self, **options):
        self.optimizer = LocatingOptimizer(self.inner, self.model, grad_scaler=self.grad_scaler, **options)
        self._noted = 0

    def remove(self):
        self.optimizer.remove()

    def verdicts(self):
        return self.optimizer.verdicts if self.is_watched and self.optimizer is not self.inner else []

    def dismissed(self):
        return self.optimizer.dismissed

    def gradient(self):
        return self.model.head.weight.grad

    def forward_backward(self):
        self.optimizer.zero_grad()
        total = 0.0
        for number in range(self.microbatches):
            loss = self.model(batch(100 * self.number + number))["loss"]
            (self.grad_scaler.scale(loss * 1e3) if self.grad_scaler else loss).backward()
            total = total + loss.detach()
        self.after_backward()
        if self.clip == "torch" or (self.clip and self.optimizer is self.inner):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        elif self.clip:
            self.optimizer.clip_grad_norm(0.1)
        return total

    def step(self):
        if self.with_closure:
            self.optimizer.step(self.forward_backward)
            return
        self.forward_backward()
        if self.grad_scaler is None:
            self.optimizer.step()
        else:
            self.grad_scaler.unscale_(self.optimizer)
            self.optimizer.clip_grad_norm(1.0)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()


class PlainWithoutClosure(Plain):
    with_closure = False


class Watched(PlainWithoutClosure):
    """The loop itself is not executed again, so what goes wrong goes wrong in backward."""

    only = None  # one at a time in a process

    def build(self):
        super().build()
        self.watcher = None
        self.backwards = 0
        self.model.head.weight.register_post_accumulate_grad_hook(self.in_backward)

    def watch(self, **options):
        if Watched.only is not None:
            Watched.only.remove()
        self.watcher = Watched.only = nanlocator.watch(self.model, self.inner, **options)
        self._noted = 0

    def in_backward(self, _):
        self.backwards += 1
        if self.backwards % self.microbatches == 0:
            super().after_backward()

    def after_backward(self):
        pass

    def run(self, steps):
        try:
            super().run(steps)
        finally:
            self.backwards = 0

    def step(self):
        self.forward_backward()
        if self.grad_scaler is None:
            self.inner.step()
        else:
            self.grad_scaler.unscale_(self.inner)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.grad_scaler.step(self.inner)
            self.grad_scaler.update()

    def remove(self):
        self.watcher.remove()

    def verdicts(self):
        return self.watcher.verdicts if self.watcher is not None else []

    def dismissed(self):
        return self.watcher.dismissed


class HuggingFace(Loop):
    """Each ``run`` is a ``train`` of its own, on the same model and optimizer."""

    def build(self):
        self.model = Tiny()
        self.inner = sgd(self.model)
        self.callbacks = []

    def watch(self, **options):
        from nanlocator.transformers import NanLocatorCallback

        self.callbacks = [NanLocatorCallback(**options)]
        self._noted = 0

    def verdicts(self):
        return self.callbacks[0].verdicts if self.callbacks else []

    def dismissed(self):
        return self.callbacks[0].dismissed

    def gradient(self):
        return self.model.head.weight.grad

    def run(self, steps):
        import transformers

        loop = self

        class Trainer(transformers.Trainer):
            def training_step(self, *args, **kwargs):
                if self.state.global_step != self.last_step:
                    self.last_step = self.state.global_step
                    loop.begin_step()
                    loop.seen = 0
                loss = super().training_step(*args, **kwargs)
                loop.seen += 1
                if loop.seen % loop.microbatches == 0:
                    loop.after_backward()
                return loss

        arguments = transformers.TrainingArguments(
            "out",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=self.microbatches,
            max_steps=steps,
            max_grad_norm=0.1 if self.clip else 0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        scheduler = torch.optim.lr_scheduler.ConstantLR(self.inner, factor=1.0)
        trainer = Trainer(
            self.model,
            arguments,
            train_dataset=[{"x": row} for row in batch(0).repeat(8, 1)],
            callbacks=self.callbacks,
            optimizers=(self.inner, scheduler),
        )
        trainer.last_step = -1
        if self.scaler:
            accelerator = trainer.accelerator
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
            accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(self.inner)
        try:
            trainer.train()
        finally:
            self.note_findings()


class OfLocator(Loop):
    """``locator`` is what the framework's ``install`` returns."""

    def remove(self):
        self.locator.remove()

    def verdicts(self):
        return self.locator.verdicts

    def dismissed(self):
        return self.locator.dismissed


class Megatron(OfLocator):
    """In a process of its own: Megatron-Core on the CPU changes it for good."""

    def build(self):
        import gpt_training
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():  # by the loop before
            parallel_state.destroy_model_parallel()
        self.trainer = gpt_training.Trainer(
            gpt_training.TrainingConfig(
                layers=2,
                hidden=32,
                sequence=16,
                num_microbatches=self.microbatches,
                clip_grad=0.1 if self.clip else 1e9,
                precision="fp16" if self.scaler else "fp32",
                initial_loss_scale=2.0**40,
            )
        )
        self.trainer.at_iteration_start.append(self.begin_step)
        self.model = self.trainer.model_chunks[0]
        config = self.trainer.transformer_config
        finalize = config.finalize_model_grads_func

        def finalize_after_fault(*args, **kwargs):
            self.after_backward()
            return finalize(*args, **kwargs)

        config.finalize_model_grads_func = finalize_after_fault
        self.locator = SimpleNamespace(verdicts=[], dismissed=0)

    def watch(self, **options):
        import nanlocator.megatron

        if self.is_installed():
            self.locator.remove()
        self.locator = nanlocator.megatron.install(
            self.trainer.model_chunks, self.trainer.optimizer, **options
        )
        self._noted = 0

    def is_installed(self):
        return not isinstance(self.locator, SimpleNamespace)

    def gradient(self):
        return self.trainer.parameters["decoder.layers.1.mlp.linear_fc2.weight"].main_grad

    def run(self, steps):
        self.trainer._initialise_rerun_state_machine()  # an error leaves Megatron's in the middle of a step
        try:
            self.trainer.train(steps)
        finally:
            self.note_findings()


class DeepSpeed(OfLocator):
    """In a process of its own, as its packages are on no other's path. The loop itself is not executed again,
    so what goes wrong goes wrong in backward."""

    variant = "zero1"
    only = None  # one engine that is watched in a process

    def build(self):
        import engine_training

        os.environ["LOCAL_RANK"] = "0"
        self.model = Tiny()
        config = engine_training.configuration(f"{self.variant}_fp16" if self.scaler else self.variant)
        config["gradient_accumulation_steps"] = self.microbatches
        config["gradient_clipping"] = 0.1 if self.clip else 0.0
        config["fp16"]["initial_scale_power"] = 24
        self.dtype = torch.float16 if self.scaler else torch.float32
        self.engine, *_ = engine_training.deepspeed.initialize(
            model=self.model, optimizer=sgd(self.model), config=config, dist_init_required=False
        )
        self.backwards = 0
        self.model.head.weight.register_hook(self.in_backward)
        self.locator = SimpleNamespace(verdicts=[], dismissed=0, remove=lambda: None)

    def watch(self, **options):
        import nanlocator.deepspeed

        if DeepSpeed.only is not None:
            DeepSpeed.only.remove()
        self.locator = DeepSpeed.only = nanlocator.deepspeed.install(self.engine, **options)
        self._noted = 0

    def in_backward(self, gradient):
        self.backwards += 1
        if self.backwards % self.microbatches == 0:
            self.hooked = gradient
            self.after_backward()

    def gradient(self):
        return self.hooked

    def begin_step(self):
        super().begin_step()
        self.backwards = 0

    def step(self):
        for number in range(self.microbatches):
            loss = self.engine(batch(100 * self.number + number).to(self.dtype))["loss"]
            self.engine.backward(loss)
            self.engine.step()

    def weights(self):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return super().weights()


class DeepSpeedInParts(DeepSpeed):
    variant = "zero3"


LOOPS = {
    "plain_with_closure": Plain,
    "plain_without_closure": PlainWithoutClosure,
    "watch": Watched,
    "trainer": HuggingFace,
    "megatron": Megatron,
    "deepspeed": DeepSpeed,
    "deepspeed_in_parts": DeepSpeedInParts,
}
