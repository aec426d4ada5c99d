"""Kernels that PyTorch's dispatcher does not see: each planted bug by the kernel's name, line and extent."""

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from planted_kernels import Called, Experts, RowSums, Scaled, Silu, kernels
from torch import nn
from watched_steps import verdict_of_steps

import nanlocator
from nanlocator import _C
from nanlocator.kernels import KernelCalls

WIDTH = 9  # 54 elements in a batch of 6: a tail after the last 8


def around(guilty):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Silu(), guilty, Silu(), nn.Linear(WIDTH, 1))


@pytest.fixture
def garbage():
    """Memory that is handed out holds NaN, as it does where a bad step has used it before."""
    kernels.spoil_memory(True)
    yield
    kernels.spoil_memory(False)


def verdict_of(model, batch=6, **options):
    return verdict_of_steps(model, lambda: model(torch.randn(batch, WIDTH)).square().mean(), **options)


# Kernel and fault -> cause, operator, phase, how many elements are bad, what its call shows when executed
# again, the reference.
SILU, GRADIENT = "planted_kernels::silu", "planted_kernels::silu_gradient"
GROUPED = "planted_kernels::grouped_gemm_gradient"
FAULTS = {
    "one element": (
        lambda: Silu(forward="element"),
        "kernel_bug",
        SILU,
        "forward",
        1,
        "wrong_values",
        "silu",
    ),
    "one element of a gradient": (
        lambda: Silu(backward="element"),
        "kernel_bug",
        GRADIENT,
        "backward",
        1,
        "wrong_values",
        "silu backward",
    ),
    "reads beyond": (
        lambda: RowSums("beyond", beside=math.nan),
        "kernel_bug",
        "planted_kernels::row_sums",
        "forward",
        6,
        "reads_outside",
        "",
    ),
    "tail": (lambda: Silu(forward="tail"), "kernel_bug", SILU, "forward", 6, "leaves_unwritten", "silu"),
    "tail of a gradient": (
        lambda: Silu(backward="tail"),
        "kernel_bug",
        GRADIENT,
        "backward",
        6,
        "leaves_unwritten",
        "silu backward",
    ),
    "expert without tokens": (
        lambda: Experts(WIDTH, "expert"),
        "kernel_bug",
        GROUPED,
        "backward",
        WIDTH * WIDTH,
        "leaves_unwritten",
        "grouped gemm backward",
    ),
    "its own memory": (
        lambda: Called("tanh_scaled", "scratch"),
        "kernel_bug",
        "planted_kernels::tanh_scaled",
        "forward",
        1,
        "reads_unwritten",
        "",
    ),
    "off by one": (
        lambda: Called("silu_into", "off_by_one"),
        "kernel_bug",
        "planted_kernels::silu_into",
        "forward",
        1,
        "writes_outside",
        "",
    ),
    "no maximum": (
        lambda: Called("softmax", "naive", scale=200.0),
        "kernel_bug",
        "planted_kernels::softmax",
        "forward",
        None,
        "wrong_values",
        "softmax",
    ),
    "last row of a softmax": (
        lambda: Called("softmax", "row"),
        "kernel_bug",
        "planted_kernels::softmax",
        "forward",
        WIDTH,
        "leaves_unwritten",
        "softmax",
    ),
    "a row of a norm": (
        lambda: Called("rms_norm", "row"),
        "kernel_bug",
        "planted_kernels::rms_norm",
        "forward",
        WIDTH,
        "leaves_unwritten",
        "rms_norm",
    ),
    "last id of an embedding": (
        lambda: Called("embedding", "last"),
        "kernel_bug",
        "planted_kernels::embedding",
        "forward",
        WIDTH,
        "leaves_unwritten",
        "embedding",
    ),
    "an ignored label": (
        lambda: Called("cross_entropy", "ignored"),
        "unknown",  # of six losses five are too few to know the reference by
        "planted_kernels::cross_entropy",
        "forward",
        1,
        "bad_again",
        "",
    ),
    "one element of a product": (
        lambda: Called("gemm", "element"),
        "kernel_bug",
        "planted_kernels::gemm",
        "forward",
        1,
        "wrong_values",
        "gemm",
    ),
    "the last tokens of packed attention": (
        lambda: Called("attention_varlen", "rows"),
        "kernel_bug",
        "planted_kernels::attention_varlen",
        "forward",
        2 * WIDTH,
        "leaves_unwritten",
        "attention",
    ),
    "one shape in backward": (
        lambda: Silu(backward="shape"),
        "kernel_bug",
        GRADIENT,
        "backward",
        1,
        "wrong_values",
        "silu backward",
    ),
    "tail of an argument": (
        lambda: Called("silu_into", "tail"),
        "kernel_bug",
        "planted_kernels::silu_into",
        "forward",
        6,
        "leaves_unwritten",
        "silu",
    ),
    "one element of a softmax": (
        lambda: Called("softmax", "element"),
        "kernel_bug",
        "planted_kernels::softmax",
        "forward",
        1,
        "wrong_values",
        "softmax",
    ),
    "one element of a norm": (
        lambda: Called("rms_norm", "element"),
        "kernel_bug",
        "planted_kernels::rms_norm",
        "forward",
        1,
        "wrong_values",
        "rms_norm",
    ),
    "one element of an embedding": (
        lambda: Called("embedding", "element"),
        "kernel_bug",
        "planted_kernels::embedding",
        "forward",
        1,
        "wrong_values",
        "embedding",
    ),
    "last column of a product": (
        lambda: Called("gemm", "column"),
        "kernel_bug",
        "planted_kernels::gemm",
        "forward",
        6,
        "leaves_unwritten",
        "gemm",
    ),
    "attention without a maximum": (
        lambda: Called("attention_varlen", "naive", scale=20.0),
        "kernel_bug",
        "planted_kernels::attention_varlen",
        "forward",
        None,
        "wrong_values",
        "attention",
    ),
    "one element of a gated activation": (
        lambda: Called("swiglu", "element"),
        "kernel_bug",
        "planted_kernels::swiglu",
        "forward",
        1,
        "wrong_values",
        "swiglu",
    ),
    "tail of a gated activation": (
        lambda: Called("swiglu", "tail"),
        "kernel_bug",
        "planted_kernels::swiglu",
        "forward",
        6,
        "leaves_unwritten",
        "swiglu",
    ),
    "one element of a rotation": (
        lambda: Called("rope", "element"),
        "kernel_bug",
        "planted_kernels::rope",
        "forward",
        1,
        "wrong_values",
        "rope",
    ),
    "last row of a rotation": (
        lambda: Called("rope", "row"),
        "kernel_bug",
        "planted_kernels::rope",
        "forward",
        WIDTH - 1,
        "leaves_unwritten",
        "rope",
    ),
    "a norm without eps": (
        lambda: Called("layer_norm", "no_eps"),
        "kernel_bug",
        "planted_kernels::layer_norm",
        "forward",
        WIDTH,
        "wrong_values",
        "layer_norm",
    ),
    "a norm that reads beyond each row": (
        lambda: Called("layer_norm", "beyond"),
        "kernel_bug",
        "planted_kernels::layer_norm",
        "forward",
        6 * WIDTH,
        "reads_outside",
        "",
    ),
    "another element each time": (
        lambda: Called("tanh_scaled", "counter"),
        "unknown",
        "planted_kernels::tanh_scaled",
        "forward",
        1,
        "varies",
        "",
    ),
    "inputs that overflow": (
        lambda: Called("rms_norm", scale=1e25),
        "operator_overflow",
        "planted_kernels::rms_norm",
        "forward",
        None,
        "overflows",
        "rms_norm",
    ),
}


