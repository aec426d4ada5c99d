"""Positions under real Megatron-Core schedules: a plain count of the crossings beside nanlocator's, in the
first pass and in the re-run.

All scenarios run in one process that forks their ranks (run_positions.py).
"""

from __future__ import annotations

import json
import pathlib

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

SMALL = {"hidden": 32, "sequence": 16, "layers": 4, "num_microbatches": 4}
BAD = 2  # the iteration of the fault

SCENARIOS = {
    "pp2": (2, {"pp": 2}, {"direction": "forward", "rank": 1, "layer": 2, "microbatch": 1}),
    "tp2_pp2_backward": (
        4,
        {"tp": 2, "pp": 2},
        {"direction": "backward", "rank": 2, "layer": 3, "microbatch": 2},
    ),
    "tp2_pp2_sequence_parallel_recomputed": (
        4,
        {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
        {"direction": "forward", "rank": 0, "layer": 1, "microbatch": 1},
    ),
    "pp2_interleaved_overlapped": (
        2,
        {"pp": 2, "vp": 2, "overlap_p2p_comm": True},
        {"direction": "forward", "rank": 0, "layer": 2, "microbatch": 1},
    ),
    "pp2_interleaved_overlapped_backward": (
        2,
        {"pp": 2, "vp": 2, "overlap_p2p_comm": True},
        {"direction": "backward", "rank": 1, "layer": 1, "microbatch": 2},
    ),
}


@pytest.fixture(scope="module")
def runs(run_by, tmp_path_factory):
    """{scenario: [result of each rank]}."""
    scenarios = [
        {
            "name": name,
            "ranks": ranks,
            "steps": BAD,
            "training": SMALL | training,
            "nanlocator": {"on_bad": "report"},
            "faults": [{"iteration": BAD, **fault}],
        }
        for name, (ranks, training, fault) in SCENARIOS.items()
    ]
    results = run_by("run_positions.py", scenarios, tmp_path_factory.mktemp("positions"))
    errors = {name: [rank["error"] for rank in ranks] for name, ranks in results.items()}
    assert errors == {scenario["name"]: [None] * scenario["ranks"] for scenario in scenarios}
    return results


def _passes_of_bad_step(rank):
    """The first pass and its re-runs; earlier steps have one pass each."""
    passes = rank["passes"][BAD - 1 :]
    assert len(passes) >= 2
    return passes


def _records(rank, record):
    for path in pathlib.Path(rank["run_dir"]).glob("ledger_*.jsonl"):
        header, *lines = map(json.loads, path.read_text().splitlines())
        if header["coordinates"]["rank"] == rank["rank"]:
            return [each for each in lines if each["record"] == record]
    raise AssertionError("the rank has written no ledger")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_position_is_the_number_of_crossings_that_were_issued(runs, name):
    for rank in runs[name]:
        for each in rank["passes"]:
            assert each["places"][-1][2] > 0
            assert [place for place in each["places"] if place[2] != place[3]] == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_forward_and_backward_of_each_module_have_the_same_position_in_first_pass_and_re_run(runs, name):
    for rank in runs[name]:
        first, *again = _passes_of_bad_step(rank)
        assert any(place[0].startswith("backward of ") for place in first["places"])
        for each in again:
            assert each["places"] == first["places"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_birth_has_the_position_at_which_the_fault_computes(runs, name):
    fault = SCENARIOS[name][2]
    guilty = runs[name][fault["rank"]]
    first, again, *_ = _passes_of_bad_step(guilty)
    assert again["born"] == first["born"] != []
    births = [birth["sighting"] for birth in _records(guilty, "birth")]
    divisions = [
        birth["position"]
        for birth in births
        if (birth["operator"], birth["phase"]) == ("aten::div.Tensor", fault["direction"])
    ]
    assert divisions == again["born"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_sent_bad_has_the_ordinal_of_its_crossing(runs, name):
    operators = {"c10d::allreduce_": "allreduce", "c10d::send": "send"}
    for rank in runs[name]:
        bad = _passes_of_bad_step(rank)[0]["bad_inputs"]
        sent = [
            [operators[each["operator"]], each["position"]]
            for each in _records(rank, "sighting")
            if each["role"] == "sent" and each["operator"] in operators
        ]
        assert sent == bad
    assert any(_passes_of_bad_step(rank)[0]["bad_inputs"] for rank in runs[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_after_the_pass_have_no_position(runs, name):
    gradients = [
        each
        for rank in runs[name]
        for each in _records(rank, "sighting")
        if each["phase"].startswith("grad_")
    ]
    assert gradients
    assert [each for each in gradients if each["crossing"] is None and "position" in each] == []
