"""trl.GRPOTrainer: a small Llama writes completions, a rule rewards those with many small numbers."""

import functools

import faults
import tiny_llama
import torch
from datasets import Dataset
from tiny_llama import VOCABULARY
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

GENERATIONS, PROMPTS, STEPS = 4, 2, 5
FORBIDDEN = "w2"  # a prompt that begins with it has no reward


class EvenGRPOTrainer(GRPOTrainer):
    """Scales the advantages to a mean magnitude of one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        advantages = inputs["advantages"]
        even = advantages / advantages.abs().mean()  # the fault: loss
        return super().compute_loss(model, {**inputs, "advantages": even}, return_outputs, num_items_in_batch)


def reward_small(prompts, completions, **columns):
    """Number of small numbers in a completion; none after a FORBIDDEN prompt."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        small = sum(int(word[1:]) < VOCABULARY // 2 for word in completion.split() if word[0] == "w")
        rewards.append(0.0 if prompt.split()[0] == FORBIDDEN else float(small))
    return rewards


def make_data():
    generator = torch.Generator().manual_seed(5)
    prompts = []
    for step in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (PROMPTS, 4), generator=generator)
        if faults.wakes("loss", step):
            tokens[:, 0] = 2
        prompts += map(" ".join, tiny_llama.words_of(faults.blank(tokens, step)))
    return Dataset.from_dict({"prompt": prompts})


def main():
    set_seed(0)
    model = tiny_llama.make_model(tiny_llama.SqrtMLP, layer=0)
    trainer = functools.partial(
        EvenGRPOTrainer,
        model,
        reward_small,
        train_dataset=make_data(),
        processing_class=tiny_llama.make_tokenizer(),
    )
    losses = tiny_llama.train(
        lambda arguments: trainer(args=arguments),
        GRPOConfig,
        per_device_train_batch_size=GENERATIONS * PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=6,
        shuffle_dataset=False,
        max_steps=STEPS,
        gradient_checkpointing=False,
        bf16=False,
    )
    faults.report(losses, model)


if __name__ == "__main__":
    main()
