"""Compares nanlocator.transformers with transformers' debug_utils: the same text where the original works,
and fixes of its defects. Each test of a defect first shows the original's defect."""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import re
import textwrap
import types
import weakref

import numpy
import pytest
import torch
import transformers
from tiny_models import language_model
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import debug_utils as original

import nanlocator.transformers as ours
from nanlocator.debugger.scans import Scans

NAN, INF = float("nan"), float("inf")
MODELS = ("bert", "gpt2", "t5", "llama")
# In the second layer, so that healthy frames come before it.
MLP = {
    "bert": ("bert.encoder.layer.1.intermediate.dense", "bert.encoder.layer.1.output.dense"),
    "gpt2": ("transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj"),
    "t5": ("encoder.block.1.layer.1.DenseReluDense.wi", "encoder.block.1.layer.1.DenseReluDense.wo"),
    "llama": ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"),
}


def printed_by(action):
    """Output of `action`, and the text of the error that ends it."""
    out = io.StringIO()
    error = None
    with contextlib.redirect_stdout(out):
        try:
            action()
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
    return out.getvalue(), error


def watched_by(tool, model, *batches, **options):
    """Output of `tool.DebugUnderflowOverflow` while `model` runs the batches; its hooks are gone
    afterwards."""

    def run():
        debugger = tool.DebugUnderflowOverflow(model, **options)
        try:
            for batch in batches:
                batch() if callable(batch) else model(batch)
        finally:
            if tool is ours:
                debugger.remove()

    return printed_by(run)


# ---- The same text ------------------------------------------------------------------------------


def plant(model, name, fault):
    inner, outer = (model.get_submodule(path).weight for path in MLP[name])
    with torch.no_grad():
        if fault == "overflow":
            inner.mul_(1e4)
            outer.mul_(1e4)
        elif fault == "nan weight":
            outer.view(-1)[5] = NAN


def train_two_batches(tool, name, dtype, mode, fault):
    torch.manual_seed(1)
    model = language_model(name).to(dtype).train(mode == "training")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(2, 64, (2, 2, 12))

    def batch(number):
        def run():
            if number == 1:
                plant(model, name, fault)
            loss = model(input_ids=tokens[number], labels=tokens[number]).loss
            if mode == "training":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    trace = {"trace_batch_nums": [0, 1]} if fault == "healthy" else {}
    return watched_by(tool, model, batch(0), batch(1), **trace)


def over_all_cases(test):
    """48 cases of (name, fault, dtype, mode)."""
    faults = [
        ("healthy", torch.float32),
        ("healthy", torch.float16),
        ("healthy", torch.bfloat16),
        ("overflow", torch.float16),
        ("nan weight", torch.float32),
        ("nan weight", torch.float16),
    ]
    test = pytest.mark.parametrize("name", MODELS)(test)
    test = pytest.mark.parametrize(("fault", "dtype"), faults, ids=str)(test)
    return pytest.mark.parametrize("mode", ["forward only", "training"])(test)


@over_all_cases
def test_the_text_is_the_originals_byte_for_byte(name, fault, dtype, mode):
    theirs = train_two_batches(original, name, dtype, mode, fault)
    text, error = theirs
    if fault == "healthy":
        assert error is None and "*** Starting batch number=1 ***" in text and "inf" not in text
    else:
        assert error.startswith("ValueError: DebugUnderflowOverflow: inf/nan detected, aborting")
        assert "Detected inf/nan during batch_number=1\nLast 21 forward frames:\n" in text
        assert ("has infs" if fault == "overflow" else "weight has nans") in text
    assert train_two_batches(ours, name, dtype, mode, fault) == theirs


