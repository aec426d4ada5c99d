"""The debugger's text if stdout or the disk fails, bundles, and masked scores."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
import torch
from ranks import run_ranks
from torch import nn
from transformers import debug_utils as original

import nanlocator.replay
from nanlocator.transformers import DebugUnderflowOverflow, detect_overflow

NAN, INF = float("nan"), float("inf")
IS_ON_CPU = torch.get_default_device().type == "cpu"
REPORT = "\nDetected inf/nan during batch_number=0\nLast 1 forward frames:\n"


class Closed(io.StringIO):
    def __init__(self):
        super().__init__()
        self.close()


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def overflow(**options):
    """The error's text and the stderr of a bad batch."""
    model = nn.Linear(2, 2)
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises((ValueError, OSError)) as caught:
        with DebugUnderflowOverflow(model, **options):
            model(torch.full((1, 2), NAN))
    return caught, err.getvalue()


# ---- Output that fails ---------------------------------------------------------------------------


def test_the_original_ends_in_python_s_own_words_and_its_report_is_lost():
    model = nn.Linear(2, 2)
    original.DebugUnderflowOverflow(model)
    with contextlib.redirect_stdout(Closed()), pytest.raises(ValueError) as caught:
        model(torch.full((1, 2), NAN))
    assert str(caught.value) == "I/O operation on closed file"


@pytest.mark.parametrize("stdout", [Closed, FullDisk, lambda: None])
def test_what_stdout_does_not_take_goes_to_a_file(tmp_path, stdout):
    with contextlib.redirect_stdout(stdout()):
        caught, err = overflow(output_dir=tmp_path / "run")
    assert str(caught.value).startswith("DebugUnderflowOverflow: inf/nan detected, aborting")
    assert REPORT in (tmp_path / "run" / "debug_rank0.txt").read_text()
    assert (
        err.count("stdout cannot be written") == 1
        and f"The text went to {tmp_path}/run/debug_rank0.txt" in err
    )


