"""Megatron's fused functions compiled by torch.compile, as its `jit_fuser` does: each fault keeps its
verdict, and the re-run also executed them eagerly."""

from __future__ import annotations

import pytest
from test_matrix import Layout, run_incidents

pytestmark = [pytest.mark.megatron, pytest.mark.compiles, pytest.mark.usefixtures("nanlocator_is_built")]

LAYOUT = Layout(2, {"tp": 2, "bias_fusions": True})
# A fault in the MLP would replace the fusion.
AT = {"rank": 1, "layer": 1, "microbatch": 1, "region": "attention"}
FAULTS = [
    {"name": "forward_operator", "kind": "softmax"} | AT,
    {"name": "backward_operator", "kind": "function"} | AT,
    {"name": "activation_element"} | AT,
    {"name": "loss_zero_over_zero", "rank": 1, "microbatch": 1},
]


def test_a_fault_beside_compiled_fusions_is_named(pool):
    verdicts = run_incidents(
        pool,
        "compiled_fusions",
        LAYOUT,
        [[fault] for fault in FAULTS],
        preparations=[{"name": "compiled_fusions"}],
    )
    eager = [verdict["rerun"]["variants"][0] for verdict in verdicts]
    assert eager == [{"variant": "eager", "bad": fault["name"] != "activation_element"} for fault in FAULTS]