@pytest.mark.parametrize("options", [{"abort_after_batch_num": 1}, {"trace_batch_nums": [1, 2]}], ids=str)
def test_stopping_and_tracing_some_batches_print_the_same(options):
    def run(tool):
        torch.manual_seed(1)
        return watched_by(tool, nn.Sequential(nn.Linear(3, 4), nn.ReLU()), *torch.randn(4, 2, 3), **options)

    assert run(ours) == run(original)
    assert ("abort_after_batch_num" in options) == (run(ours)[1] is not None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_second_forward_of_checkpointing_prints_the_same_and_leaves_nothing(reentrant):
    def run(tool):
        torch.manual_seed(1)
        model = language_model("gpt2").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        tokens = torch.randint(2, 64, (2, 12))
        debugger = tool.DebugUnderflowOverflow(model, trace_batch_nums=[0, 1, 2])

        def steps():
            for _ in range(3):
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

        text, error = printed_by(steps)
        if tool is ours:
            assert len(debugger._running.stack) < 10
            debugger.trace_batch_nums = []
            model.transformer.h[1].register_forward_pre_hook(lambda m, args: (args[0] * NAN, *args[1:]))
            _, stopped = printed_by(steps)
            assert "inf/nan detected" in stopped and debugger.batch_number == 4  # one more, the reported one
            debugger.remove()
        assert error is None
        assert text.count(" transformer.h.0.mlp.c_fc Conv1D\n") == 5  # the last one is in batch 3
        return text

    text, theirs = run(ours), run(original)
    if reentrant:
        assert text == theirs
    else:
        # The second forward ends once the last saved tensor exists. The original's own operators save
        # tensors, so with it more of the second forward runs.
        first, in_first = (t.split("*** Starting batch number=1")[0] for t in (text, theirs))
        assert first == in_first and len(text) < len(theirs)


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, times):
        return self.linear(self(x, times - 1) if times > 0 else x)


@pytest.mark.parametrize("at", ["root", "below"])
def test_a_module_that_calls_itself_prints_the_same(at):
    def run(tool):
        torch.manual_seed(1)
        model = CallsItself() if at == "root" else Outer()
        return watched_by(
            tool, model, lambda: model(GOOD, 2), max_frames_to_save=4, trace_batch_nums=[0, 1, 2]
        )

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = CallsItself()

        def forward(self, x, times):
            return self.inner(x, times)

    assert run(ours) == run(original)


class Mixed(nn.Module):
    """Every kind of output for which the original has a row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, number, nothing):
        y = self.linear(x)
        return (
            y,
            (y + 1, None, "text", (y,)),
            None,
            {"y": y},
            [y],
            torch.arange(-4, 3),
            torch.tensor([3 + 4j]),
        )


@pytest.mark.parametrize("value", [1.0, NAN, INF])
def test_rows_of_tuples_nones_integers_and_other_things_are_the_same(value):
    def run(tool):
        torch.manual_seed(1)
        model = Mixed()
        return watched_by(tool, model, lambda: model(torch.tensor([[1.0, -2.0, value]]), 7, None))

    assert run(ours) == run(original)


def frames_in(text):
    """{"name Class": rows of its last call}, with the numbers blanked."""
    frames, rows = {}, None
    for line in re.sub(r"\d\.\d\de[+-]\d\d", "#.##e+##", text).splitlines():
        if header := re.fullmatch(r" {17} ( ?\S.*)", line):
            rows = frames[header[1]] = []
        elif rows is not None and line.strip():
            rows.append(line)
    return frames


def test_a_report_has_the_frames_of_the_public_documentation():
    """The overflow of a T5 with a gated GELU: 6.27e+04 in, and inf out of a dropout that scales by 1.11."""
    documented = textwrap.dedent(original.DebugUnderflowOverflow.__doc__.split("```")[3])
    assert "T5DenseGatedGeluDense" in documented
    documented = documented.replace("T5DenseGatedGeluDense", "T5DenseGatedActDense")  # its name since
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).half().train()
    wo = model.encoder.block[2].layer[1].DenseReluDense.wo
    wo.register_forward_hook(lambda m, i, output: output.sign() * 62700)
    tokens = torch.randint(2, 64, (2, 12))
    text, error = watched_by(ours, model, lambda: model(input_ids=tokens, labels=tokens))
    assert "inf/nan detected" in error
    header = documented.strip("\n").splitlines()[:3]
    assert "\n".join(header) in text
    reported = frames_in(text)
    expected = frames_in(documented)
    assert len(expected) == 5
    assert {name: reported[name] for name in expected} == expected
    assert list(reported)[-1] == "encoder.block.2.layer.1.dropout Dropout"
    assert "6.27e+04 6.27e+04 output\n" in text and "0.00e+00      inf output\n" in text


def test_a_traced_batch_has_the_frames_of_the_public_documentation():
    documented = "\n".join(
        [
            "                  *** Starting batch number=1 ***",
            "abs min  abs max  metadata",
            "                  encoder.embed_tokens Embedding",  # one module with `shared` in that version
            "1.01e-06 7.92e+02 weight",
            "0.00e+00 2.47e+04 input[0]",
            "5.36e-05 7.92e+02 output",
            "                  decoder.dropout Dropout",
            "1.60e-07 2.27e+01 input[0]",
            "0.00e+00 2.52e+01 output",
            "                  decoder T5Stack",
            "     not a tensor output",
            "                  lm_head Linear",
            "1.01e-06 7.92e+02 weight",
            "0.00e+00 1.11e+00 input[0]",
            "6.06e-02 8.39e+01 output",
            "                   T5ForConditionalGeneration",
            "     not a tensor output",
        ]
    )
    model = language_model("t5")
    tokens = torch.randint(2, 64, (2, 12))
    step = lambda: model(input_ids=tokens, labels=tokens)  # noqa: E731
    text, _ = watched_by(ours, model, step, step, trace_batch_nums=[1])
    reported, expected = frames_in(text), frames_in(documented)
    assert {name: reported.get(name) for name in expected} == expected
    assert text.startswith("\n\n" + "\n".join(documented.splitlines()[:3]) + "\n")


def test_the_words_of_debug_are_transformers():
    for option in original.DebugOption:
        assert ours.DebugOption(option.value) == option
        assert original.DebugOption(ours.DebugOption(option.value)) is option
    with pytest.raises(ValueError, match="please select one of"):
        ours.DebugOption("overflow")


# ---- Values that the original does not see -------------------------------------------------------


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list


class Carrier(nn.Module):
    """Puts a bad tensor where the original does not scan; the loss is finite."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inner = Taker()

    def forward(self, x, bad):
        if self.how == "keyword":
            return self.inner(x, extra=bad)
        if self.how == "dict argument":
            return self.inner(x, {"a": [x, bad]})
        if self.how == "dict keyword":
            return self.inner(x, extra={"a": {"b": bad}})
        return self.inner(x, give=self.how, value=bad)


