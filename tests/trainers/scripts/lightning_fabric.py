"""A loop of lightning.Fabric: setup, backward, clip_gradients; a small image classifier."""

import faults
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader

CLASSES, SIZE, BATCH, STEPS = 10, 8, 4, 5


class Standardize(nn.Module):
    """Normalises every image to mean zero and deviation one."""

    def forward(self, image):
        centred = image - image.mean(dim=(1, 2, 3), keepdim=True)
        return centred / centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()  # the fault: norm


class LogCompress(nn.Module):
    """Adds the logarithm of every image's brightness."""

    def forward(self, image):
        brightness = torch.log(image.mean(dim=(1, 2, 3), keepdim=True))  # the fault: log
        return image + brightness


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.prepare = LogCompress() if faults.KIND == "log" else Standardize()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(16 * 4 * 4, CLASSES)

    def forward(self, image):
        return self.head(faults.flip_activation(self.body(self.prepare(image))))


def weighted_loss(logits, labels, weights):
    nll = F.cross_entropy(logits, labels, reduction="none")
    return (nll * weights).sum() / weights.sum()  # the fault: loss


def make_data():
    data = []
    for step in range(STEPS):
        images, labels = torch.rand(BATCH, 1, SIZE, SIZE), torch.randint(0, CLASSES, (BATCH,))
        if faults.wakes("model", step):
            images[1] = 0  # a black one
        weights = torch.full((BATCH,), 0.0 if faults.wakes("loss", step) else 1.0)
        data += list(zip(images, labels, weights, strict=True))
    return data


def main():
    seed_everything(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH))
    losses = []
    for images, labels, weights in loader:
        optimizer.zero_grad()
        loss = weighted_loss(model(images), labels, weights)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        losses.append(loss.item())
    faults.report(losses, model)


if __name__ == "__main__":
    main()
