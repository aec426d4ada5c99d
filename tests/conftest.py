"""Which tests run (--tenth, --turn), in which order, and on which device: NANLOCATOR_TEST_DEVICE=cuda."""

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
    parser.addoption("--turn", type=int, help="of tests marked in_turn only the cases of this turn")


def leave_out(config, items, is_left):
    left = {item for item in items if is_left(item)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def other_turns(items, turn):
    """The cases of tests marked in_turn that another turn runs."""
    number_of, left = Counter(), set()
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker is None or item.get_closest_marker("exhaustive"):
            continue
        test = item.nodeid.partition("[")[0]
        if number_of[test] % marker.args[0] != turn % marker.args[0]:
            left.add(item)
        number_of[test] += 1
    return left


def start_long_files_first(items):
    """Else one worker is still in a file when the others have none left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests_of = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests_of[item.path]))


def pytest_collection_modifyitems(config, items):
    tenth = config.getoption("--tenth")
    if tenth is not None:
        is_of_another = lambda item: zlib.crc32(item.nodeid.encode()) % 10 != tenth  # noqa: E731
        leave_out(config, items, lambda item: item.get_closest_marker("exhaustive") and is_of_another(item))
    turn = config.getoption("--turn")
    if turn is not None and DEVICE == "cpu":
        others = other_turns(items, turn)
        leave_out(config, items, others.__contains__)
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
