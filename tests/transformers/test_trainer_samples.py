"""The samples of a Trainer's microbatches, by their indices. accelerate loads one batch ahead."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import nanlocator
from nanlocator.transformers import NanLocatorCallback

BAD = 37


class Feats(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        if i == BAD:
            x[2] = float("nan")
        return {"x": x, "labels": torch.tensor(i % 3)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_bad_sample_of_a_microbatch_is_named(accumulation):
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(Net(), arguments, train_dataset=Feats(), callbacks=[NanLocatorCallback()])
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        trainer.train()
    (origin,) = raised.value.verdict["origins"]
    (lines,) = [fact["names"] for fact in origin["facts"] if fact["kind"] == "samples"]
    assert len(lines) == accumulation
    assert sum(line.endswith(f" of Feats; NaN or Inf in {BAD}") for line in lines) == 1