class Taker(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, extra=None, give=None, value=None):
        if give is None:
            return self.linear(x)
        return {
            "list": lambda: [x, value],
            "dict": lambda: {"x": x, "y": value},
            "dataclass": lambda: Pair(x, [value]),
            "deep tuple": lambda: (x, (x, (value,))),
            "ModelOutput": lambda: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=value),
        }[give]()


@pytest.mark.parametrize(
    ("how", "context"),
    [
        ("keyword", "input[extra]"),
        ("dict argument", "input[1][a][1]"),
        ("dict keyword", "input[extra][a][b]"),
        ("list", "output[1]"),
        ("dict", "output[y]"),
        ("dataclass", "output.right[0]"),
        ("deep tuple", "output[1][1][0]"),
        ("ModelOutput", "output.last_hidden_state"),
    ],
)
def test_keyword_and_nested_values_are_scanned(how, context):
    model = Carrier(how)
    x, bad = torch.ones(1, 2), torch.tensor([1.0, NAN])

    def finite_loss(tool):
        # The bad tensor is a keyword of the model, so that only the tested place can show it.
        return watched_by(tool, model, lambda: model(x, bad=bad), max_frames_to_save=1)

    assert "has nans" not in finite_loss(original)[0] and finite_loss(original)[1] is None
    text, error = finite_loss(ours)
    assert "inf/nan detected" in error and "inner Taker" in text
    assert f"\n     nan      nan {context}\n" in text
    assert f"{context} has nans\n" in text


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_a_bool_mask_does_not_end_the_run(name):
    tokens = torch.randint(2, 64, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0

    def run(tool):
        torch.manual_seed(1)
        model = language_model(name, "sdpa").eval()
        step = lambda: model(input_ids=tokens, labels=tokens, attention_mask=mask)  # noqa: E731
        return watched_by(tool, model, step, step, trace_batch_nums=[0, 1])

    if torch.get_default_device().type == "cpu":
        error = run(original)[1]  # a RuntimeError up to torch 2.6
        assert error is not None and error.endswith("Error: \"abs_cpu\" not implemented for 'Bool'")
    text, error = run(ours)
    assert error is None and "*** Starting batch number=1 ***" in text


ODD_TENSORS = {
    "bool": (lambda: torch.tensor([True, False]), "0.00e+00 1.00e+00 x"),
    "empty": (lambda: torch.empty(2, 0), "            empty x"),
    "empty integers": (lambda: torch.empty(0, dtype=torch.int64), "            empty x"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.tensor([-3.0, 0.5]), 0.5, 0, torch.qint8),
        "5.00e-01 3.00e+00 x",
    ),
    "fp8": (lambda: torch.tensor([-2.0, 0.5]).to(torch.float8_e4m3fn), "5.00e-01 2.00e+00 x"),
    "fp8 with nan": (lambda: torch.tensor([NAN, 0.5]).to(torch.float8_e5m2), "     nan      nan x"),
    "fp8 fnuz": (lambda: torch.tensor([-2.0, 0.5]).to(torch.float8_e4m3fnuz), "5.00e-01 2.00e+00 x"),
    "uint16": (lambda: torch.tensor([3, 4], dtype=torch.uint16), "3.00e+00 4.00e+00 x"),
    "sparse": (lambda: torch.tensor([[0.0, -2.0], [3.0, 0.0]]).to_sparse(), "2.00e+00 3.00e+00 x"),
    "meta": (lambda: torch.ones(3, device="meta"), "        no values x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors_that_the_original_cannot_print(kind):
    make, expected = ODD_TENSORS[kind]
    if kind != "bool" or torch.get_default_device().type == "cpu":
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            original.get_abs_min_max(make(), "x")
    assert ours.get_abs_min_max(make(), "x") == expected
    text, error = printed_by(lambda: ours.detect_overflow(make(), "x"))
    assert (text, error) == ("x has nans\n" if "nan" in kind else "", None)


SAME_TENSORS = [
    torch.arange(-5, 3),
    torch.arange(-9, -3),
    torch.tensor([200, 7], dtype=torch.uint8),
    torch.tensor([3 + 4j, 1 + 0j]),
    torch.tensor([complex(3, NAN), 1 + 0j]),
    torch.tensor([complex(3, INF), 1 + 0j]),
    torch.tensor([[1.0, -INF], [2.0, 0.5]]).half().t(),
    torch.tensor([NAN, INF]),
    torch.tensor([INF, -INF]),
    torch.tensor(-0.25),
    torch.tensor([1e-45, -3e38]),
    torch.tensor([1e300, 1e-300], dtype=torch.float64),
    torch.linspace(-1, 1, 7).bfloat16()[::2],
]


@pytest.mark.parametrize("index", range(len(SAME_TENSORS)))
def test_the_helpers_print_the_same_of_one_tensor(index):
    tensor = SAME_TENSORS[index]
    assert ours.get_abs_min_max(tensor, "a b") == original.get_abs_min_max(tensor, "a b")
    theirs = printed_by(lambda: original.detect_overflow(tensor, "a b"))
    assert printed_by(lambda: ours.detect_overflow(tensor, "a b")) == theirs
    assert ours.detect_overflow(tensor, "") is original.detect_overflow(tensor, "")


def test_verbose_adds_dtype_shape_counts_first_index_and_what_is_finite():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, mask=None):
            y = self.linear(x)[0, 0] * 0 + 1
            bad = torch.tensor([[1.0, -3.0, 2.0], [y.item(), INF, NAN]], dtype=torch.float16)
            return bad, "text", None, torch.tensor([NAN])

    model = Bad()
    text, _ = watched_by(
        ours, model, lambda: model(torch.ones(4, 3), mask=torch.tensor([True])), verbose=True
    )
    lines = text.splitlines()
    assert (
        "     nan      nan output[0]  float16 [2, 3]  1 NaN, 1 +Inf of 6, first at [1, 1], "
        "finite -3.00e+00 to 2.00e+00" in lines
    )
    assert "     nan      nan output[3]  float32 [1]  1 NaN of 1, first at [0], nothing finite" in lines
    assert "     not a tensor output[1]  str" in lines and "             None output[2]" in lines
    assert "1.00e+00 1.00e+00 input[mask]  bool [1]" in lines
    assert "1.00e+00 1.00e+00 input[0]  float32 [4, 3]" in lines
    theirs, _ = watched_by(original, Bad(), torch.ones(4, 3))
    assert "     nan      nan output[0]" in theirs.splitlines()  # and no more


# ---- State --------------------------------------------------------------------------------------


def five_layers():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))


