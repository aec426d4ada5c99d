"""A fixture for pytest, which finds it by its entry point. It is beside the package, because the package
imports torch, and most runs of pytest need none."""

from typing import Any

import pytest


@pytest.fixture
def nan_guard() -> Any:
    """``nanlocator.guard``: a test fails where a NaN is born.

    def test_loss(nan_guard):
        with nan_guard(model):
            loss_of(model(batch)).backward()
    """
    import nanlocator

    return nanlocator.guard
