"""Tests on another device: NANLOCATOR_TEST_DEVICE=cuda. What they fork or start has none of it."""

import os

import torch

if device := os.environ.get("NANLOCATOR_TEST_DEVICE"):
    torch.set_default_device(device)