def test_what_neither_takes_goes_to_stderr(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with contextlib.redirect_stdout(FullDisk()):
        caught, err = overflow(output_dir=tmp_path / "run")
    assert "inf/nan detected" in str(caught.value)
    assert "No space left" in err and "cannot be written" in err and "pass a writable `output_dir`" in err
    assert REPORT in err


def test_an_error_that_holds_the_text_where_nothing_takes_it(tmp_path, monkeypatch):
    (tmp_path / "run").write_text("")
    model = nn.Linear(2, 2)
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(OSError, match="and stderr is closed, too") as caught:
        with DebugUnderflowOverflow(model, trace_batch_nums=[0], output_dir=tmp_path / "run"):
            model(torch.ones(1, 2))
    assert "*** Starting batch number=0 ***" in str(caught.value)


def test_a_trace_goes_on_where_stdout_is_a_full_disk(tmp_path):
    script = (
        "import torch\n"
        "from nanlocator.transformers import DebugUnderflowOverflow\n"
        "model = torch.nn.Linear(2, 2)\n"
        f"DebugUnderflowOverflow(model, trace_batch_nums=[0, 1], output_dir={str(tmp_path)!r})\n"
        "for _ in range(2): model(torch.ones(1, 2))\n"
    )
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.stderr.count("No space left on device") == 1  # reported once
    assert (tmp_path / "debug_rank0.txt").read_text().count("*** Starting batch") == 2


def rank_with_an_unwritable_folder(rank, size, folder):
    model = nn.Linear(2, 2)
    err = io.StringIO()
    with (
        contextlib.redirect_stderr(err),
        DebugUnderflowOverflow(model, trace_batch_nums=[0], output_dir=folder),
    ):
        model(torch.ones(1, 2))
    return err.getvalue()


@pytest.mark.host
def test_a_rank_whose_file_cannot_be_written_says_so_and_keeps_its_text(tmp_path):
    (tmp_path / "run").write_text("")
    of_0, of_1 = run_ranks(2, rank_with_an_unwritable_folder, str(tmp_path / "run"))
    assert "debug_rank0.txt cannot be written" in of_0 and "The text went to stdout" in of_0
    assert "debug_rank1.txt cannot be written" in of_1 and "*** Starting batch number=0 ***" in of_1


def test_detect_overflow_survives_a_closed_stdout():
    err = io.StringIO()
    with contextlib.redirect_stdout(Closed()), contextlib.redirect_stderr(err):
        assert detect_overflow(torch.tensor([NAN]), "x")
    assert "stdout cannot be written" in err.getvalue() and "x has nans" in err.getvalue()


# ---- Bundles ------------------------------------------------------------------------------------


def shown(bundle):
    return subprocess.run(
        ["nanlocator", "bundle", "show", bundle], capture_output=True, text=True, check=True
    ).stdout


def test_a_bad_tensor_is_written_as_a_bundle_and_read_back(tmp_path, capsys):
    bad = torch.tensor([[1.0, NAN], [INF, 3.0]], dtype=torch.bfloat16)
    assert detect_overflow(bad, "after the norm", bundle=tmp_path)
    assert not detect_overflow(torch.ones(2), "healthy", bundle=tmp_path)
    (bundle,) = (tmp_path / "bundles").iterdir()
    assert f"after the norm: the tensor is in {bundle}\n" in capsys.readouterr().out
    call = nanlocator.replay.load(bundle)
    assert call.name == "after the norm"
    assert torch.equal(call.arguments[0].view(torch.int16), bad.view(torch.int16))
    text = shown(bundle)
    device = "" if IS_ON_CPU else " cuda:0"
    assert f"input[0] bfloat16{device} [2, 2] [2, 1] 1 1 [0, 1]" in re.sub(" +", " ", text)
    # A birth is unknown, and there is no call to execute.
    assert re.sub(r"\n(?=\n)", "", text).splitlines()[2:4] == [
        "module after the norm",
        "module call after the norm, a detect_overflow, evaluating",
    ]
    assert "0 NaN" not in text and "nanlocator replay" not in text


def test_a_gradient_is_written_from_within_backward(tmp_path):
    x = torch.zeros(3, requires_grad=True)
    y = x * 1
    detect_overflow(y, "y", backward=True, bundle=tmp_path)
    (y.sqrt() * 0).sum().backward()
    (bundle,) = (tmp_path / "bundles").iterdir()
    call = nanlocator.replay.load(bundle)
    assert call.name == "gradient of y" and bool(call.arguments[0].isnan().all())


def test_a_folder_that_cannot_be_written_is_reported_and_ends_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert detect_overflow(torch.tensor([NAN]), "x", bundle=tmp_path / "file")
    assert "no bundle was written: " in capsys.readouterr().err


def test_bundles_do_not_fill_the_disk(tmp_path, capsys):
    for _ in range(40):
        detect_overflow(torch.tensor([NAN]), "x", bundle=tmp_path)
    assert len(os.listdir(tmp_path / "bundles")) == 16
    assert capsys.readouterr().out.count("no more bundles are written") == 1


def scan_a_dtensor(rank, size, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.tensor([1.0, 2.0, INF, 4.0])
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        is_bad = detect_overflow(tensor, "shard", min_max=True, bundle=folder)
    return is_bad, out.getvalue()


@pytest.mark.host
def test_of_a_dtensor_each_rank_scans_its_own_part(tmp_path):
    of_0, of_1 = run_ranks(2, scan_a_dtensor, str(tmp_path))
    assert of_0 == (False, "min= 1.00e+00 max= 2.00e+00\n")
    assert of_1[0] and of_1[1].startswith("shard has infs\nshard: the tensor is in ")
    (bundle,) = (tmp_path / "bundles").iterdir()
    call = nanlocator.replay.load(bundle)
    assert call.name == "shard (rank 1)" and call.arguments[0].tolist() == [INF, 4.0]


# ---- Masked scores ------------------------------------------------------------------------------


class Scores(nn.Module):
    def __init__(self, add):
        super().__init__()
        self.add = add

    def forward(self, scores, mask):
        return self.add(scores, mask)


class Attention(nn.Module):
    """Scores, modules that change them, and a softmax over the result."""

    def __init__(self, add):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scores = Scores(add)
        self.dropout = nn.Identity()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask):
        return self.softmax(self.dropout(self.scores(self.linear(x), mask)))


def ended_by(tool, model, *inputs, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        debugger = tool(model, **options)
        try:
            model(*inputs)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        finally:
            if tool is DebugUnderflowOverflow:
                debugger.remove()
    return None


BOOL = torch.tensor([[False, True, False]])
OF_BOOL = "\"abs_cpu\" not implemented for 'Bool'" if IS_ON_CPU else "inf/nan detected"
ADDITIVE = torch.tensor([[0.0, -INF, 0.0]])


@pytest.mark.parametrize(
    ("add", "mask", "of_the_original"),
    [
        (lambda s, m: s + m, ADDITIVE, "inf/nan detected"),
        (lambda s, m: s[:, None] + m, ADDITIVE[None], "inf/nan detected"),
        (lambda s, m: s.masked_fill(m, -INF), BOOL, OF_BOOL),
        (lambda s, m: s.masked_fill(~m, -INF), ~BOOL, OF_BOOL),
    ],
)
def test_scores_masked_by_an_input_are_no_overflow(add, mask, of_the_original):
    x = torch.randn(4, 3)
    assert of_the_original in ended_by(original.DebugUnderflowOverflow, Attention(add), x, mask)
    assert ended_by(DebugUnderflowOverflow, Attention(add), x, mask) is None
    assert "inf/nan detected" in ended_by(DebugUnderflowOverflow, Attention(add), x, mask, count_masks=True)


@pytest.mark.parametrize(
    "add",
    [
        lambda s, m: (s + m).index_fill(-1, torch.tensor([0]), -INF),  # one more than masked
        lambda s, m: (s + m).index_fill(-1, torch.tensor([1]), 0.0).index_fill(-1, torch.tensor([2]), -INF),
        lambda s, m: (s + m).index_fill(-1, torch.tensor([0]), INF),
        lambda s, m: (s + m) * 0,  # NaN
        lambda s, m: (s + m).T[:, :2],  # a shape that the mask does not have
    ],
)
def test_other_infinities_beside_masked_scores_are_overflow(add):
    model = Attention(add)
    model.softmax = nn.Identity()
    assert "inf/nan detected" in ended_by(DebugUnderflowOverflow, model, torch.randn(4, 3), ADDITIVE)


def test_masked_scores_that_were_written_since_are_judged_anew():
    class Writes(Attention):
        def forward(self, x, mask):
            scores = self.scores(self.linear(x), mask)
            with torch.no_grad():
                scores[0, 0] = -INF
            return self.softmax(scores)

    model = Writes(lambda s, m: s + m)
    assert "inf/nan detected" in ended_by(DebugUnderflowOverflow, model, torch.randn(4, 3), ADDITIVE)
