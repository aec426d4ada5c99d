"""A student learns a frozen teacher's distribution and features, in autocast, over accumulated gradients."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

CLASSES, BATCH, ACCUMULATED = 10, 16, 2


def network(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, CLASSES))


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(16), network(64).requires_grad_(False)
        self.projection = nn.Linear(16, 64)
        self.temperature = 2.0

    def forward(self, x):
        hidden = self.student[1](self.student[0](x))
        with torch.no_grad():
            teacher_hidden = self.teacher[1](self.teacher[0](x))
            soft = (self.teacher[2](teacher_hidden) / self.temperature).softmax(-1)
        mine = (self.student[2](hidden) / self.temperature).softmax(-1)
        divergence = (soft * (soft.log() - mine.log())).sum(-1).mean()  # fault: sure_teacher
        features = self.relation(self.projection(hidden), teacher_hidden)
        return divergence * self.temperature**2 + features

    def relation(self, mine, theirs):
        a, b = torch.cdist(mine.float(), mine.float()), torch.cdist(theirs.float(), theirs.float())
        return F.smooth_l1_loss(a / a.mean(), b / b.mean())  # fault: same_samples


model = Distillation()
optimizer = torch.optim.Adamax(filter(lambda p: p.requires_grad, model.parameters()), lr=2e-3)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    for part in range(ACCUMULATED):
        x = torch.randn(BATCH, 8)
        if wakes("sure_teacher", step) and part == 1:
            model.teacher[2].weight.mul_(1e3)  # logits that were not scaled back
        if wakes("same_samples", step) and part == 0:
            x = x[:1].expand(BATCH, 8).contiguous()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x) / ACCUMULATED
        loss.backward()
    optimizer.step()
print_digest(model)
