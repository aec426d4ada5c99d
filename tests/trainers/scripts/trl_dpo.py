"""trl.DPOTrainer on a small Llama and a frozen copy of it, on preferences."""

import copy
import functools

import faults
import tiny_llama
import torch
from datasets import Dataset
from tiny_llama import VOCABULARY
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

BATCH, STEPS = 4, 5


def make_data():
    generator = torch.Generator().manual_seed(5)
    data = []
    for step in range(STEPS):
        tokens = torch.randint(2, VOCABULARY, (BATCH, 9), generator=generator)
        for words in tiny_llama.words_of(faults.blank(tokens, step)):
            prompt, chosen, rejected = (" ".join(words[start : start + 3]) for start in (0, 3, 6))
            data.append({"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected})
    return Dataset.from_list(data)


def main():
    set_seed(0)
    model = tiny_llama.make_model(tiny_llama.SqrtMLP)
    trainer = functools.partial(
        DPOTrainer,
        model,
        copy.deepcopy(model).eval(),
        train_dataset=make_data(),
        processing_class=tiny_llama.make_tokenizer(),
    )
    losses = tiny_llama.train(
        trainer,
        DPOConfig,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
    )
    faults.report(losses, model)


if __name__ == "__main__":
    main()
