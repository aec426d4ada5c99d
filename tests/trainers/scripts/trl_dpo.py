"""trl.DPOTrainer on a small Llama and a frozen copy of it, on preferences."""

import copy
import tempfile

import faults
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.models.llama.modeling_llama import LlamaMLP
from trl import DPOConfig, DPOTrainer

VOCABULARY, BATCH, STEPS = 128, 4, 5


class UnitMLP(LlamaMLP):
    """Takes every vector at length one."""

    def forward(self, x):
        x = faults.flip_activation(x)
        length = x.square().sum(-1, keepdim=True).sqrt()  # the fault: sqrt
        return super().forward(x / (length + 1e-6))


class LogMLP(LlamaMLP):
    """Gates every vector with its own magnitude."""

    def forward(self, x):
        return super().forward(x * torch.log(x.abs().mean(-1, keepdim=True)))  # the fault: log


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
    model.model.layers[1].mlp = (LogMLP if faults.KIND == "log" else UnitMLP)(config)
    return model


def make_data():
    generator = torch.Generator().manual_seed(5)
    data = []
    for step in range(STEPS):
        tokens = torch.randint(2, VOCABULARY, (BATCH, 9), generator=generator)
        for row in faults.blank(tokens, step).tolist():
            words = [f"w{token}" if token != faults.BLANK else "[PAD]" for token in row]
            prompt, chosen, rejected = (" ".join(words[start : start + 3]) for start in (0, 3, 6))
            data.append({"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected})
    return Dataset.from_list(data)


def main():
    set_seed(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = DPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-3,
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DPOTrainer(
            model,
            ref_model=copy.deepcopy(model).eval(),
            args=arguments,
            train_dataset=make_data(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
    faults.report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
