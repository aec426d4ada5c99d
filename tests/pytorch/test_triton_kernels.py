"""Triton's kernels, on the GPU or under its interpreter: our own, Liger's and flash-linear-attention's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from watched_steps import line_of

pytest.importorskip("triton")

PACKAGES = Path(__file__).parents[2] / ".setup" / "kernels"
SCRIPT = Path(__file__).parents[1] / "support" / "triton_training.py"
FORWARD, BACKWARD = "forward", "backward"
ROW_3 = [(0, 0, 1), (3, 3, 1), (0, 1, 2), (0, 1, 2)]  # of (batch, tokens, heads, width): the first half
LAST_ROW = [(5, 5, 1), (0, 8, 9)]
TAIL = [(5, 5, 1), (3, 8, 6)]
UNWRITTEN, WRONG = "leaves_unwritten", "wrong_values"

# Case -> cause, kernel, phase, its bad argument, the bad elements (first, last and number of indices in each
# dimension), the conclusion of the repeated call, its reference; file and line of its launch.
OWN = {
    "element": (
        *("unknown", "scale_kernel", FORWARD, "y", [(0, 0, 1), (5, 5, 1)], "bad_again", ""),
        "scale_kernel[",
    ),
    "element in backward": (
        *("unknown", "scale_kernel", BACKWARD, "y", [(0, 0, 1), (5, 5, 1)], "bad_again", ""),
        "scale_kernel[",
    ),
    "tail": (
        *("uninitialised_memory", "scale_kernel", FORWARD, "y", TAIL, UNWRITTEN, ""),
        "scale_kernel[",
    ),
    "tail in backward": (
        *("uninitialised_memory", "scale_kernel", BACKWARD, "y", TAIL, UNWRITTEN, ""),
        "scale_kernel[",
    ),
    "reads beyond": (
        *("kernel_bug", "row_sum_kernel", FORWARD, "y", [(0, 5, 6)], "reads_outside", ""),
        "row_sum_kernel[",
    ),
    "no maximum": (
        *("kernel_bug", "softmax_kernel", FORWARD, "y", None, WRONG, "softmax"),
        "softmax_kernel[",
    ),
}
LIGER, FLA = "liger_kernel/ops", "fla/ops/utils"
PLANTED = {
    "liger softmax": (
        *("kernel_bug", "_softmax_single_block_forward_kernel", FORWARD, "Y_ptr", LAST_ROW, UNWRITTEN),
        *("softmax", f"{LIGER}/softmax.py", "_softmax_single_block_forward_kernel["),
    ),
    "liger softmax in backward": (
        *("kernel_bug", "_softmax_single_block_backward_kernel", BACKWARD, "dx_ptr", LAST_ROW, UNWRITTEN),
        *("softmax backward", f"{LIGER}/softmax.py", "_softmax_single_block_backward_kernel["),
    ),
    "liger rms_norm": (
        *("kernel_bug", "_rms_norm_forward_kernel", FORWARD, "Y_ptr", LAST_ROW, UNWRITTEN),
        *("rms_norm", f"{LIGER}/rms_norm.py", " _rms_norm_forward_kernel["),
    ),
    "liger layer_norm": (
        *("kernel_bug", "_layer_norm_forward_kernel", FORWARD, "Y_ptr", LAST_ROW, UNWRITTEN),
        *("layer_norm", f"{LIGER}/layer_norm.py", "_layer_norm_forward_kernel["),
    ),
    "liger layer_norm in backward": (
        *("kernel_bug", "_layer_norm_backward_kernel", BACKWARD, "DX_ptr", LAST_ROW, UNWRITTEN),
        *("layer_norm backward", f"{LIGER}/layer_norm.py", "_layer_norm_backward_kernel["),
    ),
    "liger swiglu": (
        *("kernel_bug", "_swiglu_forward_kernel", FORWARD, "c_ptr", LAST_ROW, UNWRITTEN),
        *("swiglu", f"{LIGER}/swiglu.py", "_swiglu_forward_kernel["),
    ),
    "liger geglu": (
        *("kernel_bug", "_geglu_tanh_forward_kernel", FORWARD, "c", LAST_ROW, UNWRITTEN),
        *("geglu", f"{LIGER}/geglu.py", "_geglu_tanh_forward_kernel["),
    ),
    "liger rope": (
        *("kernel_bug", "_triton_rope", FORWARD, "q_ptr", ROW_3, WRONG),
        *("rope", f"{LIGER}/rope.py", ("_triton_rope[", "BACKWARD_PASS=False")),
    ),
    "liger rope in backward": (
        *("kernel_bug", "_triton_rope", BACKWARD, "q_ptr", ROW_3, WRONG),
        *("rope", f"{LIGER}/rope.py", ("_triton_rope[", "BACKWARD_PASS=True")),
    ),
    "liger cross_entropy": (
        *("kernel_bug", "liger_cross_entropy_kernel", FORWARD, "X_ptr", [(3, 3, 1), (3, 3, 1)], WRONG),
        *("cross entropy backward", f"{LIGER}/cross_entropy.py", "liger_cross_entropy_kernel["),
    ),
    "fla l2norm": (  # launched by the library's own autotuner
        *("kernel_bug", "l2norm_fwd_kernel", FORWARD, "y", [(16, 17, 2), (0, 2, 3)], UNWRITTEN),
        *("l2_norm", f"{FLA}/cache.py", "return super().run(*args, **kwargs)"),
    ),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A case's verdict and output."""
    folder = tmp_path_factory.mktemp("triton")
    has_packages = all((PACKAGES / name).is_dir() for name in ("liger_kernel", "fla"))
    libraries = [*PLANTED, "libraries healthy"] if has_packages else []
    result = subprocess.run(
        [sys.executable, SCRIPT, *OWN, "healthy", *libraries],
        cwd=folder,
        env=environment_of_script(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr

    def of(case):
        if not (folder / f"{case}.json").exists():
            pytest.skip("needs what tools/setup fetches into .setup/kernels")
        return json.loads((folder / f"{case}.json").read_text()), (folder / f"{case}.err").read_text()

    return of


def environment_of_script():
    path = filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGES), str(SCRIPT.parent)])
    interpreted = {} if os.environ.get("NANLOCATOR_TEST_DEVICE") == "cuda" else {"TRITON_INTERPRET": "1"}
    return os.environ | interpreted | {"PYTHONPATH": os.pathsep.join(path)}


