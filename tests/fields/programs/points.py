"""An autoencoder of point clouds: a shared network with a maximum over points, and the Chamfer distance."""

import torch
from program import STEPS, print_digest, wakes
from torch import nn

CLOUDS, POINTS, WIDTH = 4, 16, 32


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(
            nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1)
        )

    def forward(self, cloud):
        centred = cloud - cloud.mean(1, keepdim=True)
        radius = centred.square().sum(2).sqrt().amax(1)
        unit = centred / radius[:, None, None]  # fault: one_point
        return self.shared(unit.transpose(1, 2)).amax(2), radius


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3 * POINTS))

    def forward(self, code):
        return self.body(code).view(-1, POINTS, 3)


def chamfer(a, b):
    distance = (a[:, :, None] - b[:, None]).square().sum(-1).sqrt()  # fault: exact
    return distance.amin(1).mean() + distance.amin(2).mean()


encoder, decoder = Encoder(), Decoder()
optimizer = torch.optim.RMSprop([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step in range(1, STEPS + 1):
    clouds = torch.randn(CLOUDS, POINTS, 3)
    if wakes("one_point", step):
        clouds[1] = clouds[1, :1]  # a scan that returned once
    optimizer.zero_grad()
    code, radius = encoder(clouds)
    rebuilt = decoder(code) * radius[:, None, None]
    if wakes("exact", step):
        rebuilt = torch.cat([clouds[:, :1] + 0 * rebuilt[:, :1], rebuilt[:, 1:]], 1)  # a point that is kept
    loss = chamfer(rebuilt, clouds)
    loss.backward()
    optimizer.step()
print_digest(encoder, decoder)
