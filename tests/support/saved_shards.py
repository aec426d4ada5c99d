"""Saves a model and its optimizer by torch.distributed.checkpoint, sharded over the ranks."""

import math

import torch
import torch.distributed.checkpoint as dcp
from checkpoints import trained
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def save(rank: int, world_size: int, path: str, is_bad: bool) -> None:
    """The bad elements: model.2.weight[6, 1] and the first moment of 0.weight at [7, 7]."""
    model, optimizer = trained()
    if is_bad:
        model[2].weight.data[6, 1] = math.nan
        optimizer.state[model[0].weight]["exp_avg"][7, 7] = math.inf
    weights, states = get_state_dict(model, optimizer)
    mesh = init_device_mesh("cpu", (world_size,))

    def sharded(value):
        if isinstance(value, dict):
            return {key: sharded(each) for key, each in value.items()}
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            return distribute_tensor(value.detach(), mesh, [Shard(0)])
        return value

    dcp.save({"model": sharded(weights), "optim": sharded(states), "step": 7}, checkpoint_id=path)
