"""A denoising diffusion model that predicts the velocity, weighted by its signal to noise ratio, with an
exponential moving average of its weights."""

import copy
import math

import torch
from program import STEPS, print_digest, wakes
from torch import nn

LEVELS, CHANNELS, SIZE, BATCH = 100, 2, 8, 8


def cosine_schedule(levels):
    t = torch.linspace(0, 1, levels + 1, dtype=torch.float64)
    alphas = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
    return (alphas[1:] / alphas[0]).float().clamp(1e-5, 0.9999)


class Diffusion(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("alphas", cosine_schedule(LEVELS))

    def noised(self, x, noise, level):
        alpha = self.alphas[level].view(-1, 1, 1, 1)
        return alpha.sqrt() * x + (1 - alpha).sqrt() * noise, alpha.sqrt() * noise - (1 - alpha).sqrt() * x

    def forward(self, x, level):
        noise = torch.randn_like(x)
        noised, velocity = self.noised(x, noise, level)
        error = (self.network(noised, level) - velocity).square().mean(dim=(1, 2, 3))
        alpha = self.alphas[level]
        ratio = alpha / (1 - alpha)  # fault: first_level
        return (error * ratio / (ratio + 1)).mean()


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inward = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.block = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.outward = nn.Conv2d(width, CHANNELS, 3, padding=1)

    def embedding(self, level):
        frequency = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angle = level[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], 1)

    def forward(self, x, level):
        hidden = self.inward(x) + self.time(self.embedding(level))[:, :, None, None]
        return self.outward(hidden + self.block(hidden))


class Average:
    """Weights that follow the trained ones, as samples are drawn from."""

    def __init__(self, model, decay=0.995):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


def images(step):
    raw = torch.randint(0, 256, (BATCH, CHANNELS, SIZE, SIZE)).float()
    if wakes("blank", step):
        raw[3] = 128  # one blank image
    low, high = raw.amin(dim=(1, 2, 3), keepdim=True), raw.amax(dim=(1, 2, 3), keepdim=True)
    return (raw - low) / (high - low) * 2 - 1  # fault: blank


model = Diffusion(Denoiser())
average = Average(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
for step in range(1, STEPS + 1):
    level = torch.randint(LEVELS, (BATCH,))
    if wakes("first_level", step):
        model.alphas[0] = 1.0  # a schedule without noise at its first level
        level[2] = 0
    loss = model(images(step), level)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    average.update(model)
print_digest(model, average.model)