GOOD, BAD = torch.ones(1, 2), torch.tensor([[1.0, NAN]])


def test_overflow_in_a_traced_batch_does_not_end_a_later_healthy_one():
    run = lambda tool: watched_by(tool, five_layers(), BAD, GOOD, GOOD, trace_batch_nums=[0])  # noqa: E731
    assert "inf/nan detected" in run(original)[1]
    text, error = run(ours)
    assert error is None and "input[0] has nans" in text


def test_a_run_that_goes_on_after_a_report_is_not_ended_by_healthy_batches():
    def errors(tool):
        model = five_layers()
        debugger = tool.DebugUnderflowOverflow(model)
        return [printed_by(lambda b=b: model(b))[1] is not None for b in (GOOD, BAD, GOOD, BAD)], debugger

    seen, debugger = errors(original)
    assert seen == [False, True, True, True] and debugger.batch_number == 1
    seen, debugger = errors(ours)
    assert seen == [False, True, False, True]
    with debugger:
        assert debugger.detected_overflow and debugger.batch_number == 4
        debugger.model(GOOD)
        assert not debugger.detected_overflow
        text, _ = printed_by(lambda: debugger.model(BAD))
        assert "during batch_number=5\n" in text  # includes batches that ended in a report


def test_the_cap_on_frames_outlives_a_trace():
    def run(tool):
        return watched_by(
            tool, five_layers(), GOOD, GOOD, GOOD, BAD, trace_batch_nums=[0], max_frames_to_save=3
        )[0]

    assert "Last 13 forward frames:" in run(original)
    assert "Last 3 forward frames:" in run(ours)


