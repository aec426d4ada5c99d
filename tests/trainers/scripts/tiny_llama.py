"""Shared by the scripts on transformers' models: a small Llama with the author's own MLP, a tokenizer of the
words w2, w3, ..., and a Trainer's arguments."""

import tempfile

import faults
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP

VOCABULARY = 128


class NormMLP(LlamaMLP):
    """Normalises every vector to length one."""

    calls_per_step = 1

    def forward(self, x):
        x = faults.flip_activation(x, self.calls_per_step)
        return super().forward(x / x.norm(dim=-1, keepdim=True))  # the fault: norm


class SqrtMLP(LlamaMLP):
    """The same."""

    def forward(self, x):
        x = faults.flip_activation(x)
        length = x.square().sum(-1, keepdim=True).sqrt()  # the fault: sqrt
        return super().forward(x / (length + 1e-6))


class LogMLP(LlamaMLP):
    """Gates every vector with its own magnitude."""

    def forward(self, x):
        return super().forward(x * torch.log(x.abs().mean(-1, keepdim=True)))  # the fault: log


def plain_model():
    return LlamaForCausalLM(
        LlamaConfig(
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
    )


def make_model(mlp=NormMLP, layer=1):
    model = plain_model()
    model.model.layers[layer].mlp = (LogMLP if faults.KIND == "log" else mlp)(model.config)
    return model


def make_tokenizer():
    words = {"[PAD]": faults.BLANK, "[EOS]": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")


def words_of(tokens):
    """A list of words for each row."""
    return [[f"w{token}" if token != faults.BLANK else "[PAD]" for token in row] for row in tokens.tolist()]


def train(make_trainer, arguments, **own):
    """Returns a Trainer's losses; `arguments` is the class of its arguments, `own` has some of them."""
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(
            arguments(
                output_dir=output_dir,
                learning_rate=1e-3,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                **own,
            )
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
