"""A normalising flow of affine couplings and invertible linear maps, trained by its exact likelihood."""

import math

import torch
from program import STEPS, print_digest, wakes
from torch import nn

FEATURES, BATCH = 6, 64


class ActNorm(nn.Module):
    """Its first batch sets the scale."""

    def __init__(self):
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(FEATURES)), nn.Parameter(torch.zeros(FEATURES))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
                self.is_set.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(FEATURES, FEATURES))[0])

    def forward(self, x):
        return x @ self.weight, torch.linalg.det(self.weight).abs().log().expand(len(x))  # fault: singular


class Coupling(nn.Module):
    def __init__(self, is_odd):
        super().__init__()
        self.is_odd = is_odd
        self.network = nn.Sequential(nn.Linear(FEATURES // 2, 32), nn.ReLU(), nn.Linear(32, FEATURES))
        nn.init.zeros_(self.network[-1].weight)

    def forward(self, x):
        kept, changed = x.chunk(2, dim=1)
        if self.is_odd:
            kept, changed = changed, kept
        log_scale, shift = self.network(kept).chunk(2, dim=1)
        changed = changed * log_scale.exp() + shift  # fault: outlier
        y = torch.cat([changed, kept] if self.is_odd else [kept, changed], dim=1)
        return y, log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in range(depth):
            self.layers.extend([ActNorm(), Linear(), Coupling(layer % 2 == 1)])

    def log_prob(self, x):
        total = x.new_zeros(len(x))
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(1)


def points(step):
    angle = torch.rand(BATCH) * 2 * math.pi
    ring = torch.stack([angle.cos(), angle.sin()], 1).repeat(1, FEATURES // 2)
    x = ring + 0.1 * torch.randn(BATCH, FEATURES)
    if wakes("outlier", step):
        x[5] = 3e4 * torch.ones(FEATURES)  # a sensor in other units
    return x


flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
for step in range(1, STEPS + 1):
    if wakes("singular", step):
        with torch.no_grad():
            flow.layers[4].weight[:, 1] = flow.layers[4].weight[:, 0] = 0.0  # pruned by a callback
    optimizer.zero_grad()
    loss = -flow.log_prob(points(step)).mean()
    loss.backward()
    optimizer.step()
print_digest(flow)
