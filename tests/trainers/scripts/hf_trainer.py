"""transformers.Trainer on a small Llama with the author's own MLP and loss function."""

import functools

import faults
import tiny_llama
import torch
import torch.nn.functional as F
from tiny_llama import VOCABULARY
from transformers import Trainer, TrainingArguments, set_seed

LENGTH, BATCH, ACCUMULATED, STEPS = 8, 2, 2, 5


class UnitMLP(tiny_llama.NormMLP):
    calls_per_step = ACCUMULATED


def make_data():
    generator = torch.Generator().manual_seed(5)
    data = []
    for step in range(STEPS):
        tokens = torch.randint(1, VOCABULARY, (BATCH * ACCUMULATED, LENGTH), generator=generator)
        tokens = faults.blank(tokens, step, row=BATCH)
        labels = tokens.clone()
        labels[:, :3] = -100  # the prompt
        if faults.wakes("loss", step):
            labels[BATCH:] = -100  # the prompt fills the window
        data += [{"input_ids": row, "labels": wanted} for row, wanted in zip(tokens, labels, strict=True)]
    return data


def masked_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    mask = (labels != -100).float()
    nll = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    return (nll * mask).sum() / mask.sum() / ACCUMULATED  # the fault: loss


def main():
    set_seed(0)
    model = tiny_llama.make_model(UnitMLP)
    losses = tiny_llama.train(
        functools.partial(Trainer, model, train_dataset=make_data(), compute_loss_func=masked_loss),
        TrainingArguments,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
    )
    faults.report(losses, model)


if __name__ == "__main__":
    main()