def test_frames_are_kept_up_to_the_cap_and_can_be_read():
    model = five_layers()
    with ours.DebugUnderflowOverflow(model, max_frames_to_save=None) as debugger:
        model(GOOD)
        model(GOOD)
        assert len(debugger.frames) == 12 and debugger.total_calls == 12
        assert debugger.frames[0].startswith("\n\n                  *** Starting batch number=0 ***\n")
        assert debugger.frames[1].splitlines()[0] == "                  1 Linear"


class BadRoot(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) / (0 if self.calls == 3 else 1)


def test_the_root_module_is_reported_in_the_batch_that_it_ran_in():
    run = lambda tool: watched_by(tool, BadRoot(), GOOD, GOOD, GOOD)[0]  # noqa: E731
    assert "Detected inf/nan during batch_number=3\n" in run(original)
    assert "Detected inf/nan during batch_number=2\n" in run(ours)


# ---- Modules ------------------------------------------------------------------------------------


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2))
        self.second = nn.Sequential(self.first[0])

    def forward(self, x):
        return self.second(self.first(x))


def names_in(text):
    return re.findall(r"^ {17} ([\w.]*) (?:Linear|Sequential|Shares|Grows|Dropout)$", text, re.MULTILINE)


def test_a_shared_module_has_one_frame_for_each_call_and_its_name():
    run = lambda tool, **o: watched_by(tool, Shares(), GOOD, trace_batch_nums=[0], **o)[0]  # noqa: E731
    assert names_in(run(original)) == ["first.0"] * 2 + ["first"] + ["first.0"] * 2 + ["second", ""]
    assert names_in(run(ours)) == ["first.0", "first", "first.0", "second", ""]
    assert names_in(run(ours, verbose=True)) == ["first.0", "first", "second.0", "second", ""]


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.later = None

    def forward(self, x):
        x = self.linear(x)
        return x if self.later is None else torch.nan_to_num(self.later(x))


def test_a_module_added_later_is_scanned():
    def run(tool):
        torch.manual_seed(1)
        model = Grows()

        def batch():
            if model.later is None:
                model.later = nn.Sequential(nn.Linear(2, 2))
                with torch.no_grad():
                    model.later[0].bias[0] = NAN
            model(GOOD)

        return watched_by(tool, model, GOOD, batch)

    assert run(original)[1] is None
    text, error = run(ours)
    assert "inf/nan detected" in error
    assert names_in(text)[-1] == "later.0" and "     nan      nan bias\n" in text


def test_a_copied_module_does_not_end_in_a_key_error():
    def run(tool, **options):
        torch.manual_seed(1)
        model = Grows()

        def batch():
            model.later = copy.copy(model.linear)
            model(GOOD)

        return watched_by(tool, model, batch, GOOD, trace_batch_nums=[0, 1], **options)

    assert run(original)[1].startswith("KeyError")
    assert names_in(run(ours)[0]) == ["linear", ""] * 2
    text, error = run(ours, verbose=True)
    assert error is None and names_in(text) == ["linear", "later", ""] * 2


def test_a_module_made_in_each_forward_is_seen_and_not_kept():
    class OnTheFly(Grows):
        def forward(self, x):
            return nn.Dropout(0.5)(self.linear(x))

    model = OnTheFly()
    with ours.DebugUnderflowOverflow(model, trace_batch_nums=[0], verbose=True) as debugger:
        text, _ = printed_by(lambda: model(GOOD))
        for _ in range(5):
            model(GOOD)
        assert len(debugger._late_hooks) <= 1
    assert " Dropout Dropout\n" in text


def hook_count(model):
    every = torch.nn.modules.module
    return (
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        + len(every._global_forward_hooks)
        + len(every._global_forward_pre_hooks)
        + len(_global_optimizer_post_hooks)
    )


