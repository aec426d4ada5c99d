"""A rank is killed: the others end within the deadline, and a verdict on disk names the silent rank.

NANLOCATOR_TEST_REPETITIONS (default 1): number of trials of each place.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal

import pytest
from test_matrix import CONTEXT, FULLY_SHARDED, SMALL

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

DEADLINE = 4.0  # gather_deadline
# Half the deadline to notice a silent rank, one and a half to wait for rank 0's verdict, one for the barrier
# before the error. The rest is for the start and for a busy machine.
PATIENCE = 3 * DEADLINE + 14.0
ITERATION = 2
REPETITIONS = int(os.environ.get("NANLOCATOR_TEST_REPETITIONS", "1"))
LAYOUTS = {  # ranks, training, the killed rank, the rank with the fault
    "pp2": (2, {"pp": 2}, 1, 0),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}, 0, 3),
    "megatron_fsdp": (2, FULLY_SHARDED, 1, 0),
    "context_parallel": (2, CONTEXT, 1, 0),
}


PLACES = ["forward", "before_flag", "repeat", "gathering"]
USUAL = {("pp2", where) for where in PLACES} | {
    ("tp2_pp2", "forward"),  # on the merging rank
    ("tp2_pp2", "gathering"),
    ("megatron_fsdp", "before_flag"),
    ("context_parallel", "repeat"),
}


@pytest.mark.parametrize("repetition", range(REPETITIONS))
@pytest.mark.parametrize(
    ("layout", "where"),
    [
        pytest.param(*case, marks=[] if case in USUAL else pytest.mark.exhaustive)
        for case in itertools.product(LAYOUTS, PLACES)
    ],
)
def test_the_survivors_of_a_killed_rank_name_it_on_disk(pool, where, layout, repetition):
    ranks, training, victim, other = LAYOUTS[layout]
    faults = [{"name": "killed", "rank": victim, "iteration": ITERATION, "where": where}]
    if where in ("repeat", "gathering"):  # these need a finding
        faults.append(bad_gradient(other))
    outcome = pool.run(
        {
            "name": f"death_{where}_{layout}_{repetition}",
            "ranks": ranks,
            "steps": 3,
            "training": SMALL | {"layers": 2} | training,
            "nanlocator": {"on_bad": "stop", "gather_deadline": DEADLINE},
            "faults": faults,
            "timeout": PATIENCE,
        }
    )
    survivors = outcome.require_survivors()
    assert outcome.exit_codes[victim] == -signal.SIGKILL
    assert len(survivors) == ranks - 1
    for rank in survivors:
        assert rank["error"] is not None
        assert rank["iteration"] == ITERATION
    directory = pathlib.Path(survivors[0]["run_dir"])
    status = json.loads((directory / "status.json").read_text())
    assert status["silent_ranks"] == [victim]
    verdict = json.loads((directory / "verdict.json").read_text())
    if where in ("repeat", "gathering"):  # its findings were published before it was killed
        assert verdict["silent_ranks"] in ([], [victim])
    else:
        assert verdict["silent_ranks"] == [victim]
    assert any(f"rank {victim} " in note for note in verdict["notes"]), verdict["notes"]
    if where in ("repeat", "gathering"):  # earlier findings are kept
        verdicts = [json.loads(path.read_text()) for path in directory.glob("verdict*.json")]
        origins = [origin for verdict in verdicts for origin in verdict["origins"]]
        assert other in {rank for origin in origins for rank in origin["candidates"]}


def bad_gradient(rank: int) -> dict:
    layer = 0 if rank == 0 else 1  # on the first or on the last stage
    weight = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
    return {"name": "main_grad_element", "rank": rank, "iteration": ITERATION, "parameter": weight}
