"""One contract of a step, for every adapter: the cases are in contract.py, the loops in loops.py."""

import re
from pathlib import Path

import contract
import loops
import on_cpu
import pytest
import torch
from ranks import KeptRanks, RankServer

from nanlocator.loops.recorder import StepRecorder

_megatron = KeptRanks(RankServer("gpt_training", "nanlocator.megatron", "loops", "contract"))


def in_process(case, adapter):
    case(loops.LOOPS[adapter])


def on_rank(rank, world_size, case, adapter):
    torch.manual_seed(0)
    try:
        case(loops.LOOPS[adapter])
    finally:
        stop_watching()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("adapter", loops.LOOPS)
@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_contract(case, adapter):
    reason = contract.LEFT_OUT.get((case, adapter))
    if reason:
        pytest.skip(reason)
    if adapter == "megatron":
        assert _megatron.run_ranks(1, on_rank, case, adapter) == [None]
    elif adapter.startswith("deepspeed"):
        if not on_cpu.PACKAGES.is_dir():
            pytest.skip("needs what tools/setup fetches into .setup/deepspeed")
        assert on_cpu.run_kept_ranks(1, on_rank, case, adapter) == [None]
    else:
        in_process(case, adapter)


@pytest.fixture(autouse=True)
def nothing_is_watched():
    yield
    stop_watching()


def stop_watching():
    if (recorder := StepRecorder._active) is not None:
        recorder._follower.remove()  # the Watch, with the hooks of its trace


def test_the_cpp_adapter_has_the_same_cases():
    source = (Path(__file__).parent / "contract_test.cpp").read_text()
    there = set(re.findall(r"TEST_P\(Contract, (\w+)\)", source))
    expected = {case.__name__ for case in contract.CASES if (case, "cpp") not in contract.LEFT_OUT}
    assert expected <= there