def test_hooks_can_be_removed():
    model = five_layers()
    before = hook_count(model)
    original.DebugUnderflowOverflow(copied := copy.deepcopy(model))
    assert not hasattr(original.DebugUnderflowOverflow, "remove") and hook_count(copied) > before
    with ours.DebugUnderflowOverflow(model) as debugger:
        assert hook_count(model) > before
    assert hook_count(model) == before
    debugger.remove()
    model(BAD)


def test_a_debugger_that_nobody_keeps_ends_with_its_model():
    model = five_layers()
    hooks_before = set(torch.nn.modules.module._global_forward_pre_hooks)
    debugger = weakref.ref(ours.DebugUnderflowOverflow(model))
    gc.collect()
    model(GOOD)
    assert debugger().total_calls == 6  # its model's hooks keep the debugger
    del model
    gc.collect()
    assert debugger() is None
    torch.nn.Linear(2, 2)(torch.ones(2))
    assert set(torch.nn.modules.module._global_forward_pre_hooks) == hooks_before


def test_two_debuggers_of_one_model_do_not_disturb_each_other():
    model = five_layers()
    with ours.DebugUnderflowOverflow(model) as first, ours.DebugUnderflowOverflow(model) as second:
        model(GOOD)
        assert first.total_calls == second.total_calls == 6
        first.remove()
        assert printed_by(lambda: model(BAD))[1] is not None
        assert first.total_calls == 6 and second.batch_number == 2


def test_a_deep_copy_of_a_watched_model_is_a_model_of_its_own():
    original.DebugUnderflowOverflow(model := five_layers())
    assert "inf/nan detected" in printed_by(lambda: copy.deepcopy(model)(BAD))[1]
    model = five_layers()
    with ours.DebugUnderflowOverflow(model) as debugger:
        copied = copy.deepcopy(model)
        assert copied(BAD).isnan().any()
        assert debugger.total_calls == 0
        model(GOOD)
        assert debugger.total_calls == 6


def test_a_forward_that_raises_leaves_names_and_batches_right():
    class Fails(Shares):
        def forward(self, x, fail=False):
            x = self.first(x)
            if fail:
                raise KeyError("user")
            return self.second(x)

    model = Fails()
    with ours.DebugUnderflowOverflow(model, trace_batch_nums=[0], verbose=True):
        assert "KeyError" in printed_by(lambda: model(GOOD, fail=True))[1]
        text, _ = printed_by(lambda: model(GOOD))
    assert names_in(text) == ["first.0", "first", "second.0", "second"]  # also the root, a Fails


def test_calls_that_raise_do_not_pile_up():
    model = Shares()
    with ours.DebugUnderflowOverflow(model) as debugger:
        for _ in range(20):
            assert "RuntimeError" in printed_by(lambda: model.first(torch.ones(3)))[1]
        assert len(debugger._running.stack) <= 2


def test_a_report_outside_the_model_is_no_batch():
    model = five_layers()
    with ours.DebugUnderflowOverflow(model) as debugger:
        model(GOOD)
        assert "batch_number=1\n" in printed_by(lambda: model[3](BAD))[0]
        assert debugger.batch_number == 1


# ---- Cost ---------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators_of(tool):
    model = five_layers()
    watch = tool.DebugUnderflowOverflow(model) if tool else contextlib.nullcontext()
    with Operators() as operators:
        model(GOOD)
    if tool is ours:
        watch.remove()
    return operators.count


def test_a_healthy_tensor_costs_one_scan_and_no_operator_of_torch():
    alone = operators_of(None)
    assert (operators_of(original) - alone)["isnan"] == 22  # 10 parameters, in- and outputs of 6 modules
    assert operators_of(ours) == alone


def scans_of_weights(tool, monkeypatch, steps):
    """Number of scans of each parameter of a model while `steps(model)` runs."""
    model = five_layers()
    counts = collections.Counter()
    if tool is ours:
        true_scan = Scans.scan

        def scan(self, tensor):
            counts["weight"] += isinstance(tensor, nn.Parameter)
            return true_scan(self, tensor)

        monkeypatch.setattr(Scans, "scan", scan)
    else:
        true_detect = original.detect_overflow

        def detect(var, context):
            counts["weight"] += isinstance(var, nn.Parameter)
            return true_detect(var, context)

        monkeypatch.setattr(original, "detect_overflow", detect)
    debugger = tool.DebugUnderflowOverflow(model)
    steps(model)
    if tool is ours:
        debugger.remove()
    return counts["weight"] / 10


