"""Backend "patient" of torch.distributed: gloo that waits like NCCL (patient_group.cpp)."""

import sys
from pathlib import Path

import torch.distributed as dist

from nanlocator import _C

sys.path.insert(0, str(Path(_C.__file__).parents[2] / "tests"))
import patient_group  # built by tests/CMakeLists.txt


def _patient_group(store, rank, size, timeout):
    return patient_group.patient(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend("patient", _patient_group, devices=["cpu"])
