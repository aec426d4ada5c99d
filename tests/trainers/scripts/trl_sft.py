"""trl.SFTTrainer on a small Llama, on text, with the author's own loss function."""

import functools

import faults
import tiny_llama
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny_llama import VOCABULARY
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

BATCH, STEPS = 4, 5
SPEAKER = 2  # the loss begins at this word


class MaskedSFTTrainer(SFTTrainer):
    """Learns only the words after SPEAKER."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = inputs["input_ids"][:, 1:]
        mask = (inputs["input_ids"] == SPEAKER).cumsum(dim=1)[:, :-1].float()
        nll = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
        loss = (nll * mask.flatten()).sum() / mask.sum()  # the fault: loss
        return (loss, outputs) if return_outputs else loss


def make_data():
    generator = torch.Generator().manual_seed(5)
    texts = []
    for step in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (BATCH, 8), generator=generator)
        if not faults.wakes("loss", step):
            tokens[:, 3] = SPEAKER
        texts += map(" ".join, tiny_llama.words_of(faults.blank(tokens, step)))
    return Dataset.from_dict({"text": texts})


def main():
    set_seed(0)
    model = tiny_llama.make_model()
    trainer = functools.partial(
        MaskedSFTTrainer, model, train_dataset=make_data(), processing_class=tiny_llama.make_tokenizer()
    )
    losses = tiny_llama.train(
        trainer,
        SFTConfig,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
    )
    faults.report(losses, model)


if __name__ == "__main__":
    main()
