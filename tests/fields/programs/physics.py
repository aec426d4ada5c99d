"""A physics-informed network: Poisson's equation on a disc in polar coordinates, by Adam and then L-BFGS."""

import torch
from program import STEPS, print_digest, wakes
from torch import nn

POINTS = 64


class Solution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
        )

    def forward(self, xy):
        return self.layers(xy)


def gradient(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


def residual(u, r, angle):
    """u_rr + u_r / r + u_aa / r^2 + 1."""
    value = u(torch.cat([r * angle.cos(), r * angle.sin()], 1))
    u_r, u_a = gradient(value, r), gradient(value, angle)
    return gradient(u_r, r) + u_r / r + gradient(u_a, angle) / r.square() + 1  # fault: centre


def boundary(u, angle):
    xy = torch.cat([angle.cos(), angle.sin()], 1)
    return u(xy).square().mean()


def collocation(step):
    r, angle = torch.rand(POINTS, 1) * 0.9 + 0.1, torch.rand(POINTS, 1) * 6.2832
    if wakes("centre", step):
        r[0] = 0  # a regular grid begins at the centre
    return r.requires_grad_(), angle.requires_grad_()


u = Solution()
weight = nn.Parameter(torch.zeros(2))  # of the two terms, learnt
adam = torch.optim.Adam([*u.parameters(), weight], lr=1e-3)
lbfgs = torch.optim.LBFGS(u.parameters(), lr=0.1, max_iter=2, history_size=5)
for step in range(1, STEPS + 1):
    r, angle = collocation(step)
    if wakes("weight", step):
        with torch.no_grad():
            weight[0] = -100.0  # what a scheduler of weights has set
    is_adams = step <= STEPS - 3

    def closure():
        for parameter in u.parameters():
            parameter.grad = None
        weight.grad = None
        inner, outer = residual(u, r, angle).square().mean(), boundary(u, angle)
        terms = torch.stack([inner, outer])
        loss = (terms * torch.exp(-weight) + weight).sum()  # fault: weight
        loss.backward()
        return loss

    (adam if is_adams else lbfgs).step(closure)
print_digest(u, [weight])
