"""Faults on Megatron-Core of which the verdict accuses something that is innocent.

The truth is the fault's own record of its action (`planted`), never the verdict. Faults of one layout share a
run, in which each iteration plants another one and is undone; each recurs in every execution of its step.
"""

from __future__ import annotations

import dataclasses

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

SMALL = {"hidden": 32, "sequence": 16, "num_microbatches": 2, "layers": 2}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 3000}
LAYER = "decoder.layers.1"
FIRST = 2  # iteration of a run's first fault


def overwritten_gradient(parameter: str) -> dict:
    """Memory that code off the dispatcher writes to, just before the data-parallel reduction."""
    return {"name": "main_grad_element", "rank": 1, "parameter": parameter, "repeats": None}


def wrong_collective(rank: int, direction: str, turn: int) -> dict:
    return {"name": "exchange", "rank": rank, "direction": direction, "turn": turn}


@dataclasses.dataclass
class Layout:
    ranks: int
    training: dict
    faults: dict[str, dict]


# Ranks with tp 2: 0 and 1 are data-parallel replica 0, 2 and 3 replica 1. With ep 2 the same of experts.
LAYOUTS = {
    "dp2": Layout(
        2,
        {},
        {
            name: overwritten_gradient(f"{LAYER}.{name}")
            for name in ("self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
        }
        | {"factor": {"name": "infinite_factor"}},
    ),
    "dp2_overlapped": Layout(
        2,
        OVERLAPPED,
        {
            name: overwritten_gradient(f"{LAYER}.{name}")
            for name in ("self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
        },
    ),
    "dp2_sharded_bf16": Layout(
        2,
        {"use_distributed_optimizer": True, "precision": "bf16"},
        {"factor": {"name": "infinite_factor"}},
    ),
    "tp2": Layout(
        2,
        {"tp": 2},
        {"forward": wrong_collective(1, "forward", 2), "sum": {"name": "overflowing_sum"}},
    ),
    "tp2_dp2": Layout(
        4,
        {"tp": 2},
        {
            "forward": wrong_collective(3, "forward", 2),
            "backward": wrong_collective(3, "backward", 0),
            "sum": {"name": "overflowing_sum", "rank": 2},
            "factor": {"name": "infinite_factor"},
        },
    ),
    "tp2_sequence_parallel": Layout(
        2,
        {"tp": 2, "sequence_parallel": True},
        {
            "gather": {"name": "tensor_parallel_gather", "rank": 1, "repeats": None},
            "sum": {"name": "overflowing_sum"},
        },
    ),
    "ep2_dp4": Layout(
        4,
        {"ep": 2, "num_experts": 4},
        {
            "forward": wrong_collective(3, "forward", 0),
            "backward": wrong_collective(3, "backward", 0),
        },
    ),
}


@pytest.fixture(scope="module")
def runs(pool):
    """By layout, the ranks' results; a layout is trained when it is first asked for."""
    finished: dict[str, list[dict]] = {}

    def run(name: str) -> list[dict]:
        if name not in finished:
            layout = LAYOUTS[name]
            faults = [fault | {"iteration": FIRST + i} for i, fault in enumerate(layout.faults.values())]
            outcome = pool.run(
                {
                    "name": f"false_{name}",
                    "ranks": layout.ranks,
                    "steps": len(faults) + 1,
                    "training": SMALL | layout.training,
                    "nanlocator": {"on_bad": "report"},
                    "faults": faults,
                    "undo_faults": True,
                }
            )
            finished[name] = outcome.require_success()
        return finished[name]

    return run


@dataclasses.dataclass
class Incident:
    verdict: dict
    planted: list[dict]  # by all ranks, in the step's first pass

    @property
    def origin(self) -> dict:
        assert len(self.verdict["origins"]) == 1, [each["cause"] for each in self.verdict["origins"]]
        return self.verdict["origins"][0]

    def facts(self, kind: str) -> list[dict]:
        return [fact for fact in self.origin["facts"] if fact["kind"] == kind]


@pytest.fixture
def incident_of(runs):
    def incident(layout: str, fault: str) -> Incident:
        iteration = FIRST + list(LAYOUTS[layout].faults).index(fault)
        ranks = runs(layout)
        of_fault = [f for rank in ranks for f in rank["planted"] if f["iteration"] == iteration]
        planted = [fact for fact in of_fault if fact["pass_number"] == 1]
        verdicts = {verdict["iteration"]: verdict for verdict in ranks[0]["verdicts"]}
        if not planted or iteration not in verdicts:
            pytest.fail(f"{fault} did not act, or was not found")  # no AssertionError: never expected
        return Incident(verdicts[iteration], planted)

    return incident


@pytest.mark.parametrize("layout", ["dp2", "dp2_overlapped"])
@pytest.mark.parametrize(
    "parameter", ["self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.bias"]
)
def test_gradient_memory_that_is_overwritten_after_its_last_write_accuses_no_module(
    incident_of, layout, parameter
):
    incident = incident_of(layout, parameter)
    (fact,), origin = incident.planted, incident.origin
    assert (origin["candidates"], origin["parameter"]) == ([fact["rank"]], fact["parameter"])
    assert (origin["cause"], origin["owner"]) == ("memory_corruption", "model_author")
    assert not origin["module"] and not origin["forward_operator"]
    (written,) = incident.facts("finite_when_written")
    assert written["writer"] == "aten::add_.Tensor"  # of Megatron's gradient hook


@pytest.mark.parametrize("parameter", ["self_attention.linear_proj.weight", "mlp.linear_fc1.weight"])
def test_the_overwritten_element_is_that_of_the_parameter(incident_of, parameter):
    incident = incident_of("dp2", parameter)
    (fact,), origin = incident.planted, incident.origin
    assert origin["tensor"]["first_bad"] == fact["element"]
    assert origin["tensor"]["shape"] == fact["shape"]


@pytest.mark.parametrize(
    ("layout", "direction", "operator", "module"),
    [
        ("tp2", "forward", "c10d::allreduce_", "decoder.layers.0.mlp.linear_fc2"),
        ("tp2_dp2", "forward", "c10d::allreduce_", "decoder.layers.0.mlp.linear_fc2"),
        ("tp2_dp2", "backward", "c10d::allreduce_", "output_layer"),
        ("ep2_dp4", "forward", "c10d::alltoall_base_", "decoder.layers.0.mlp"),
        ("ep2_dp4", "backward", "c10d::alltoall_base_", "decoder.layers.1.mlp"),
    ],
)
def test_a_collective_that_is_wrong_on_one_member_is_the_only_origin(
    incident_of, layout, direction, operator, module
):
    incident = incident_of(layout, direction)
    (fact,), origin = incident.planted, incident.verdict["origins"][0]
    assert (origin["cause"], origin["owner"]) == ("collective_result", "framework")
    assert (origin["candidates"], origin["microbatch"]) == ([fact["rank"]], fact["microbatch"])
    assert (origin["phase"], origin["operator"], origin["module"]) == (direction, operator, module)
    assert [each["candidates"] for each in incident.verdict["origins"]] == [[fact["rank"]]]


def test_a_gather_that_is_wrong_on_one_member_is_named(incident_of):
    incident = incident_of("tp2_sequence_parallel", "gather")
    (fact,), origin = incident.planted, incident.origin
    assert (origin["candidates"], origin["microbatch"]) == ([fact["rank"]], fact["microbatch"])
    assert (origin["cause"], origin["owner"]) == ("collective_result", "framework")
    assert origin["operator"] == "c10d::_allgather_base_"
    assert (origin["phase"], origin["module"]) == ("forward", fact["module"])
    assert not incident.facts("missing_operator")


@pytest.mark.parametrize(
    "layout",
    ["tp2", "tp2_dp2", "tp2_sequence_parallel"],
)
def test_a_sum_that_overflows_in_one_element_is_no_fault_of_the_collective(incident_of, layout):
    incident = incident_of(layout, "sum")
    assert all(fact["is_finite"] for fact in incident.planted)
    origin = incident.verdict["origins"][0]
    assert origin["candidates"] == [fact["rank"] for fact in incident.planted]
    assert (origin["phase"], origin["module"]) == ("forward", incident.planted[0]["module"])
    assert (origin["cause"], origin["owner"]) == ("collective_sum", "model_author")


@pytest.mark.parametrize("layout", ["dp2", "tp2_dp2", "dp2_sharded_bf16"])
def test_a_factor_of_all_reduced_gradients_is_one_origin(incident_of, layout):
    incident = incident_of(layout, "factor")
    origin = incident.origin
    assert (origin["phase"], origin["owner"]) == ("grad_norm", "unknown")
    assert origin["candidates"] == [fact["rank"] for fact in incident.planted]
