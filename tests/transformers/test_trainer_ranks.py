"""NanLocatorCallback with accelerate's DistributedDataParallel on two gloo ranks."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

NAN = float("nan")


def trainer_of(rank, world_size, bad_item=None, callback=True, **arguments):
    """Each rank trains on its half of 16 items; `bad_item` has a NaN in its embeddings."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # unused: the group is initialised
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from nanlocator.transformers import NanLocatorCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    set_seed(3)
    config = GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    generator = torch.Generator().manual_seed(1)
    data = [
        {"inputs_embeds": torch.randn(8, 16, generator=generator), "labels": torch.arange(8) + i}
        for i in range(16)
    ]
    if bad_item is not None:
        data[bad_item]["inputs_embeds"][4, 6] = NAN
    options = {"per_device_train_batch_size": 1, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "ddp_backend": "gloo",
    }
    callbacks = [NanLocatorCallback(**callback)] if isinstance(callback, dict) else []
    model = GPT2LMHeadModel(config)
    args = TrainingArguments("out", **{**options, **quiet, **arguments})
    return model, InOrder(model, args, train_dataset=data, callbacks=callbacks)


def digest(*tensors):
    """The part that fits through a rank's pipe."""
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def with_bad_data(rank, world_size, bad_item, accumulation):
    from nanlocator import NonFiniteGradientError

    _, trainer = trainer_of(rank, world_size, bad_item, {}, gradient_accumulation_steps=accumulation)
    assert trainer.accelerator.distributed_type.value == "MULTI_CPU"
    try:
        trainer.train()
    except NonFiniteGradientError as error:
        return error.verdict, str(error), trainer.state.global_step


# Accelerate distributes batches of one item cyclically: rank i % 2 gets item i.
@pytest.mark.parametrize("bad_item, accumulation, place", [(3, 1, (2, None)), (7, 2, (2, 1)), (5, 2, (2, 0))])
def test_the_rank_with_the_bad_data_is_named(bad_item, accumulation, place):
    (first, text, step), (second, *_) = run_ranks(2, with_bad_data, bad_item, accumulation)
    assert first == second and first["silent_ranks"] == []
    (origin,) = first["origins"]
    assert (first["iteration"], origin["microbatch"]) == place and step == 1
    assert origin["coordinates"]["rank"] == bad_item % 2 == 1
    assert origin["cause"] == "bad_input"
    assert (origin["phase"], origin["direction"]) == ("forward", "forward")
    assert origin["tensor"]["first_bad_index"] == [0, 4, 6]
    assert first["rerun"]["reproduced"] is True and first["rerun"]["not_restored"] == []
    assert "ERROR[bad_data]" in text
    assert (Path("out/nanlocator_run/a0") / "report.html").exists()


def healthy(rank, world_size, callback):
    model, trainer = trainer_of(rank, world_size, callback=callback, gradient_accumulation_steps=2)
    trainer.train()
    trainer.train()
    logs = [{k: v for k, v in e.items() if k in ("loss", "grad_norm")} for e in trainer.state.log_history]
    return digest(*model.parameters()), logs, digest(torch.get_rng_state())


def test_a_healthy_run_has_the_same_bits_with_and_without():
    alone = run_ranks(2, healthy, None)
    assert isinstance(alone[0][1], list), alone
    assert run_ranks(2, healthy, {}) == alone
    assert run_ranks(2, healthy, {"rerun": "always"}) == alone
    assert Path("out/nanlocator_run/a3").exists()  # two runs, each with two calls of train


def failing_once(rank, world_size, on_bad):
    model, trainer = trainer_of(rank, world_size, callback={"on_bad": on_bad}, gradient_accumulation_steps=2)
    (callback,) = (c for c in trainer.callback_handler.callbacks if hasattr(c, "verdicts"))
    compute_loss, calls = trainer.compute_loss, []

    def fail_once(*args, **kwargs):
        calls.append(1)
        loss = compute_loss(*args, **kwargs)
        return loss * NAN if (rank, len(calls)) == (1, 3) else loss  # step 2, first microbatch

    trainer.compute_loss = fail_once
    trainer.train()
    verdicts = [(v["iteration"], v["rerun"]["reproduced"]) for v in callback.verdicts]
    return verdicts, digest(*model.parameters())


def untouched(rank, world_size):
    model, trainer = trainer_of(rank, world_size, gradient_accumulation_steps=2)
    trainer.train()
    return digest(*model.parameters())


def test_a_fault_of_one_rank_that_is_gone_is_recovered_on_all():
    reference = run_ranks(2, untouched)
    results = run_ranks(2, failing_once, "recover")
    assert [verdicts for verdicts, _ in results] == [[(2, False)]] * 2
    assert [weights for _, weights in results] == reference
