"""The matrix of faults with TransformerEngine's stand-ins everywhere: linear layers with fused weight
gradients, norms, attention and cross entropy off the dispatcher. Every fault keeps its verdict."""

from pathlib import Path

import pytest
from test_matrix import EXPERTS, OVERLAPPED, Layout, incidents_of, run_incidents

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

SUPPORT = Path(__file__).resolve().parents[1] / "support"
OPAQUE = [{"name": "opaque_engine", "folder": str(SUPPORT)}]

LAYOUTS = {
    "tp2_pp2": Layout(4, {"tp": 2, "pp": 2}),
    "sequence_parallel": Layout(4, {"tp": 2, "sequence_parallel": True}),
    "overlap_grad_reduce": Layout(2, OVERLAPPED),
    "sequence_parallel_tied_embeddings": Layout(
        4, {"tp": 2, "pp": 2, "sequence_parallel": True, "tied_embeddings": True}
    ),
    "tp2_pp2_dp2": Layout(8, {"tp": 2, "pp": 2}),
    "interleaved_pipeline": Layout(4, {"pp": 4, "vp": 2, "layers": 8, "num_microbatches": 4}),
    "selective_recompute": Layout(2, {"tp": 2, "recompute": "selective"}),
    "experts_alltoall": Layout(4, EXPERTS),
    "full_recompute": Layout(4, {"tp": 2, "pp": 2, "recompute": "full"}),
}


@pytest.mark.parametrize("configuration", LAYOUTS)
def test_every_fault_keeps_its_verdict(pool, configuration):
    layout = LAYOUTS[configuration]
    run_incidents(pool, f"opaque_{configuration}", layout, incidents_of(layout), preparations=OPAQUE)
