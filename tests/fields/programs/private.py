"""Differentially private SGD: a gradient for each sample by vmap, scaled to one norm, summed, with noise."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn
from torch.func import functional_call, grad, vmap

BATCH, FEATURES, CLASSES, CLIP, NOISE = 16, 8, 3, 1.0, 0.5

model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, x, label):
    logits = functional_call(model, parameters, (x[None],))
    return F.cross_entropy(logits, label[None])


def norm_of(x):
    return x / x.square().sum(1, keepdim=True).sqrt()  # fault: empty_record


for step in range(1, STEPS + 1):
    x, labels = torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))
    if wakes("empty_record", step):
        x[4] = 0
    if wakes("padding", step):
        labels[3] = -100  # a record that only fills the batch
    x = norm_of(x)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, labels)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()], 1).norm(dim=1)
    factor = CLIP / norms  # fault: padding
    for name, parameter in model.named_parameters():
        total = torch.einsum("b,b...->...", factor, per_sample[name])
        parameter.grad = (total + NOISE * CLIP * torch.randn_like(total)) / BATCH
    optimizer.step()
    optimizer.zero_grad()
print_digest(model)
