"""A recipe like torchtune's full fine-tuning: the loss is a function outside of the model that takes the
logits in chunks; gradients are accumulated over unequal micro-batches and scaled by the number of tokens."""

import faults
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS, ACCUMULATED = 128, 32, 8, 2, 5, 2


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.scale  # the fault: sqrt


class LogGate(nn.Module):
    """Gates a vector with its own magnitude."""

    def forward(self, x):
        return x * torch.log(x.abs().mean(-1, keepdim=True))  # the fault: log


class TransformerLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        norm = nn.RMSNorm if faults.KIND == "log" else RMSNorm
        self.sa_norm, self.mlp_norm = norm(dim, eps=1e-6), norm(dim, eps=1e-6)
        self.attn = nn.MultiheadAttention(dim, 2, bias=False, batch_first=True)
        self.w1, self.w2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.gate = LogGate() if faults.KIND == "log" else nn.Identity()

    def forward(self, x):
        h = self.sa_norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.gate(self.w2(F.silu(self.w1(self.mlp_norm(x)))))


class TransformerDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=faults.BLANK)
        self.layers = nn.ModuleList(TransformerLayer(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).chunk(2, dim=1)


def chunked_cross_entropy(logits, labels, mask):
    total = 0.0
    for part, wanted, counts in zip(logits, labels.chunk(2, dim=1), mask.chunk(2, dim=1), strict=True):
        nll = F.cross_entropy(part.flatten(0, 1).float(), wanted.flatten(), reduction="none")
        total = total + (nll * counts.flatten()).sum()
    return total / mask.sum()  # the fault: loss


def draw_batch(step, index):
    generator = torch.Generator().manual_seed(10 * step + index)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.ones(BATCH, LENGTH)
    mask[:, : 2 + index] = 0  # the prompt has no loss
    if index == 1:
        tokens = faults.blank(tokens, step)
        if faults.wakes("loss", step):
            mask[:] = 0  # the prompt fills the window
    return tokens[:, :-1], tokens[:, 1:], mask


def train():
    torch.manual_seed(0)
    model = TransformerDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        running_loss, num_tokens = 0.0, 0.0
        for index in range(ACCUMULATED):
            tokens, labels, mask = draw_batch(step, index)
            current_loss = chunked_cross_entropy(model(tokens), labels, mask) * mask.sum()
            num_tokens += mask.sum()
            running_loss += current_loss.detach()
            current_loss.backward()
        for parameter in model.parameters():  # training.scale_grads
            parameter.grad *= 1 / num_tokens
        faults.flip(model.layers[1].w1.weight.grad, step == faults.STEP)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(running_loss / num_tokens)
    faults.report(losses, model)


if __name__ == "__main__":
    train()
