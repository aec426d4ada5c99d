"""A neural differential equation: an adaptive solver with an error estimate, gradients by the adjoint method,
in a function of its own."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

BATCH, STATE, TOLERANCE = 8, 3, 1e-2


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 16), nn.Tanh(), nn.Linear(16, STATE))
        self.gain = nn.Parameter(torch.zeros(STATE))

    def forward(self, t, y):
        return self.body(y) * torch.exp(self.gain) - 0.1 * y  # fault: stiff


@torch.no_grad()
def times_of(f, y, end=1.0):
    """The steps of Heun's method that keep the error below the tolerance."""
    t, h, times = 0.0, 0.25, [0.0]
    while t < end and len(times) < 20:
        assert h > 1e-6, f"underflow of the step: {h}"
        k1 = f(t, y)
        k2 = f(t + h, y + h * k1)
        error = ((h / 2) * (k2 - k1)).abs().amax() / TOLERANCE
        if error <= 1 or h < 1e-2:
            t, y = t + h, y + h / 2 * (k1 + k2)
            times.append(t)
        factor = float(error.clamp(min=1e-4) ** -0.5)
        h = min(max(0.9 * factor, 0.3), 3.0) * h
        h = min(h, max(end - t, 1e-2))
    return times


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, times, y, *parameters):
        ctx.f, ctx.times = f, times
        with torch.no_grad():
            for t, after in zip(times, times[1:]):
                h = after - t
                k1 = f(t, y)
                y = y + h / 2 * (k1 + f(after, y + h * k1))
        ctx.save_for_backward(y, *parameters)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        y, *parameters = ctx.saved_tensors
        totals = [torch.zeros_like(one) for one in parameters]
        for after, t in zip(ctx.times[::-1], ctx.times[-2::-1]):
            h = after - t
            with torch.enable_grad():
                at = y.detach().requires_grad_()
                slope = ctx.f(after, at)
                grad_at, *grads = torch.autograd.grad(slope, [at, *parameters], grad_y)
            y = y - h * slope.detach()
            grad_y = grad_y + h * grad_at
            totals = [total + h * one for total, one in zip(totals, grads)]
        return None, None, grad_y, *totals


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.dynamics, self.head = Dynamics(), nn.Linear(STATE, 1)

    def forward(self, y):
        times = times_of(self.dynamics, y)
        return self.head(Adjoint.apply(self.dynamics, times, y, *self.dynamics.parameters()))


def target_of(y):
    return y.prod(1, keepdim=True).sign() * y.prod(1, keepdim=True).abs().pow(1 / STATE)


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    y = torch.randn(BATCH, STATE)
    if wakes("stiff", step):
        with torch.no_grad():
            model.dynamics.gain[1] = 90.0
    if wakes("logarithm", step):
        target = torch.log(y.prod(1, keepdim=True))  # fault: logarithm
    else:
        target = target_of(y)
    optimizer.zero_grad()
    loss = F.huber_loss(model(y), target)
    loss.backward()
    optimizer.step()
print_digest(model)
