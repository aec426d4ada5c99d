"""Kernels that PyTorch's dispatcher does not see: each planted bug by the kernel's name, line and extent."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernel_models
import pytest
import torch
from kernel_models import (
    ApexLayerNorm,
    Called,
    Experts,
    FlashAttention,
    Fused,
    GroupedProduct,
    RowSums,
    Scaled,
    Silu,
    kernels,
)
from torch import nn
from watched_steps import line_of, verdict_of_steps

import nanlocator
from nanlocator import _C
from nanlocator.calls import kernel_signatures
from nanlocator.calls.kernel_calls import KernelCallRecord, _kept
from nanlocator.calls.kernels import Entry, KernelCalls, _argument_names, named_tensors

PLANTED = Path(kernel_models.__file__)
BUILT = str(Path(kernels.__file__).parent)
# Kernels of DEFINITIONS, and their references.
FUSED = {
    **{name: name for name in ("relu", "sigmoid", "exp", "gelu", "log_softmax", "geglu")},
    **{
        f"{name}_backward": f"{name} backward"
        for name in (
            "relu",
            "sigmoid",
            "tanh",
            "exp",
            "gelu",
            "softmax",
            "log_softmax",
            "swiglu",
            "geglu",
            "rms_norm",
            "embedding",
            "rope",
        )
    },
}

WIDTH = 9  # 54 elements in a batch of 6: a tail after the last 8


def around(guilty):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Silu(), guilty, Silu(), nn.Linear(WIDTH, 1))


@pytest.fixture
def garbage():
    """Newly allocated memory holds NaN, as after a bad step."""
    kernels.spoil_memory(True)
    yield
    kernels.spoil_memory(False)


def verdict_of(model, batch=6, **options):
    return verdict_of_steps(model, lambda: model(torch.randn(batch, WIDTH)).square().mean(), **options)


class _At:
    def __getitem__(self, where):
        return where


at = _At()
SILU, GRADIENT = "planted_kernels::silu", "planted_kernels::silu_gradient"
UNWRITTEN, WRONG = "leaves_unwritten", "wrong_values"


@dataclass
class Fault:
    """A planted fault, and the expected verdict."""

    make: Callable[[], nn.Module]
    kernel: str  # of planted_kernels, or "module::entry"
    where: Any  # the bad elements of the output, or a function of the module's input that gives them
    conclusion: str  # of the repeated call
    reference: str = ""  # the reference that judges the call
    cause: str = "kernel_bug"
    phase: str = "forward"
    batch: int = 6
    line: str = ""  # text of the expected source line; "": a call of the kernel
    planted: str = ""  # in a library without argument names


def called(kernel, fault, where, conclusion, reference="", **others):
    """A kernel that a method of Called calls."""
    scale = others.pop("scale", 1.0)
    return Fault(lambda: Called(kernel, fault, scale=scale), kernel, where, conclusion, reference, **others)


def fused(kernel, reference):
    """A kernel that no method of Called calls; the fault is its last row."""
    phase = "backward" if kernel.endswith("backward") else "forward"
    where = at[4] if kernel == "embedding_backward" else at[5]
    line = f"# planted: fused {phase}"
    return Fault(lambda: Fused(kernel, "row"), kernel, where, UNWRITTEN, reference, phase=phase, line=line)


def in_library(make, kernel, fault, where, conclusion, reference, line, **others):
    return Fault(
        make, kernel, where, conclusion, reference, line=f"# planted: {line}", planted=fault, **others
    )


def overflowing(x):
    """Bad elements of a softmax without the rows' maxima."""
    exponentials = (200.0 * x).exp()
    return ~(exponentials / exponentials.sum(1, keepdim=True)).isfinite()


