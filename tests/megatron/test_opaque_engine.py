"""The matrix of faults with TransformerEngine's stand-ins everywhere: linear layers with fused weight
gradients, norms, attention and cross entropy off the dispatcher. Every fault keeps its verdict."""

from pathlib import Path

import pytest
from test_matrix import COMPUTATION, EXPERTS, GRADIENTS, OVERLAPPED, Layout, run_incidents, usual_and_rest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

SUPPORT = Path(__file__).resolve().parents[1] / "support"
OPAQUE = [{"name": "opaque_engine", "folder": str(SUPPORT)}]

LAYOUTS = {
    "sequence_parallel": Layout(2, {"tp": 2, "sequence_parallel": True}, COMPUTATION | GRADIENTS),
    "overlap_grad_reduce": Layout(2, OVERLAPPED, GRADIENTS),
    "selective_recompute": Layout(2, {"tp": 2, "recompute": "selective"}, COMPUTATION),
    "full_recompute": Layout(2, {"pp": 2, "recompute": "full"}, COMPUTATION),
    "experts_alltoall": Layout(2, EXPERTS, COMPUTATION),
    "tp2_pp2": Layout(4, {"tp": 2, "pp": 2}),
    "sequence_parallel_tied_embeddings": Layout(
        4, {"tp": 2, "pp": 2, "sequence_parallel": True, "tied_embeddings": True}
    ),
    "tp2_pp2_dp2": Layout(8, {"tp": 2, "pp": 2}),
    "interleaved_pipeline": Layout(4, {"pp": 4, "vp": 2, "num_microbatches": 4}),
}


COMBINATIONS = {"sequence_parallel_tied_embeddings", "tp2_pp2_dp2", "interleaved_pipeline"}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("configuration", "incidents"), usual_and_rest(LAYOUTS, COMBINATIONS))
def test_every_fault_keeps_its_verdict(pool, request, configuration, incidents):
    name = f"opaque_{request.node.callspec.id}"
    run_incidents(pool, name, LAYOUTS[configuration], incidents, preparations=OPAQUE)