def replayed(origin):
    facts = {fact["kind"]: fact for fact in origin["facts"]}
    reference = facts.get("kernel_reference", {}).get("text", "")
    return facts["kernel_replayed"]["conclusion"], reference


@pytest.mark.parametrize("case", FAULTS)
def test_a_kernel_with_a_bug_is_named_and_its_call_shows_the_bug_alone(case, garbage, tmp_path):
    make, cause, op, phase, bad, conclusion, reference = FAULTS[case]
    batch = 5 if case == "off by one" else 6
    verdict = verdict_of(around(make()), batch, output_dir=tmp_path)
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["operator"], origin["phase"]) == (cause, op, phase)
    assert origin["module"] == "2" and origin["code"]["file"].endswith("planted_kernels.py")
    assert replayed(origin) == (conclusion, reference)
    tensor = origin["tensor"]
    if bad is not None:
        assert tensor["nan"] + tensor["pos_inf"] + tensor["neg_inf"] == bad
    (bundle,) = tmp_path.glob("*/bundles/*/bundle.json")
    again = nanlocator.replay.run(bundle)
    assert (again["conclusion"], again["reference"] or "") == (conclusion, reference)


def test_of_an_expert_without_tokens_the_extent_is_that_expert(garbage):
    (origin,) = verdict_of(around(Experts(WIDTH, "expert")))["origins"]
    assert origin["tensor"]["extent"]["dimensions"][0] == {"first": 1, "last": 1, "count": 1}
    (fact,) = (fact for fact in origin["facts"] if fact["kind"] == "kernel_replayed")
    assert fact["extent"]["dimensions"][0] == {"first": 1, "last": 1, "count": 1}