def overflowing_attention(x):
    """Bad elements of causal attention over two sequences, without the rows' maxima."""
    scores = [(half @ half.T * 20.0**2 * 0.5).tril().exp() for half in x.split(x.shape[0] // 2)]
    return torch.cat([each.isinf().any(1) for each in scores])[:, None, None].expand(-1, 1, x.shape[1])


backward = {"phase": "backward"}
FAULTS = {
    "one element": Fault(lambda: Silu(forward="element"), "silu", at[0, 5], WRONG, "silu"),
    "tail": Fault(lambda: Silu(forward="tail"), "silu", at[5, 3:], UNWRITTEN, "silu"),
    "one element of a gradient": Fault(
        lambda: Silu(backward="element"), "silu_gradient", at[0, 5], WRONG, "silu backward", **backward
    ),
    "tail of a gradient": Fault(
        lambda: Silu(backward="tail"), "silu_gradient", at[5, 3:], UNWRITTEN, "silu backward", **backward
    ),
    "one shape in backward": Fault(
        lambda: Silu(backward="shape"), "silu_gradient", at[0, 5], WRONG, "silu backward", **backward
    ),
    "reads beyond": Fault(
        lambda: RowSums("beyond", beside=math.nan), "row_sums", at[:], "reads_outside", line="from_elsewhere("
    ),
    "expert without tokens": Fault(
        lambda: Experts(WIDTH, "expert"),
        "grouped_gemm_gradient",
        at[1],
        UNWRITTEN,
        "grouped gemm backward",
        **backward,
    ),
    "its own memory": called("tanh_scaled", "scratch", at[0, 7], "reads_unwritten"),
    "another element each time": called("tanh_scaled", "counter", None, "varies", cause="unknown"),
    "off by one": called("silu_into", "off_by_one", at[0, 0], "writes_outside", batch=5),
    "tail of an argument": called("silu_into", "tail", at[5, 3:], UNWRITTEN, "silu"),
    "no maximum": called("softmax", "naive", overflowing, WRONG, "softmax", scale=200.0),
    "last row of a softmax": called("softmax", "row", at[5], UNWRITTEN, "softmax"),
    "one element of a softmax": called("softmax", "element", at[0, 5], WRONG, "softmax"),
    "a row of a norm": called("rms_norm", "row", at[2], UNWRITTEN, "rms_norm"),
    "one element of a norm": called("rms_norm", "element", at[0, 5], WRONG, "rms_norm"),
    "a norm without eps": called("layer_norm", "no_eps", at[0], WRONG, "layer_norm"),
    "a norm that reads beyond each row": called("layer_norm", "beyond", at[:], "reads_outside"),
    "last id of an embedding": called("embedding", "last", at[5], UNWRITTEN, "embedding"),
    "one element of an embedding": called("embedding", "element", at[0, 5], WRONG, "embedding"),
    # Of six losses, five are too few to validate the reference.
    "an ignored label": called("cross_entropy", "ignored", at[3], "bad_again", cause="unknown"),
    "an ignored label of many": called("cross_entropy", "ignored", at[3], WRONG, "cross entropy", batch=16),
    "one element of a product": called("gemm", "element", at[1, 2], WRONG, "gemm"),
    "last column of a product": called("gemm", "column", at[:, 8], UNWRITTEN, "gemm"),
    "the last tokens of packed attention": called("attention_varlen", "rows", at[4:], UNWRITTEN, "attention"),
    "attention without a maximum": called(
        "attention_varlen", "naive", overflowing_attention, WRONG, "attention", scale=20.0
    ),
    "one element of a gated activation": called("swiglu", "element", at[0, 5], WRONG, "swiglu"),
    "tail of a gated activation": called("swiglu", "tail", at[5, 3:], UNWRITTEN, "swiglu"),
    "one element of a rotation": called("rope", "element", at[0, 5], WRONG, "rope"),
    "last row of a rotation": called("rope", "row", at[5], UNWRITTEN, "rope"),
    "inputs that overflow": called(
        "rms_norm", "", at[:], "overflows", "rms_norm", cause="operator_overflow", scale=1e25
    ),
    **{f"last row of {kernel}": fused(kernel, reference) for kernel, reference in FUSED.items()},
    "the last tokens of flash-attn's dq": in_library(
        FlashAttention,
        "flash_attn_2_cuda::varlen_bwd",
        "rows",
        at[12:],
        UNWRITTEN,
        "attention backward",
        "flash backward",
        batch=16,
        **backward,
    ),
    "one token of flash-attn's dv": in_library(
        FlashAttention,
        "flash_attn_2_cuda::varlen_bwd",
        "row",
        at[5],
        WRONG,
        "attention backward",
        "flash backward",
        batch=16,
        **backward,
    ),
    "a token that flash-attn lets see later ones": in_library(
        FlashAttention,
        "flash_attn_2_cuda::varlen_fwd",
        "mask",
        at[2],
        WRONG,
        "attention",
        "flash forward",
        batch=16,
    ),
    "the last token of grouped_gemm": in_library(
        GroupedProduct, "grouped_gemm_backend::gmm", "tail", at[5], UNWRITTEN, "grouped gemm", "gmm forward"
    ),
    "an expert of grouped_gemm without tokens": in_library(
        GroupedProduct,
        "grouped_gemm_backend::gmm",
        "expert",
        at[1],
        UNWRITTEN,
        "grouped gemm backward",
        "gmm of weights",
        **backward,
    ),
    "Apex's norm without eps": in_library(
        ApexLayerNorm,
        "fused_layer_norm_cuda::forward_affine",
        "no_eps",
        at[0],
        WRONG,
        "layer_norm",
        "Apex forward",
    ),
    "the last row of Apex's gradient": in_library(
        ApexLayerNorm,
        "fused_layer_norm_cuda::backward_affine",
        "row",
        at[5],
        UNWRITTEN,
        "layer_norm backward",
        "Apex backward",
        **backward,
    ),
}


@pytest.fixture
def plant():
    yield kernels.plant
    kernels.plant("")


def replayed(origin):
    facts = {fact["kind"]: fact for fact in origin["facts"]}
    reference = facts.get("kernel_reference", {}).get("text", "")
    return facts["kernel_replayed"]["conclusion"], reference


def expected_elements(fault, model, shape):
    """A mask of the bad elements of an output of ``shape``."""
    if callable(fault.where):
        torch.manual_seed(0)
        with torch.no_grad():
            return fault.where(model[:2](torch.randn(fault.batch, WIDTH)))
    is_bad = torch.zeros(shape, dtype=torch.bool)
    is_bad[fault.where] = True
    return is_bad


def extent_of(is_bad):
    """For each dimension, the first and last index with a bad element, and the number of such indices."""
    found = [where.unique().tolist() for where in is_bad.nonzero().unbind(1)]
    return [{"first": each[0], "last": each[-1], "count": len(each)} for each in found]


# The references have their own tests; here one forward, one backward and one lookup of rows are enough.
OTHER_REFERENCES = FUSED.keys() - {"log_softmax", "rms_norm_backward", "embedding_backward"}


def marked(case):
    is_another = case.removeprefix("last row of ") in OTHER_REFERENCES
    return pytest.param(case, marks=pytest.mark.exhaustive if is_another else [])


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("case", list(map(marked, FAULTS)))
def test_a_kernel_with_a_bug_is_named_and_its_call_shows_the_bug_alone(case, garbage, plant, tmp_path):
    fault = FAULTS[case]
    plant(fault.planted)
    model = around(fault.make())
    (origin,) = verdict_of(model, fault.batch, output_dir=tmp_path)["origins"]
    name = fault.kernel if "::" in fault.kernel else f"planted_kernels::{fault.kernel}"
    assert (origin["cause"], origin["operator"], origin["phase"]) == (fault.cause, name, fault.phase)
    assert origin["module"] == "2" and Path(origin["code"]["file"]) == PLANTED
    assert origin["code"]["line"] == line_of(PLANTED, fault.line or f"kernels.{fault.kernel}(")
    assert replayed(origin) == (fault.conclusion, fault.reference)
    tensor = origin["tensor"]
    bad = tensor["nan"] + tensor["pos_inf"] + tensor["neg_inf"]
    if fault.conclusion == "varies":  # the call's number determines the element
        assert bad == 1
    else:
        is_bad = expected_elements(fault, model, tensor["shape"])
        assert bad == is_bad.sum() and tensor["extent"]["dimensions"] == extent_of(is_bad)
    (bundle,) = tmp_path.glob("*/bundles/*/bundle.json")
    again = nanlocator.replay.run(bundle)
    assert (again["conclusion"], again["reference"] or "") == (fault.conclusion, fault.reference)


def test_the_report_names_the_argument_and_the_rows_that_a_library_left_unwritten(garbage, plant):
    plant("rows")
    (origin,) = verdict_of(around(FlashAttention()), 16)["origins"]
    assert origin["title"] == "kernel that leaves part of its output unwritten"
    left = "it leaves 36 of 144 elements of its dq (everything at indices 12 to 15 of dimension 0) unwritten"
    assert any(each.startswith(left) for each in origin["evidence"])


library = kernel_models.flash_attn


@torch.library.custom_op(
    "planted::flash_backward",
    mutates_args=("dq", "dk", "dv"),
    schema="(Tensor[] tensors, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor ends) -> Tensor",
)
def flash_backward(tensors, dq, dk, dv, ends):
    numbers = (9, 9, 0.0, 3**-0.5, False, True, -1, -1, 0.0, False, None, None)
    return library.varlen_bwd(*tensors, dq, dk, dv, ends, ends, None, *numbers)[3]


@pytest.mark.parametrize(
    "fault, role, bad", [("rows", "dq", 36), ("row", "dv", 9), ("", "", 0)], ids=["rows", "row", "healthy"]
)
def test_inside_a_custom_operator_it_is_the_kernel_that_is_named(
    fault, role, bad, garbage, plant, monkeypatch
):
    """Since 2.7, flash-attn calls its kernels in an operator, which fills dq, dk and dv."""

    class Wrapped:
        varlen_fwd = staticmethod(library.varlen_fwd)

        @staticmethod
        def varlen_bwd(*args):
            flash_backward(list(args[:6]), *args[6:10])

    monkeypatch.setattr(kernel_models, "flash_attn", Wrapped)
    plant(fault)
    verdict = verdict_of(around(FlashAttention()), 16, rerun=True if fault else "always")
    if not fault:
        assert verdict is None
        return
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["operator"]) == ("kernel_bug", "flash_attn_2_cuda::varlen_bwd")
    assert (origin["tensor"]["role"], origin["tensor"]["nan"]) == (role, bad)


@pytest.mark.parametrize("fault", ["mask", "row"])
def test_a_release_whose_arguments_nobody_has_read_is_judged_by_no_reference(
    fault, garbage, plant, monkeypatch
):
    """Without names, the call does not show whether a mask should be causal."""
    entry = {"mask": "varlen_fwd", "row": "varlen_bwd"}[fault]
    monkeypatch.setitem(kernel_signatures._names, f"flash_attn_2_cuda::{entry}", {})
    plant(fault)
    (origin,) = verdict_of(around(FlashAttention()), 16)["origins"]
    assert (origin["cause"], origin["operator"]) == ("unknown", f"flash_attn_2_cuda::{entry}")
    assert replayed(origin) == ("bad_again", "")


def test_attention_with_dropout_is_judged_by_no_reference(garbage, plant):
    plant("row")
    (origin,) = verdict_of(around(FlashAttention(dropout=0.1)), 16)["origins"]
    assert (origin["cause"], origin["operator"]) == ("unknown", "flash_attn_2_cuda::varlen_bwd")
    assert (origin["tensor"]["role"], replayed(origin)) == ("dv", ("bad_again", ""))


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
    assert origin["operator"].startswith(("aten::mean", "aten::sum"))  # one inside the other


@pytest.mark.parametrize("what", ["kernel", "reference"])
def test_an_interrupt_while_a_kernel_is_executed_again_ends_it_at_once(what, garbage, tmp_path, monkeypatch):
    calls = []

    def interrupt(*_):
        calls.append(what)
        raise KeyboardInterrupt

    def faulty():
        return around(FAULTS["tail"].make())

    (origin,) = verdict_of(faulty(), output_dir=tmp_path)["origins"]
    assert origin["bundle"]
    if what == "kernel":
        monkeypatch.setattr(KernelCallRecord, "execute", interrupt)
    else:
        monkeypatch.setattr(KernelCallRecord, "references", lambda _: [("interrupted", interrupt)])
    with pytest.raises(KeyboardInterrupt):
        verdict_of(faulty())
    assert calls == [what]
    (bundle,) = tmp_path.glob("*/bundles/*/bundle.json")
    with pytest.raises(KeyboardInterrupt):
        nanlocator.replay.run(bundle)
    assert calls == [what] * 2


def grown(x):
    rows = x.clone()
    return rows.resize_(x.shape[0] + 1, x.shape[1])


ALLOCATIONS = {
    "empty": lambda x: torch.empty(x.shape[0] + 1, x.shape[1]),
    "new_empty": lambda x: x.new_empty(x.shape[0] + 1, x.shape[1]),
    "empty_like": lambda x: torch.empty_like(torch.cat((x, x[:1]))),
    "empty_strided": lambda x: torch.empty_strided((x.shape[0] + 1, x.shape[1]), (x.shape[1], 1)),
    "resize_": grown,
    "8 bits, e4m3fn": lambda x: torch.empty(x.shape[0] + 1, x.shape[1], dtype=torch.float8_e4m3fn),
    "8 bits, e5m2": lambda x: torch.empty(x.shape[0] + 1, x.shape[1], dtype=torch.float8_e5m2),
}


class OneRowMore(nn.Module):
    """Reads an unwritten row, or with `is_filled` a written one."""

    def __init__(self, allocate, is_filled):
        super().__init__()
        self.allocate, self.is_filled = allocate, is_filled

    def forward(self, x):
        rows = self.allocate(x.detach())
        rows[: x.shape[0]].copy_(x.detach())
        if self.is_filled:
            rows[x.shape[0] :].copy_(torch.zeros(1, x.shape[1]))
        return x + rows.float().mean(dim=0)


@pytest.mark.parametrize("case", ALLOCATIONS)
def test_memory_that_nobody_wrote_is_told_with_the_line_that_allocated_it(case, garbage):
    allocate = ALLOCATIONS[case]
    verdict = verdict_of(around(OneRowMore(allocate, is_filled=False)))
    (origin,) = verdict["origins"]
    assert (origin["cause"], origin["module"]) == ("uninitialised_memory", "2")
    fact = next(fact for fact in origin["facts"] if fact["kind"] == "read_unwritten_memory")
    name = "empty" if case.startswith("8 bits") else case
    assert fact["writer"].partition(".")[0] == f"aten::{name}"
    assert fact["code"]["line"] == max(line for *_, line in allocate.__code__.co_lines() if line)
    assert origin["tensor"]["extent"]["dimensions"][0] == {"first": 6, "last": 6, "count": 1}


@pytest.mark.parametrize("case", ALLOCATIONS)
def test_memory_that_is_written_before_it_is_read_is_no_finding(case, garbage, capfd):
    assert verdict_of(around(OneRowMore(ALLOCATIONS[case], is_filled=True)), rerun="always") is None
    assert "other bits" not in capfd.readouterr().err


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


HEALTHY = {
    **{
        each.__name__: each for each in (Silu, Scaled, RowSums, GroupedProduct, ApexLayerNorm, FlashAttention)
    },
    "Experts": lambda: Experts(WIDTH),
    **{each: functools.partial(Called, each) for each in KERNELS},
    "fused": lambda: nn.Sequential(*(Fused(each) for each in FUSED)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_without_a_bug_nothing_is_found_and_every_step_comes_again_alike(name, garbage, capfd):
    batch = 16 if name == "FlashAttention" else 6
    assert verdict_of(around(HEALTHY[name]()), batch, rerun="always") is None
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
    path = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), BUILT])}
    result = subprocess.run(
        program, env=os.environ | path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1, result.stderr
    assert f"conclusion: {expected}" in result.stdout and "agrees with" in result.stdout


def test_the_exported_script_needs_neither_the_model_nor_nanlocator(tmp_path):
    bundle = bundle_of(Silu(forward="element"), tmp_path)
    script = tmp_path / "bug.py"
    script.write_text(_C.export_python(bundle))
    environment = os.environ | {"PYTHONPATH": BUILT}
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


def test_a_tensor_in_a_list_goes_by_one_name_in_the_birth_and_in_what_is_kept_of_its_call():
    x = torch.ones(1)
    lists, record, problems = ([[x, x], (x,)], {"state": x}), KernelCallRecord("amp_C::multi_tensor_adam"), []
    names = ["tensor_lists", "more"]
    for name, value in zip(names, lists, strict=True):
        _kept(value, name, record, [], problems)
    expected = ["tensor_lists[0][0]", "tensor_lists[0][1]", "tensor_lists[1][0]", "more[state]"]
    assert record.tensor_names == [name for name, _ in named_tensors(lists, {}, names)] == expected


def test_a_default_with_a_colon_is_no_argument():
    """As pybind11 documents a default that is a member of an enumeration."""

    def live():
        """f(input: torch.Tensor, otype: DType = <DType.kFloat32: 4>, *, eps: float = 1e-05) -> object"""

    assert _argument_names(Entry("function", None, "f", live)) == ["input", "otype", "eps"]


def test_afterwards_every_binding_is_the_one_that_it_was():
    before = kernels.silu, kernels.row_sums, vars(kernels.Workspace)["scale"]
    with KernelCalls():
        assert kernels.silu is not before[0]
        with _C.OperatorTrace() as trace:
            trace.begin_pass()
            assert torch.isnan(kernels.silu(torch.ones(8), "element")[5])
    assert (kernels.silu, kernels.row_sums, vars(kernels.Workspace)["scale"]) == before