def launch_in(file, text):
    """The line of the only launch, or of the last one before the second text."""
    if isinstance(text, str):
        return line_of(file, text)
    lines = file.read_text().splitlines()
    return max(i for i, line in enumerate(lines[: line_of(file, text[1])], 1) if text[0] in line)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("case", OWN | PLANTED)
def test_a_planted_bug_is_named_with_kernel_line_and_extent(case, outcome):
    verdict, _ = outcome(case)
    cause, kernel, phase, role, extent, conclusion, reference, *file, text = (OWN | PLANTED)[case]
    file = PACKAGES / file[0] if file else SCRIPT
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["operator"], origin["phase"]) == (cause, f"triton::{kernel}", phase)
    assert (origin["module"], origin["tensor"]["role"]) == ("2", role)
    assert Path(origin["code"]["file"]).name == file.name
    assert origin["code"]["line"] == launch_in(file, text)
    if extent is not None:
        dimensions = [tuple(each.values()) for each in origin["tensor"]["extent"]["dimensions"]]
        assert dimensions == extent
    facts = {fact["kind"]: fact for fact in origin["facts"]}
    assert facts["kernel_replayed"]["conclusion"] == conclusion
    assert facts.get("kernel_reference", {}).get("text", "") == reference


@pytest.mark.parametrize("case", ["healthy", "libraries healthy"])
def test_without_a_bug_nothing_is_found_and_every_step_comes_again_alike(case, outcome):
    verdict, errors = outcome(case)
    assert verdict is None and "other bits" not in errors


def test_its_bundle_is_executed_where_the_program_is_not_by_its_source_and_by_the_exported_script(
    own_folder,
):
    """The script needs neither nanlocator nor, except the first time, the interpreter's variable."""
    Path("train.py").write_text(SCRIPT.read_text())
    subprocess.run([sys.executable, "train.py", "no maximum"], env=environment_of_script(), check=True)
    Path("train.py").unlink()
    (bundle,) = Path().glob("nanlocator_run/*/bundles/*")

    def replayed(*options):
        command = [sys.executable, "-m", "nanlocator.replay", bundle, *options]
        return subprocess.run(command, capture_output=True, text=True)

    refused = replayed()
    assert refused.returncode == 2 and "it was defined in the training script itself" in refused.stderr
    assert "RuntimeWarning: 'nanlocator.replay'" not in refused.stderr
    by_source = replayed("--trust")
    assert by_source.returncode == 1 and "conclusion: wrong_values" in by_source.stdout
    Path("alone").mkdir()
    Path("alone/script.py").write_text(replayed("--export-python", "-").stdout)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone = subprocess.run(
        [sys.executable, "script.py", bundle.absolute(), "--trust"],
        cwd="alone",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    assert re.match(r"y \(6, 9\) \d+ NaN or Inf, first at \[\[", alone.stdout.splitlines()[-1])