def test_what_a_method_computes_is_named_though_nobody_can_call_it_again():
    (origin,) = verdict_of(around(Scaled(math.inf)))["origins"]
    assert (origin["operator"], origin["phase"]) == ("planted_kernels::Workspace.scale", "forward")
    assert (origin["cause"], origin["module"], origin["place_confidence"]) == ("unknown", "2", "high")
    (fact,) = (fact for fact in origin["facts"] if fact["kind"] == "kernel_not_executed")
    assert "self, a planted_kernels.Workspace, cannot be kept" in fact["text"]


def test_only_for_one_shape():
    assert verdict_of(around(Silu(forward="shape"))) is None
    (origin,) = verdict_of(around(Silu(forward="shape")), batch=7)["origins"]
    assert (origin["operator"], origin["tensor"]["pos_inf"]) == ("planted_kernels::silu", 1)


def test_an_operator_that_reads_memory_that_nobody_wrote(garbage):
    class Padded(nn.Module):
        def forward(self, x):
            padded = x.new_empty(x.shape[0] + 2, x.shape[1])
            padded[: x.shape[0]] = x
            return padded.mean(dim=0) + x

    (origin,) = verdict_of(around(Padded()))["origins"]
    assert (origin["cause"], origin["module"]) == ("uninitialised_memory", "2")
    assert origin["operator"].startswith(("aten::mean", "aten::sum"))  # the one inside the other


KERNELS = (
    "silu_into",
    "tanh_scaled",
    "softmax",
    "rms_norm",
    "embedding",
    "cross_entropy",
    "gemm",
    "attention_varlen",
    "swiglu",
    "rope",
    "layer_norm",
)


@pytest.mark.parametrize(
    "guilty",
    [Silu, Scaled, RowSums, lambda: Experts(WIDTH), *(functools.partial(Called, each) for each in KERNELS)],
    ids=["silu", "scaled", "row_sums", "experts", *KERNELS],
)
def test_without_a_bug_nothing_is_found_and_every_step_comes_again_alike(guilty, garbage, capfd):
    assert verdict_of(around(guilty()), rerun="always") is None
    assert "other bits" not in capfd.readouterr().err


class Branches(nn.Module):
    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        return sum(branch(x) for branch in self.branches)


