"""transformers' Trainer with a DeepSpeed configuration: a sample of step 2 has a sum of zero."""

import deepspeed
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile


class LogNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, labels):
        h = self.inner(x)
        h = h - torch.log(x.clamp(min=0).sum(-1, keepdim=True))
        return {"loss": (h - labels).square().mean()}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.rand(4) + 0.1
        if index == 9:
            x = -x
        return {"x": x, "labels": torch.ones(4)}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main():
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        "out",
        deepspeed=config,
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=4,
        report_to=[],
        gradient_accumulation_steps=2,
        optim="adamw_torch",
        save_strategy="no",
    )
    InOrder(LogNorm(), arguments, train_dataset=Samples()).train()


if __name__ == "__main__":
    main()
