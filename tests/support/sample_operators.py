"""Calls every distinct operator of six tiny models and writes each call as a bundle. A program of
test_replay_coverage.py: python sample_operators.py SAMPLER.so RUN_DIR"""

import ctypes
import sys

import torch
import transformers

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2(attention: str) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_implementation=attention
    )
    return transformers.GPT2LMHeadModel(config)


def bert(attention: str) -> torch.nn.Module:
    config = transformers.BertConfig(
        **TEXT, intermediate_size=64, max_position_embeddings=32, attn_implementation=attention
    )
    return transformers.BertForMaskedLM(config)


def t5(attention: str) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def llama(attention: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        **TEXT,
        intermediate_size=64,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral(attention: str) -> torch.nn.Module:
    config = transformers.MixtralConfig(
        **TEXT,
        intermediate_size=64,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        output_router_logits=True,
        attn_implementation=attention,
    )
    return transformers.MixtralForCausalLM(config)


def train_text(model: torch.nn.Module) -> None:
    tokens = torch.randint(2, 64, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    step(loss, model, optimizer)


def train_cnn() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3, stride=2),
        torch.nn.GroupNorm(2, 8),
        torch.nn.GELU(),
        torch.nn.Dropout2d(0.1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ).to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    loss = torch.nn.functional.cross_entropy(model(images), torch.randint(0, 10, (4,)))
    step(loss, model, optimizer)


def step(loss: torch.Tensor, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    sampler = ctypes.CDLL(sys.argv[1])
    sampler.operator_sampler_write.argtypes = [ctypes.c_char_p]
    torch.manual_seed(0)
    models = [
        build(attention) for build in (gpt2, bert, t5, llama, mixtral) for attention in ("eager", "sdpa")
    ]
    sampler.operator_sampler_start()
    for model in models:
        train_text(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train_text(models[0])
    train_cnn()
    print(sampler.operator_sampler_write(sys.argv[2].encode()))


if __name__ == "__main__":
    main()
