"""Which tests run (--tenth), and on which device: NANLOCATOR_TEST_DEVICE=cuda, for this process alone."""

import os
import zlib

import pytest
import torch

DEVICE = os.environ.get("NANLOCATOR_TEST_DEVICE", "cpu")

if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


def pytest_addoption(parser):
    parser.addoption("--tenth", type=int, choices=range(10), help="of the exhaustive tests only this tenth")


def pytest_collection_modifyitems(config, items):
    tenth = config.getoption("--tenth")
    if tenth is not None:
        left = [item for item in items if zlib.crc32(item.nodeid.encode()) % 10 != tenth]
        left = [item for item in left if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if DEVICE == "cpu":
        return
    for item in items:
        if item.get_closest_marker("host"):
            item.add_marker(pytest.mark.skip(reason=f"about the host, not about {DEVICE}"))
