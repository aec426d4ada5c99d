"""Calls every distinct operator of six tiny models and writes each call as a bundle, for
test_replay_coverage.py: python sample_operators.py SAMPLER.so RUN_DIR"""

import ctypes
import sys

import torch
from tiny_models import batch, language_model


def train_text(model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    loss = model(**batch()).loss
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
        language_model(kind, attention)
        for kind in ("gpt2", "bert", "t5", "llama", "mixtral")
        for attention in ("eager", "sdpa")
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
