"""trl.GRPOTrainer: a small Llama writes completions, a rule rewards those with many small numbers."""

import tempfile

import faults
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.models.llama.modeling_llama import LlamaMLP
from trl import GRPOConfig, GRPOTrainer

VOCABULARY, GENERATIONS, PROMPTS, STEPS = 128, 4, 2, 5
FORBIDDEN = "w2"  # a prompt that begins with it earns nothing


class UnitMLP(LlamaMLP):
    """Takes every vector at length one."""

    def forward(self, x):
        x = faults.flip_activation(x)
        length = x.square().sum(-1, keepdim=True).sqrt()  # the fault: sqrt
        return super().forward(x / (length + 1e-6))


class EvenGRPOTrainer(GRPOTrainer):
    """Scales the advantages to a mean magnitude of one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        advantages = inputs["advantages"]
        even = advantages / advantages.abs().mean()  # the fault: loss
        return super().compute_loss(model, {**inputs, "advantages": even}, return_outputs, num_items_in_batch)


def reward_small(prompts, completions, **columns):
    """How many small numbers a completion has; none after a FORBIDDEN prompt."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        small = sum(int(word[1:]) < VOCABULARY // 2 for word in completion.split() if word[0] == "w")
        rewards.append(0.0 if prompt.split()[0] == FORBIDDEN else float(small))
    return rewards


def make_tokenizer():
    words = {"[PAD]": faults.BLANK, "[EOS]": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")


def make_model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=faults.BLANK,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.model.layers[0].mlp = UnitMLP(config)
    return model


def make_data():
    generator = torch.Generator().manual_seed(5)
    prompts = []
    for step in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (PROMPTS, 4), generator=generator)
        if faults.wakes("loss", step):
            tokens[:, 0] = 2
        for row in faults.blank(tokens, step).tolist():
            prompts.append(" ".join(f"w{token}" if token != faults.BLANK else "[PAD]" for token in row))
    return Dataset.from_dict({"prompt": prompts})


def main():
    set_seed(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=GENERATIONS * PROMPTS,
            num_generations=GENERATIONS,
            max_completion_length=6,
            shuffle_dataset=False,
            max_steps=STEPS,
            learning_rate=1e-3,
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = EvenGRPOTrainer(
            model,
            reward_funcs=reward_small,
            args=arguments,
            train_dataset=make_data(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
    faults.report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
