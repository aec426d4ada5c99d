import os
from unittest import mock

import pytest
from fixtures import run_in_tmp_path, same_seed, without_leftovers  # noqa: F401


@pytest.fixture(autouse=True)
def no_precision_left_behind():
    """Before transformers 5, TrainingArguments(bf16=True) makes it the default of the whole process."""
    with mock.patch.dict(os.environ):
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        yield
