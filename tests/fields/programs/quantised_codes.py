"""A VQ-VAE whose codebook follows the encoder by exponential moving averages."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

CODES, WIDTH, BATCH, SIZE = 16, 8, 4, 8


class Quantiser(nn.Module):
    def __init__(self, decay=0.9):
        super().__init__()
        self.decay = decay
        codes = torch.randn(CODES, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(CODES))
        self.register_buffer("sums", codes.clone())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, WIDTH)
        distance = flat.square().sum(1, keepdim=True) + self.codes.square().sum(1)  # fault: dead_code
        distance = distance - 2 * flat @ self.codes.T
        chosen = distance.argmin(1)
        quantised = self.codes[chosen].view(BATCH, *z.shape[2:], WIDTH).permute(0, 3, 1, 2)
        hot = F.one_hot(chosen, CODES).float()
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(hot.T @ flat, alpha=1 - self.decay)
                self.codes.copy_(self.sums / self.sizes[:, None])
        commitment = F.mse_loss(z, quantised.detach())
        used = hot.mean(0)
        perplexity = torch.exp(-(used * torch.log(used + 1e-10)).sum())
        return z + (quantised - z).detach(), commitment, perplexity


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, WIDTH, 4, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 1))
        self.quantiser = Quantiser()
        self.decoder = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 1), nn.ReLU(), nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1)
        )

    def forward(self, x):
        z = self.encoder(x)
        quantised, commitment, perplexity = self.quantiser(z)
        return self.decoder(quantised), commitment, perplexity


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
variance = 1.0
for step in range(1, STEPS + 1):
    x = torch.rand(BATCH, 1, SIZE, SIZE)
    if wakes("dead_code", step):
        model.quantiser.sizes[3] = 0  # a code that nothing has chosen for very long
        model.quantiser.sums[3] = 0
        model.quantiser.codes[3] = 1e3
    if wakes("constant", step):
        x[:] = 0.5
    optimizer.zero_grad()
    reconstruction, commitment, perplexity = model(x)
    error = F.mse_loss(reconstruction, x) / x.var()  # fault: constant
    loss = error + 0.25 * commitment
    loss.backward()
    optimizer.step()
print_digest(model)
