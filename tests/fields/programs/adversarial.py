"""A Wasserstein GAN with a gradient penalty: five steps of the critic for one of the generator."""

import torch
from program import STEPS, print_digest, wakes
from torch import autograd, nn

LATENT, WIDTH, DATA, BATCH, CRITIC_STEPS = 4, 32, 6, 16, 5


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(LATENT, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, DATA)
        )

    def forward(self, z):
        z = z / z.square().mean(1, keepdim=True).sqrt()  # fault: zero_latent
        return self.body(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DATA, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.body(x)


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = autograd.grad(critic(between).sum(), between, create_graph=True, retain_graph=True)
    norm = slope.square().sum(1).sqrt()  # fault: flat_critic
    return (norm - 1).square().mean()


generator, critic = Generator(), Critic()
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
for step in range(1, STEPS + 1):
    real = torch.randn(BATCH, DATA) @ torch.diag(torch.linspace(0.5, 2, DATA))
    z = torch.randn(BATCH, LATENT)
    for parameter in critic.parameters():
        parameter.requires_grad = True
    if wakes("flat_critic", step):
        with torch.no_grad():
            critic.body[2].weight.zero_()  # weights that a clip of values has set to zero
    if wakes("zero_latent", step):
        z[0] = 0
    with torch.no_grad():
        fake = generator(z)
    critic_optimizer.zero_grad()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
    loss.backward()
    critic_optimizer.step()
    if step % CRITIC_STEPS == 0:
        for parameter in critic.parameters():
            parameter.requires_grad = False
        generator_optimizer.zero_grad()
        generator_loss = -critic(generator(torch.randn(BATCH, LATENT))).mean()
        generator_loss.backward()
        generator_optimizer.step()
print_digest(generator, critic)