def test_weights_are_scanned_once_per_optimizer_step(monkeypatch):
    def accumulate(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(4):
                model(GOOD).sum().backward()
            optimizer.step()

    assert scans_of_weights(original, monkeypatch, accumulate) == 12
    assert scans_of_weights(ours, monkeypatch, accumulate) == 3


def spoil_in_place(model):
    with torch.no_grad():
        model[2].bias[1] = NAN


def spoil_data(model):
    model[2].bias.data[1] = NAN


def spoil_by_replacement(model):
    values = model[2].bias.detach().clone()
    values[1] = NAN
    model[2].bias.data = values


@pytest.mark.parametrize("spoil", [spoil_in_place, spoil_data, spoil_by_replacement])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_weight_that_was_changed_without_a_step_is_read_again(spoil, gradients):
    model = five_layers()

    def second():
        spoil(model)
        model(GOOD)

    with torch.set_grad_enabled(gradients):
        text, error = watched_by(ours, model, GOOD, second)
    assert "inf/nan detected" in error
    assert "bias has nans\n" in text and "     nan      nan bias\n" in text


@pytest.mark.parametrize(
    ("spoil", "gradients", "is_seen"),
    [
        (spoil_in_place, True, True),
        (spoil_by_replacement, True, True),
        (spoil_data, False, True),
        (spoil_data, True, False),  # an uncounted write, with no effect yet
    ],
)
def test_a_bad_weight_that_is_not_used_is_seen_where_its_change_can_be_known(spoil, gradients, is_seen):
    model = nn.ModuleDict({"bias": nn.Embedding(3, 2)})  # row 1 is not looked up
    table = types.SimpleNamespace(bias=model["bias"].weight)
    model.forward = lambda ids: model["bias"](ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.tensor([0, 2])

    def second():
        spoil({2: table})
        model(ids)

    with torch.set_grad_enabled(gradients):
        assert (watched_by(ours, model, ids, second)[1] is not None) == is_seen

    def step():
        model(ids).sum().backward()
        optimizer.step()

    assert "inf/nan detected" in watched_by(ours, model, step, ids)[1]


def test_training_is_bit_identical_with_and_without():
    def train(watch):
        torch.manual_seed(3)
        model = language_model("gpt2", "sdpa").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(2, 64, (3, 2, 12))
        context = ours.DebugUnderflowOverflow(model) if watch else contextlib.nullcontext()
        with context:
            for batch in tokens:
                optimizer.zero_grad()
                model(input_ids=batch, labels=batch, attention_mask=torch.ones_like(batch)).loss.backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (with_it, state), (without, other_state) = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert torch.equal(state, other_state)


# ---- Masks --------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = Masked()

    def forward(self, x, mask):
        return self.inner(self.linear(x), mask)


class Masked(nn.Module):
    def forward(self, x, mask):
        return (x + mask).exp()


def test_an_additive_mask_is_no_overflow():
    mask = torch.tensor([[0.0, -INF]])

    def run(tool, **options):
        model = Attends()
        return watched_by(tool, model, lambda: model(GOOD, mask), **options)

    assert "inf/nan detected" in run(original)[1]
    assert run(ours)[1] is None
    assert "inf/nan detected" in run(ours, count_masks=True)[1]


@pytest.mark.parametrize("value", [[-INF, -INF], [-INF, 1.0], [0.0, INF], [NAN, 0.0], [0.0, 1.0]])
def test_other_infinities_of_an_input_are_overflow(value):
    model = Attends()
    _, error = watched_by(ours, model, lambda: model(GOOD, torch.tensor([value])))
    assert (error is None) == (value == [0.0, 1.0])


def test_an_output_of_zeros_and_minus_infinity_is_overflow():
    model = BadRoot()
    model.linear.register_forward_hook(lambda m, i, o: torch.tensor([[0.0, -INF]]))
    assert "inf/nan detected" in watched_by(ours, model, GOOD)[1]


# ---- detect_overflow ----------------------------------------------------------------------------


def with_blocks_enabled():
    """The original function with its three optional `if 0` blocks enabled."""
    import inspect

    source = inspect.getsource(original.detect_overflow)
    assert source.count("    if 0:") == 3
    namespace = {"torch": torch}
    exec(source.replace("    if 0:", "    if 1:"), namespace)
    return namespace["detect_overflow"]


@pytest.mark.parametrize(
    "values", [[1.0, -2.0, 3.0], [150.0, -2000.0, 1e5, 99.0], [NAN, 500.0], [-INF, 2.0], [INF, -INF]], ids=str
)
def test_the_optional_blocks_print_what_the_commented_out_code_would(values):
    tensor = torch.tensor(values)
    expected = printed_by(lambda: with_blocks_enabled()(tensor, "here"))
    all_on = {"n100": True, "n1000": True, "n10000": True, "min_max": True, "mean_var": True}
    assert printed_by(lambda: ours.detect_overflow(tensor, "here", **all_on)) == expected
    assert expected[1] is None and "var=" in expected[0]


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"n100": True}, "x:  n100=3\n"),
        ({"n1000": True}, "x: n1000=2\n"),
        ({"n10000": True}, "x: n10000=1\n"),
        ({"min_max": True}, "min=-2.00e+03 max= 2.00e+04\n"),
        ({}, ""),
    ],
)
def test_each_optional_block_is_asked_for_alone(option, line):
    tensor = torch.tensor([150, -2000, 20000, 99])  # torch has no mean of integers, and the code needs none
    assert printed_by(lambda: ours.detect_overflow(tensor, "x", **option)) == (line, None)


