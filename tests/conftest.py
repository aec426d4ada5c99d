"""Tests on another device: NANLOCATOR_TEST_DEVICE=cuda. What they fork or start has none of it."""

import os

import pytest
import torch

DEVICE = os.environ.get("NANLOCATOR_TEST_DEVICE", "cpu")

if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


def pytest_collection_modifyitems(items):
    if DEVICE == "cpu":
        return
    for item in items:
        if item.get_closest_marker("host"):
            item.add_marker(pytest.mark.skip(reason=f"about the host, not about {DEVICE}"))
