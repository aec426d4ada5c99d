"""A run whose learning rate grows until it overflows is reported as a divergence; one whose learning rate
jumps by many orders of magnitude between two steps is not."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

LAYOUTS = {
    "tp2": {"tp": 2},
    "dp2_distributed_optimizer": {"use_distributed_optimizer": True},
    "pp2": {"pp": 2},
}


def stopped(pool, name, layout, **fault):
    scenario = {
        "name": f"divergence_{name}",
        "ranks": 2,
        "steps": 60,
        "training": {"layers": 2, "hidden": 64, "sequence": 16} | LAYOUTS[layout],
        "nanlocator": {"on_bad": "stop"},
        "faults": [{"name": "learning_rate"} | fault],
        "timeout": 300.0,
    }
    ranks = pool.run(scenario).require_results()
    verdict = ranks[0]["error"]["verdict"]
    assert all(rank["error"]["verdict"] == verdict for rank in ranks)
    return verdict, ranks


def histories_of(ranks):
    """The headers and the parameters of all ranks' history files."""
    for path in sorted(pathlib.Path(ranks[0]["run_dir"]).glob("history_*.jsonl")):
        header, *parameters, end = map(json.loads, path.read_text().splitlines())
        assert end == {"record": "end", "lines": len(parameters)}
        yield header, parameters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_climb_over_steps_until_they_overflow_are_a_divergence(pool, layout):
    # With a larger factor a single step grows a million times, which is a jump. The data, and so the path,
    # differ between versions of Python.
    verdict, _ = stopped(pool, f"climb_{layout}", layout, iteration=2, factor=4.0)
    causes = [origin["cause"] for origin in verdict["origins"]]
    assert causes
    assert set(causes) == {"divergence"}
    for origin in verdict["origins"]:
        (climb,) = (fact for fact in origin["facts"] if fact["kind"] == "climbed")
        assert climb["last_value"] / climb["value"] >= 1e3
        assert origin["action_kind"] == "lower_learning_rate"


def test_a_learning_rate_that_is_wrong_once_is_no_divergence(pool):
    verdict, _ = stopped(pool, "jump", "tp2", iteration=9, factor=1e25, steps=1)
    assert verdict["iteration"] == 10
    for origin in verdict["origins"]:
        assert origin["cause"] != "divergence"
    assert any(fact["kind"] == "did_not_climb" for origin in verdict["origins"] for fact in origin["facts"])


def test_the_norms_in_the_histories_are_those_that_megatron_computed(pool):
    # Two stages and one replica: every parameter is on one rank, and its gradient is the optimizer's.
    verdict, ranks = stopped(pool, "norms", "pp2", iteration=2, factor=4.0)
    histories = list(histories_of(ranks))
    assert len(histories) == 2
    for header, _ in histories:
        assert header["phase"] == "grad_local"
        assert header["iterations"] == list(range(1, verdict["iteration"] + 1))
    for record in ranks[0]["records"]:
        norms = [p["norm"][record["iteration"] - 1] for _, parameters in histories for p in parameters]
        assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(record["grad_norm"], rel=1e-4)
