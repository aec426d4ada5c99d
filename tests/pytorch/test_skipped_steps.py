"""A step that is left out leaves nothing of its NaN in the buffers that its forward has updated."""

import pytest
import torch
from torch import nn

import nanlocator


class Replacing(nn.Module):
    """Its running mean is another tensor after each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x):
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(0)
        return x - self.running_mean


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), Replacing()], ids=["in place", "replaced"])
def test_running_statistics_are_those_before_it(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer, on_bad="skip")
    kept = None
    try:
        for step in range(1, 6):
            data = torch.randn(8, 4)
            if step == 3:
                kept = norm.running_mean.clone()
                data[0, 1] = float("nan")
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                assert torch.equal(norm.running_mean, kept)
        assert len(watch.verdicts) == 1
        assert norm.running_mean.isfinite().all()
    finally:
        watch.remove()
