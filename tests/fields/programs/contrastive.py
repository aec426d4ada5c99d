"""Contrastive learning of two views: a learnt temperature, a queue, gradients scaled layer by layer."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

BATCH, WIDTH, QUEUE = 16, 8, 64


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH, bias=False)
        )

    def forward(self, x):
        z = self.body(x)
        return z / z.norm(dim=1, keepdim=True)  # fault: collapsed


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = Encoder(), Encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, WIDTH)))
        self.at = 0

    @torch.no_grad()
    def follow(self, keys):
        for mine, theirs in zip(self.key.parameters(), self.query.parameters()):
            mine.mul_(0.99).add_(theirs, alpha=0.01)
        self.queue[self.at : self.at + BATCH] = keys
        self.at = (self.at + BATCH) % QUEUE

    def forward(self, a, b):
        query = self.query(a)
        with torch.no_grad():
            keys = self.key(b)
        positive, negative = (query * keys).sum(1, keepdim=True), query @ self.queue.clone().T
        logits = torch.cat([positive, negative], 1) * self.log_temperature.exp()
        weight = logits.exp()  # fault: hot
        loss = -torch.log(weight[:, 0] / weight.sum(1)).mean()
        self.follow(keys)
        return loss


@torch.no_grad()
def trust_update(parameters, rate=0.05):
    """The layer-wise rate: norm of the weight by norm of its gradient."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        ratio = parameter.norm() / (parameter.grad.norm() + 1e-6) if parameter.ndim > 1 else 1.0
        parameter.grad.mul_(0.01 * ratio)


model = Contrast()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 12)
    if wakes("collapsed", step):
        with torch.no_grad():
            model.query.body[3].weight.zero_()
    if wakes("hot", step):
        with torch.no_grad():
            model.log_temperature.fill_(5.0)
    loss = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    optimizer.zero_grad()
    loss.backward()
    trust_update(model.parameters())
    optimizer.step()
print_digest(model)
