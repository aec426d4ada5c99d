"""A sentence encoder learns to distinguish pairs in a loop of accelerate: prepare, accumulate, backward."""

import faults
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel

VOCABULARY, LENGTH, BATCH, ACCUMULATED, STEPS = 128, 8, 4, 2, 5


class Pooling(nn.Module):
    """The sum over a sentence, normalised to length one."""

    def forward(self, hidden, mask):
        total = (hidden * mask.unsqueeze(-1)).sum(dim=1)
        return total / total.norm(dim=-1, keepdim=True)  # the fault: norm


class LengthPooling(nn.Module):
    """The sum over a sentence, scaled by the logarithm of its length."""

    def forward(self, hidden, mask):
        scale = torch.log(mask.sum(dim=1, keepdim=True))  # the fault: log
        return F.normalize((hidden * mask.unsqueeze(-1)).sum(dim=1) * scale, dim=-1)


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.pooling = LengthPooling() if faults.KIND == "log" else Pooling()

    def forward(self, tokens, mask):
        hidden = self.bert(tokens).last_hidden_state
        return self.pooling(faults.flip_activation(hidden, calls_per_step=2 * ACCUMULATED), mask)


def contrastive_loss(a, b, weight):
    nll = F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)), reduction="none")
    return (nll * weight).sum() / weight.sum()  # the fault: loss


def make_data():
    generator = torch.Generator().manual_seed(5)
    data = []
    for step in range(STEPS):
        for row in range(BATCH * ACCUMULATED):
            a, b = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
            mask = (torch.arange(LENGTH) < 3 + row % 5).float()
            if row == BATCH + 1 and faults.wakes("model", step):
                mask = torch.zeros(LENGTH)  # an empty sentence
            weight = 0.0 if row >= BATCH and faults.wakes("loss", step) else 1.0
            data.append({"a": a, "b": b, "mask": mask, "weight": weight})
    return data


def main():
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, cpu=True)
    model = SentenceEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    loader = DataLoader(make_data(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            a, b = model(batch["a"], batch["mask"]), model(batch["b"], batch["mask"])
            loss = contrastive_loss(a, b, batch["weight"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    faults.report(losses, accelerator.unwrap_model(model))


if __name__ == "__main__":
    main()
