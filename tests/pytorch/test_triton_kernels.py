"""Triton's kernels, under its interpreter on the CPU: our own with planted bugs, and Liger's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PACKAGES = Path(__file__).parents[2] / ".setup" / "kernels"
SCRIPT = Path(__file__).parents[1] / "support" / "triton_training.py"


def run(case):
    if "liger" in case and not (PACKAGES / "liger_kernel").is_dir():
        pytest.skip("needs what tools/setup fetches into .setup/kernels")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGES)]))
    result = subprocess.run(
        [sys.executable, SCRIPT, case],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


CAUSES = {
    "element": ("unknown", "triton::scale_kernel", "forward", 1),
    "element in backward": ("unknown", "triton::scale_kernel", "backward", 1),
    "tail": ("uninitialised_memory", "triton::scale_kernel", "forward", 6),
    "tail in backward": ("uninitialised_memory", "triton::scale_kernel", "backward", 6),
    "reads beyond": ("kernel_bug", "triton::row_sum_kernel", "forward", 6),
    "no maximum": ("kernel_bug", "triton::softmax_kernel", "forward", None),
    "liger row": ("kernel_bug", "triton::_softmax_single_block_forward_kernel", "forward", 9),
    "liger row in backward": (
        "kernel_bug",
        "triton::_softmax_single_block_backward_kernel",
        "backward",
        9,
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_a_planted_bug_is_named_with_kernel_and_extent(case):
    verdict, _ = run(case)
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["operator"], origin["phase"]) == CAUSES[case][:3]
    assert origin["tensor"]["nan"] == CAUSES[case][3] or CAUSES[case][3] is None
    assert origin["module"] == "2"
    assert Path(origin["code"]["file"]).name in ("triton_training.py", "softmax.py")  # Liger's own


def test_its_bundle_is_executed_where_the_program_is_not_by_its_source_and_by_the_exported_script():
    """The script needs neither nanlocator nor, after the first time, the interpreter's variable."""
    Path("train.py").write_text(SCRIPT.read_text())
    subprocess.run(
        [sys.executable, "train.py", "no maximum"], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True
    )
    Path("train.py").unlink()
    (bundle,) = Path().glob("nanlocator_run/*/bundles/*")

    def replayed(*options):
        command = [sys.executable, "-m", "nanlocator.replay", bundle, *options]
        return subprocess.run(command, capture_output=True, text=True)

    refused = replayed()
    assert refused.returncode == 2 and "--allow-source executes that" in refused.stderr
    assert "RuntimeWarning: 'nanlocator.replay'" not in refused.stderr
    by_source = replayed("--allow-source")
    assert by_source.returncode == 1 and "conclusion: wrong_values" in by_source.stdout
    Path("alone").mkdir()
    Path("alone/script.py").write_text(replayed("--export-python").stdout)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone = subprocess.run(
        [sys.executable, "script.py", bundle.absolute()],
        cwd="alone",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.splitlines()[-1].startswith("y (6, 9) 18 NaN or Inf, first at [[0, 2]]")


@pytest.mark.parametrize("case", ["healthy", "sums and softmax healthy", "liger healthy"])
def test_without_a_bug_nothing_is_found_and_every_step_comes_again_alike(case):
    verdict, errors = run(case)
    assert verdict is None and "other bits" not in errors
