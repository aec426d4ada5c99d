"""torchtitan's loop, unedited, under the launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "titan_style.py"


def run(ranks, **variables):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    nanlocator = ["-m", "nanlocator"] if variables else []
    return subprocess.run(
        [sys.executable, *launcher, *nanlocator, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def losses(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("losses:"))


def test_a_healthy_script_computes_the_same_bits():
    watched = run(2, NANLOCATOR_RERUN="always")
    assert losses(watched) == losses(run(2))
    assert "attached to AdamW and FSDPTransformer" in watched.stderr
    assert "other bits" not in watched.stderr and "not executed again" not in watched.stderr


def test_a_birth_on_one_rank_of_the_last_stage_is_located():
    run(4, FAULT="3", NANLOCATOR_OUTPUT_DIR=str(Path("run").absolute()))
    (origin,) = json.loads(Path("run/a0/verdict.json").read_text())["origins"]
    assert (origin["operator"], origin["module"]) == ("aten::log", "layers.3")
    coordinates = origin["coordinates"]
    assert (coordinates["pp"]["rank"], coordinates["dp"]["rank"]) == (1, 1)
