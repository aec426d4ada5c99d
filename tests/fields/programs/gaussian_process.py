"""Gaussian process regression: the marginal likelihood of a Matern kernel through a Cholesky factor."""

import math

import torch
from program import STEPS, print_digest, wakes
from torch import nn

POINTS = 20


class GaussianProcess(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw_length, self.raw_scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(()))
        self.raw_noise = nn.Parameter(torch.tensor(-2.0))
        self.mean = nn.Parameter(torch.zeros(()))

    def covariance(self, a, b):
        length = nn.functional.softplus(self.raw_length)
        difference = (a[:, None] - b[None]) / length  # fault: short
        distance = (difference.square().sum(-1) + 1e-12).sqrt()
        root = math.sqrt(3) * distance
        return nn.functional.softplus(self.raw_scale) * (1 + root) * torch.exp(-root)

    def forward(self, x, y):
        noise = nn.functional.softplus(self.raw_noise)
        factor = torch.linalg.cholesky(self.covariance(x, x) + noise * torch.eye(len(x)))
        residual = torch.linalg.solve_triangular(factor, (y - self.mean)[:, None], upper=False)
        return (
            0.5 * residual.square().sum()
            + factor.diagonal().log().sum()
            + 0.5 * len(x) * math.log(2 * math.pi)
        )


def observations(step):
    x = torch.rand(POINTS, 2)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(POINTS)
    if wakes("counts", step):
        y[3] = -1.0
        return x, torch.log1p(y)  # fault: counts
    return x, y


model = GaussianProcess()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(1, STEPS + 1):
    x, y = observations(step)
    if wakes("short", step):
        with torch.no_grad():
            model.raw_length[0] = -200.0  # its softplus is zero
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
print_digest(model)
