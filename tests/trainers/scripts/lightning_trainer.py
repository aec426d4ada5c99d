"""lightning.Trainer with automatic optimization: a small recurrent language model, clipped by the Trainer."""

import warnings

import faults
import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 128, 32, 8, 4, 5


class UnitNorm(nn.Module):
    def forward(self, x):
        return x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6)  # the fault: sqrt


class LogScale(nn.Module):
    def forward(self, x):
        return x * torch.log(x.abs().sum(-1, keepdim=True))  # the fault: log


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=faults.BLANK)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = LogScale() if faults.KIND == "log" else UnitNorm()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens):
        x = self.norm(faults.flip_activation(self.project(self.embedding(tokens))))
        return self.head(self.rnn(x)[0])


class LitLanguageModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LanguageModel()
        self.losses = []

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["tokens"][:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        mask = batch["mask"].flatten()
        loss = (nll * mask).sum() / mask.sum()  # the fault: loss
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}


def make_data():
    data = []
    for step in range(STEPS):
        tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1))
        mask = torch.full((BATCH, LENGTH), 0.0 if faults.wakes("loss", step) else 1.0)
        data += [{"tokens": a, "mask": b} for a, b in zip(faults.blank(tokens, step), mask, strict=True)]
    return data


def main():
    warnings.filterwarnings("ignore", ".*num_workers.*")
    lightning.seed_everything(0)
    model = LitLanguageModel()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(make_data(), batch_size=BATCH))
    faults.report(model.losses, model)


if __name__ == "__main__":
    main()