def test_the_variance_of_large_fp16_values_does_not_overflow():
    tensor = torch.tensor([60000.0, -60000.0], dtype=torch.float16)
    assert "var=      inf" in printed_by(lambda: with_blocks_enabled()(tensor, "x"))[0]
    text, _ = printed_by(lambda: ours.detect_overflow(tensor, "x", mean_var=True))
    assert text == "min=-6.00e+04 max= 6.00e+04 var= 7.20e+09 mean= 0.00e+00 (x)\n"


def test_a_gradient_is_scanned_in_backward():
    def hooked(tool):
        x = torch.zeros(2, requires_grad=True)
        x.sqrt().sum().register_hook(lambda g: None)
        x.register_hook(lambda g: tool.detect_overflow(g, "gradient"))
        x.sqrt().sum().backward()

    assert "hook returned 'bool'" in printed_by(lambda: hooked(original))[1]
    x = torch.zeros(2, requires_grad=True)

    def run():
        assert not ours.detect_overflow(x, "x", backward=True)
        y = x * 1
        assert not ours.detect_overflow(y, "y", backward=True, n100=True)
        y.sqrt().sum().backward()

    text, error = printed_by(run)
    assert error is None
    assert text == "gradient of y has infs\ngradient of y:  n100=2\ngradient of x has infs\n"
    assert x.grad.isinf().all()


def test_a_tensor_under_vmap_has_no_values_and_does_no_harm():
    def f(x):
        assert not ours.detect_overflow(x, "x")
        assert ours.get_abs_min_max(x, "x") == "        no values x"
        return x * 2

    assert torch.equal(torch.func.vmap(f)(torch.ones(3, 2)), torch.full((3, 2), 2.0))


# ---- Wrong use ----------------------------------------------------------------------------------


def test_wrong_arguments_say_what_to_do():
    model = nn.Linear(2, 2)
    wrong = [
        (lambda: ours.DebugUnderflowOverflow("gpt2"), TypeError, "must be a torch.nn.Module, got str"),
        (lambda: ours.DebugUnderflowOverflow(nn.ReLU()), ValueError, "ReLU has no parameters"),
        (lambda: ours.DebugUnderflowOverflow(model, -1), ValueError, "max_frames_to_save=-1"),
        (lambda: ours.DebugUnderflowOverflow(model, 2.5), ValueError, "max_frames_to_save=2.5"),
        (lambda: ours.DebugUnderflowOverflow(model, 21, [1, -3]), ValueError, "trace_batch_nums` has -3"),
        (lambda: ours.DebugUnderflowOverflow(model, 21, 3), TypeError, "must be a list of batch numbers"),
        (lambda: ours.DebugUnderflowOverflow(model, 21, ["1"]), ValueError, "has '1'"),
        (lambda: ours.DebugUnderflowOverflow(model, 21, [], -2), ValueError, "abort_after_batch_num` has -2"),
        (lambda: ours.detect_overflow([1.0], "x"), TypeError, "expected a tensor, got list"),
    ]
    for unnoticed in ((nn.ReLU(),), (nn.Linear(2, 2), 21, [1, -3]), (nn.Linear(2, 2), 21, 3)):
        original.DebugUnderflowOverflow(*unnoticed)
    before = hook_count(model)
    for action, error, words in wrong:
        with pytest.raises(error, match=re.escape(words)):
            action()
    assert hook_count(model) == before


def test_batch_numbers_may_come_from_numpy_or_a_range():
    model = five_layers()
    for numbers in (range(2), numpy.array([0, 1])):
        text, _ = watched_by(ours, model, GOOD, GOOD, GOOD, trace_batch_nums=numbers)
        assert text.count("*** Starting batch number=") == 2
