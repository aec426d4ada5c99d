"""An anchor-based detector: boxes are matched to anchors, encoded as offsets, and refined by a GIoU loss."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

SIZE, CLASSES, IMAGES = 16, 3, 2


def anchors_of(size, stride=4, side=6.0):
    steps = torch.arange(stride / 2, size, stride)
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    centres = torch.stack([x.flatten(), y.flatten()], 1)
    return torch.cat([centres - side / 2, centres + side / 2], 1)


def area(boxes):
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def overlap(a, b):
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    inner = (high - low).clamp(min=0).prod(-1)
    return inner, area(a) + area(b) - inner


def box_of_nearest(anchors, boxes):
    """For each anchor, the box whose centre is nearest to it of all anchors; -1 for most."""
    centres, own = (boxes[:, 2:] + boxes[:, :2]) / 2, (anchors[:, 2:] + anchors[:, :2]) / 2
    distance = torch.cdist(centres, own)
    nearest = torch.full((len(anchors),), -1)
    is_inside = distance.amin(1) < 4
    nearest[distance.argmin(1)[is_inside]] = torch.arange(len(boxes))[is_inside]
    return nearest


def encode(boxes, anchors):
    size, anchor_size = boxes[:, 2:] - boxes[:, :2], anchors[:, 2:] - anchors[:, :2]
    centre, anchor_centre = (boxes[:, 2:] + boxes[:, :2]) / 2, (anchors[:, 2:] + anchors[:, :2]) / 2
    stretch = torch.log(size / anchor_size)  # fault: flat
    return torch.cat([(centre - anchor_centre) / anchor_size, stretch], 1)


def decode(offsets, anchors):
    size, centre = anchors[:, 2:] - anchors[:, :2], (anchors[:, 2:] + anchors[:, :2]) / 2
    centre = centre + offsets[:, :2] * size
    size = size * torch.exp(offsets[:, 2:].clamp(max=4))
    return torch.cat([centre - size / 2, centre + size / 2], 1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )
        self.classes, self.boxes = nn.Conv2d(16, CLASSES + 1, 1), nn.Conv2d(16, 4, 1)
        self.register_buffer("anchors", anchors_of(SIZE), persistent=False)

    def forward(self, images, targets=None):
        features = self.backbone(images)
        logits = self.classes(features).flatten(2).transpose(1, 2)
        offsets = self.boxes(features).flatten(2).transpose(1, 2)
        if self.training:
            return self.losses(logits, offsets, targets)
        return [
            {"boxes": decode(one, self.anchors), "scores": s.softmax(-1)} for one, s in zip(offsets, logits)
        ]

    def losses(self, logits, offsets, targets):
        losses = {"class": [], "offset": [], "giou": []}
        for image, target in enumerate(targets):
            inner, union = overlap(self.anchors[:, None], target["boxes"][None])
            best, matched = (inner / union.clamp(min=1e-6)).max(1)
            nearest = box_of_nearest(self.anchors, target["boxes"])
            matched = torch.where(best > 0.1, matched, nearest)
            positive = (best > 0.1) | (nearest >= 0)
            matched = matched.clamp(min=0)
            labels = torch.where(positive, target["labels"][matched] + 1, 0)
            losses["class"].append(F.cross_entropy(logits[image], labels))
            anchors, boxes = self.anchors[positive], target["boxes"][matched[positive]]
            encoded = encode(boxes, anchors)
            losses["offset"].append(F.smooth_l1_loss(offsets[image][positive], encoded))  # fault: unmatched
            losses["giou"].append(self.giou(decode(offsets[image][positive], anchors), boxes))
        return {name: torch.stack(values).mean() for name, values in losses.items()}

    def giou(self, predicted, boxes):
        inner, union = overlap(predicted, boxes)
        low, high = (
            torch.minimum(predicted[:, :2], boxes[:, :2]),
            torch.maximum(predicted[:, 2:], boxes[:, 2:]),
        )
        hull = (high - low).prod(-1)
        return (1 - inner / union + (hull - union) / hull).sum() / max(len(boxes), 1)


def sample(step):
    images = torch.randn(IMAGES, 3, SIZE, SIZE)
    targets = []
    for image in range(IMAGES):
        corner = torch.rand(2, 2) * (SIZE - 8)
        boxes = torch.cat([corner, corner + 3 + 5 * torch.rand(2, 2)], 1)
        if wakes("flat", step) and image == 0:
            boxes[0] = torch.tensor([6.0, 4.0, 6.0, 10.0])  # a polygon of one column: no width
        if wakes("unmatched", step) and image == 1:
            boxes = boxes + 100  # a crop that left them outside of the image
        targets.append({"boxes": boxes, "labels": torch.randint(CLASSES, (2,))})
    return images, targets


model = Detector().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [200])
for step in range(1, STEPS + 1):
    images, targets = sample(step)
    loss_dict = model(images, targets)
    loss = sum(loss_dict.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print_digest(model)
