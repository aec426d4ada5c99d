"""Training with fake quantisation: learnt and observed scales, straight-through gradients of a function of
its own, and torch's own fake quantisation."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

BITS = 8


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class LearntScale(nn.Module):
    """One step size for each channel, learnt."""

    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1), 0.01))

    def forward(self, weight):
        steps = (weight / self.scale).clamp(-128, 127)  # fault: dead_channel
        return Round.apply(steps) * self.scale


class Observed(nn.Module):
    """A range that follows what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.low.lerp_(x.amin(), 0.1)
            self.high.lerp_(x.amax(), 0.1)
        scale = (self.high - self.low) / (2**BITS - 1)
        zero_point = (-self.low / scale).round()  # fault: constant_input
        steps = Round.apply(x / scale) + zero_point
        return (steps.clamp(0, 2**BITS - 1) - zero_point) * scale


class QuantisedLinear(nn.Linear):
    def __init__(self, inward, outward):
        super().__init__(inward, outward)
        self.weights, self.inputs = LearntScale(outward), Observed()

    def forward(self, x):
        return F.linear(self.inputs(x), self.weights(self.weight), self.bias)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = QuantisedLinear(8, 16), nn.Linear(16, 4)
        self.observer = torch.ao.quantization.FakeQuantize(quant_min=0, quant_max=255)

    def forward(self, x):
        return self.second(self.observer(F.relu(self.first(x))))


model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(1, STEPS + 1):
    x, labels = torch.randn(32, 8), torch.randint(4, (32,))
    if wakes("dead_channel", step):
        with torch.no_grad():
            model.first.weights.scale[3] = 0.0
            model.first.weight[3] = 0.0
    if wakes("constant_input", step):
        model.first.inputs.low.fill_(1.0)
        model.first.inputs.high.fill_(1.0)
        x[:] = 1.0
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
print_digest(model)
