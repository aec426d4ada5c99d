"""The whole suite on another device: NANLOCATOR_TEST_DEVICE=cuda (tools/gpu, step suite). Only tests that stay in
their own process are then on it; ranks that are forks have none."""

import os

import torch

if device := os.environ.get("NANLOCATOR_TEST_DEVICE"):
    torch.set_default_device(device)
