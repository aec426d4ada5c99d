"""Which tests run (--tenth), their order, and the device of this process: NANLOCATOR_TEST_DEVICE=cuda."""

import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import KeptRanks

DEVICE = os.environ.get("NANLOCATOR_TEST_DEVICE", "cpu")

if DEVICE != "cpu":
    torch.set_default_device(DEVICE)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Workers that compile the same code would replace a library that another one has mapped (SIGBUS).
    folder = Path(tempfile.gettempdir(), f"torchinductor_tests_{os.getuid()}", worker)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


@pytest.fixture(autouse=True, scope="module")
def own_kept_ranks():
    yield
    KeptRanks.end_all()


def pytest_addoption(parser):
    parser.addoption("--tenth", type=int, choices=range(10), help="of the exhaustive tests only this tenth")


def start_long_files_first(items):
    """Else one worker is still in a file when the others have none left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests_of = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests_of[item.path]))


def pytest_collection_modifyitems(config, items):
    tenth = config.getoption("--tenth")
    if tenth is not None:
        chosen, left = [], []
        for item in items:
            is_left = item.get_closest_marker("exhaustive") and zlib.crc32(item.nodeid.encode()) % 10 != tenth
            (left if is_left else chosen).append(item)
        config.hook.pytest_deselected(items=left)
        items[:] = chosen
    start_long_files_first(items)
    if " " in torch.__file__:
        for item in items:
            if item.get_closest_marker("compiles"):
                item.add_marker(
                    pytest.mark.skip(reason="torch gives ld its folder without quotes: a space ends it")
                )
    if DEVICE == "cpu":
        return
    for item in items:
        if item.get_closest_marker("host"):
            item.add_marker(pytest.mark.skip(reason=f"about the host, not about {DEVICE}"))
