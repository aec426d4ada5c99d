import os
from unittest import mock

import pytest
import torch
from fixtures import run_in_tmp_path, same_seed, without_leftovers  # noqa: F401


@pytest.fixture(autouse=True)
def made_in_host_memory():
    """Models and data are created in host memory, whatever the default device: a Trainer moves them to its
    own."""
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    torch.set_default_device(None)
    yield
    torch.set_default_device(device)


@pytest.fixture(autouse=True)
def no_precision_left_behind():
    """Before transformers 5, TrainingArguments(bf16=True) sets the default precision of the whole process."""
    with mock.patch.dict(os.environ):
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        yield
