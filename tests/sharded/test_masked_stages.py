"""A pipeline's stage whose own backward masks the NaN that it sends on: its gradients stay finite."""

import torch
from ranks import run_kept_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import nanlocator


class Deviation(nn.Module):
    """0 / 0 for a row of zeros, for which relu's slope is zero."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        hidden = torch.relu(self.linear(x))
        return x + (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, keepdim=True)


def masked(rank, world_size):
    torch.manual_seed(0)
    first = nn.Linear(16, 16)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    model = (first, Deviation(), nn.Linear(16, 4))[rank]
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    watch = nanlocator.watch(model, optimizer)
    try:
        for step in range(1, 4):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
            if step == 3:
                x[9] = 0
            optimizer.zero_grad()
            schedule.step(
                *([x] if rank == 0 else []), **({"target": torch.arange(16) % 4} if rank == 2 else {})
            )
            if rank == 1 and step == 3:
                gradients = [p.grad for p in model.parameters()]
                assert all(each.isfinite().all() for each in gradients)
            optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


def test_what_a_stage_with_finite_gradients_sent_is_located():
    verdict = run_kept_ranks(3, masked)[0]
    (origin,) = verdict["origins"]
    assert (origin["coordinates"]["rank"], origin["microbatch"]) == (1, 2)
    assert (origin["operator"], origin["detail"]) == ("aten::div.Tensor", "zero_over_zero")
