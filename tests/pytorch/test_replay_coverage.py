"""Replay in another process repeats the recorded bits of the operators that real models call."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanlocator import _C

SUPPORT = Path(__file__).parents[1] / "support"
SAMPLER = Path(_C.__file__).parents[2] / "tests" / "operator_sampler.so"

# Their results hold unwritten memory: there are no bits to repeat (docs/replay.md).
ALLOCATORS = ("aten::empty", "aten::new_empty", "aten::resize")

REPLAY_ALL = """
import json, sys
from pathlib import Path
from nanlocator import replay
for folder in sorted((Path(sys.argv[1]) / "bundles").iterdir()):
    try:
        report = replay.run(folder, repeats=1)
    except Exception as error:
        report = {"op": folder.name, "is_bit_exact": False, "problem": str(error)}
    print(json.dumps(report))
"""


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SAMPLER.exists():
        pytest.skip(f"{SAMPLER.name} is built with the C++ tests")
    folder = tmp_path_factory.mktemp("sampled")
    written = int(run_python(str(SUPPORT / "sample_operators.py"), str(SAMPLER), str(folder)).split()[-1])
    assert written == len(list((folder / "bundles").iterdir()))
    return folder


def problem_of(report: dict[str, Any]) -> str:
    if report.get("problem"):
        return str(report["problem"])
    return report["runs"][0]["problem"] or "other bits"


def test_98_of_100_distinct_operators_of_six_models_give_their_bits_again_in_another_process(
    run_dir: Path,
) -> None:
    reports = [json.loads(line) for line in run_python("-c", REPLAY_ALL, str(run_dir)).splitlines()]
    compared = [report for report in reports if not report["op"].startswith(ALLOCATORS)]
    exceptions = {report["op"]: problem_of(report) for report in compared if not report["is_bit_exact"]}
    print(f"\n{len(compared) - len(exceptions)} of {len(compared)} bit-exact; allocators left out:")
    print(*(f"  {report['op']}" for report in reports if report not in compared), sep="\n")
    print(*(f"  EXCEPTION {op}: {problem}" for op, problem in exceptions.items()), sep="\n")
    assert len(compared) > 150
    assert len(exceptions) <= 0.02 * len(compared), exceptions


def test_a_bundle_whose_bits_were_changed_is_not_called_bit_exact(run_dir: Path) -> None:
    """The comparison above can fail: an input with one different bit gives different outputs."""
    from safetensors.torch import load_file, save_file

    from nanlocator import replay

    folder = next(
        path for path in sorted((run_dir / "bundles").iterdir()) if path.name.endswith("aten__addmm")
    )
    tensors = load_file(folder / "tensors.safetensors")
    name = next(name for name in tensors if name.endswith(".mat1"))
    tensors[name].view(-1)[0] += 1
    with open(folder / "tensors.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    save_file(tensors, folder / "tensors.safetensors", metadata=header.get("__metadata__"))
    assert not replay.run(folder, repeats=1)["is_bit_exact"]
