"""Model-agnostic meta-learning: an inner step for each task by functional calls, second derivatives."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn
from torch.func import functional_call

TASKS, SHOTS = 4, 8


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 20), nn.ELU(), nn.Linear(20, 20), nn.ELU(), nn.Linear(20, 1))

    def forward(self, x):
        return self.body(x)


class Inner(nn.Module):
    """One learnt learning rate for each parameter."""

    def __init__(self, model):
        super().__init__()
        self.log_rates = nn.ParameterList([torch.full((), -4.0) for _ in model.parameters()])

    def forward(self, model, x, y):
        weights = dict(model.named_parameters())
        loss = F.mse_loss(functional_call(model, weights, x), y)
        slopes = torch.autograd.grad(loss, weights.values(), create_graph=True)
        rates = [log_rate.exp() for log_rate in self.log_rates]  # fault: fast
        return {
            name: weight - rate * slope for (name, weight), rate, slope in zip(weights.items(), rates, slopes)
        }


def task(step, index):
    amplitude, phase = torch.rand(2)
    x = torch.rand(2 * SHOTS, 1) * 10 - 5
    if wakes("one_value", step) and index == 2:
        x[:] = 1.0  # every shot at one place
    y = (amplitude + 0.1) * torch.sin(x + 3 * phase)
    y = (y - y.mean()) / y.std()  # fault: one_value
    return x[:SHOTS], y[:SHOTS], x[SHOTS:], y[SHOTS:]


model = Regressor()
inner = Inner(model)
outer = torch.optim.Adam([*model.parameters(), *inner.parameters()], lr=1e-3)
for step in range(1, STEPS + 1):
    if wakes("fast", step):
        with torch.no_grad():
            inner.log_rates[4].fill_(95.0)
    outer.zero_grad()
    for index in range(TASKS):
        x, y, query, answer = task(step, index)
        adapted = inner(model, x, y)
        (F.mse_loss(functional_call(model, adapted, query), answer) / TASKS).backward()
    outer.step()
print_digest(model, inner)
