"""Tiny models with random weights, and their training data."""

import torch
import transformers
from torch import nn

VOCABULARY, LENGTH, BATCH = 64, 12, 2


def language_model(kind: str, attention: str = "eager", dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    common = dict(vocab_size=VOCABULARY, attn_implementation=attention)
    llama_like = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=dropout,
        bos_token_id=1,
        eos_token_id=2,
        **common,
    )
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=dropout,
            attn_pdrop=dropout,
            embd_pdrop=dropout,
            bos_token_id=1,
            eos_token_id=2,
            **common,
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **common,
        )
        return transformers.BertForMaskedLM(config)
    if kind == "t5":
        config = transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            **common,
        )
        return transformers.T5ForConditionalGeneration(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_like))
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(num_local_experts=4, output_router_logits=True, **llama_like)
        )
    raise ValueError(kind)


def batch(padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    labels = tokens.clone()
    if padded:
        mask[0, LENGTH // 2 :] = 0
        mask[1, :3] = 0  # left padding: whole rows of causal attention are masked
        labels[mask == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class ConvolutionalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))
