"""trl.SFTTrainer on a small Llama, on text, with a loss function of the author's own."""

import tempfile

import faults
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.models.llama.modeling_llama import LlamaMLP
from trl import SFTConfig, SFTTrainer

VOCABULARY, BATCH, STEPS = 128, 4, 5
SPEAKER = 2  # the word from which on an answer is learnt


class UnitMLP(LlamaMLP):
    """Takes every vector at length one."""

    def forward(self, x):
        x = faults.flip_activation(x)
        return super().forward(x / x.norm(dim=-1, keepdim=True))  # the fault: norm


class LogMLP(LlamaMLP):
    """Gates every vector with its own magnitude."""

    def forward(self, x):
        return super().forward(x * torch.log(x.abs().mean(-1, keepdim=True)))  # the fault: log


class MaskedSFTTrainer(SFTTrainer):
    """Learns only what follows SPEAKER."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = inputs["input_ids"][:, 1:]
        mask = (inputs["input_ids"] == SPEAKER).cumsum(dim=1)[:, :-1].float()
        nll = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
        loss = (nll * mask.flatten()).sum() / mask.sum()  # the fault: loss
        return (loss, outputs) if return_outputs else loss


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
    texts = []
    for step in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (BATCH, 8), generator=generator)
        if not faults.wakes("loss", step):
            tokens[:, 3] = SPEAKER
        for row in faults.blank(tokens, step).tolist():
            texts.append(" ".join(f"w{token}" if token != faults.BLANK else "[PAD]" for token in row))
    return Dataset.from_dict({"text": texts})


def main():
    set_seed(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = SFTConfig(
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
        trainer = MaskedSFTTrainer(
            model, arguments, train_dataset=make_data(), processing_class=make_tokenizer()
        )
        trainer.train()
    faults.report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