def test_one_broken_kernel_in_three_places_is_one_origin_and_names_the_others(garbage):
    (origin,) = verdict_of(around(Branches(*(Silu(forward="tail") for _ in range(3)))))["origins"]
    assert (origin["cause"], origin["module"], origin["operator"]) == ("kernel_bug", "2.branches.0", SILU)
    (others,) = (fact for fact in origin["facts"] if fact["kind"] == "same_kernel_elsewhere")
    assert others["names"] == ["2.branches.1 in forward", "2.branches.2 in forward"]


def bundle_of(guilty, folder, **options):
    verdict_of(around(guilty), output_dir=folder, **options)
    (bundle,) = folder.glob("*/bundles/*/bundle.json")
    return bundle


@pytest.mark.parametrize("fault", ["element", "tail"])
def test_in_a_fresh_process_the_conclusion_is_the_same(fault, tmp_path, garbage):
    bundle = bundle_of(Silu(forward=fault), tmp_path)
    expected = {"element": "wrong_values", "tail": "leaves_unwritten"}[fault]
    program = [sys.executable, "-m", "nanlocator.replay", str(bundle)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert f"conclusion: {expected}" in result.stdout and "agrees with" in result.stdout


def test_the_exported_script_needs_neither_the_model_nor_nanlocator(tmp_path):
    bundle = bundle_of(Silu(forward="element"), tmp_path)
    script = tmp_path / "bug.py"
    script.write_text(_C.export_python(bundle))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "output[0] (6, 9) 1 NaN or Inf, first at [[0, 5]]" in result.stdout
    assert "import nanlocator" not in script.read_text()


def test_a_reference_that_the_user_gives_judges_where_none_is_known(tmp_path):
    bundle = bundle_of(Called("cross_entropy", "ignored"), tmp_path, batch=30)

    def reference(logits, labels, ignore_index, fault):
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")

    report = nanlocator.replay.run(bundle, reference=reference)
    assert report["conclusion"] == "wrong_values" and report["reference"].endswith("reference")
    assert report["compared"] == report["agreeing"] == 29


def test_a_reference_of_something_else_is_no_judge(tmp_path):
    bundle = bundle_of(Called("tanh_scaled", "counter"), tmp_path)
    report = nanlocator.replay.run(bundle, reference=lambda x, fault: torch.sin(x))
    assert (report["conclusion"], report["reference"]) == ("varies", None)
    bundle = bundle_of(RowSums("beyond", beside=math.nan), tmp_path / "sums")
    report = nanlocator.replay.run(bundle, reference=lambda x, fault: x.sum(1))
    assert report["conclusion"] == "reads_outside"


def test_a_kernel_that_is_not_here_is_named_and_nothing_is_executed(tmp_path):
    bundle = bundle_of(Silu(forward="element"), tmp_path)
    text = bundle.read_text().replace("planted_kernels", "no_such_package")
    other = tmp_path / "other"
    other.mkdir()
    (other / "bundle.json").write_text(text)
    (other / "tensors.safetensors").write_bytes((bundle.parent / "tensors.safetensors").read_bytes())
    with pytest.raises(_C.UnsupportedError, match="no_such_package cannot be imported"):
        nanlocator.replay.run(other)


def test_what_was_bad_before_a_kernel_is_not_its_fault():
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x.abs() * 0 - 1)

    (origin,) = verdict_of(nn.Sequential(around(Log()), Silu(), Scaled()))["origins"]
    assert (origin["operator"], origin["module"]) == ("aten::log", "0.2")


def test_afterwards_every_binding_is_the_one_that_it_was():
    before = kernels.silu, kernels.row_sums, vars(kernels.Workspace)["scale"]
    with KernelCalls():
        assert kernels.silu is not before[0]
        with _C.OperatorTrace() as trace:
            trace.begin_pass()
            assert torch.isnan(kernels.silu(torch.ones(8), "element")[5])
    assert (kernels.silu, kernels.row_sums, vars(kernels.Workspace)["scale"]) == before
