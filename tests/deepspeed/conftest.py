import on_cpu
import pytest
from fixtures import run_in_tmp_path, same_seed, without_leftovers  # noqa: F401


@pytest.fixture(autouse=True)
def needs_deepspeed():
    if not (on_cpu.PACKAGES / "deepspeed").is_dir():
        pytest.skip("needs what tools/setup fetches into .setup/deepspeed")
