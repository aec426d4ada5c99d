"""Two networks and two optimizers: D learns on real and fake images, then G through D."""

import faults
import torch
from torch import nn

LATENT, IMAGE, WIDTH, BATCH, STEPS = 16, 64, 32, 8, 5


class PixelNorm(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)  # the fault: norm


class MinibatchDeviation(nn.Module):
    """Appends the deviation of the batch's images."""

    def forward(self, x):
        deviation = x.var(dim=0, correction=0).sqrt().mean()  # the fault: sqrt
        return torch.cat([x, deviation.expand(len(x), 1)], dim=1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapping = nn.Sequential(PixelNorm(), nn.Linear(LATENT, WIDTH), nn.LeakyReLU(0.2))
        self.synthesis = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, IMAGE), nn.Tanh()
        )

    def forward(self, z):
        return self.synthesis(self.mapping(z))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(IMAGE, WIDTH), nn.LeakyReLU(0.2))
        self.deviation = MinibatchDeviation()
        self.head = nn.Sequential(nn.Linear(WIDTH + 1, 1), nn.Sigmoid())

    def forward(self, image):
        return self.head(self.deviation(self.features(image)))


def draw_images(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.rand(BATCH, IMAGE, generator=generator) * 2 - 1
    if faults.wakes("sqrt", step):
        images[:] = 0  # all equal
    if faults.wakes("loss", step):
        images *= 1e4  # the images were not scaled
    return images


def draw_latents(step):
    z = torch.randn(BATCH, LATENT)
    if faults.wakes("norm", step):
        z[0] = 0
    return z


def train():
    torch.manual_seed(0)
    g, d = Generator(), Discriminator()
    g_optimizer = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    losses = []
    for step in range(STEPS):
        real = draw_images(step)
        fake = g(draw_latents(step=None))
        d_loss = -(torch.log(d(real)) + torch.log(1 - d(fake.detach()))).mean()  # the fault: loss
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()

        fake = g(draw_latents(step))
        g_loss = -torch.log(d(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        faults.flip(g.mapping[1].weight.grad, step == faults.STEP)
        g_optimizer.step()
        losses += [d_loss.item(), g_loss.item()]
    faults.report(losses, g, d)


if __name__ == "__main__":
    train()
