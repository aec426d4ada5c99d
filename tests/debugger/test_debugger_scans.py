"""Scans that wait for a device: the same text as without waiting, and one wait per batch.

Here the engine's scans are held back until they are read, like an accelerator's; the last test has a GPU.
"""

import contextlib
import gc
import io
import weakref

import pytest
import torch
from ranks import run_ranks
from test_debugger import five_layers, over_all_cases, train_two_batches, watched_by
from test_debugger_backward import Attention as BadInBackward
from tiny_models import language_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanlocator.transformers as ours
from nanlocator import _C, _build_info
from nanlocator.debugger import scans
from nanlocator.debugger.ranks import Finding

NAN, INF = float("nan"), float("inf")
GOOD, BAD = torch.ones(1, 2), torch.tensor([[1.0, NAN]])
_TensorScans = _C.TensorScans


class AtOnce:
    """_C.TensorScans with the behaviour for host memory, on any device."""

    def __init__(self):
        self._true = _TensorScans()

    def enqueue(self, tensor):
        seen = self._true.enqueue(tensor)
        return self._true.read()[seen] if isinstance(seen, int) else seen


class OfADevice:
    """_C.TensorScans with the behaviour for tensors outside of host memory."""

    reads = 0

    def __init__(self):
        self._true = _TensorScans()
        self._seen = []  # stats, or for a tensor on a device, its true number

    def enqueue(self, tensor):
        seen = self._true.enqueue(tensor)
        if not isinstance(seen, int) and (seen is None or seen.numel == 0):
            return seen
        self._seen.append(seen)
        return len(self._seen) - 1

    def read(self):
        OfADevice.reads += 1
        late = self._true.read()
        seen, self._seen = self._seen, []
        return [late[each] if isinstance(each, int) else each for each in seen]


@pytest.fixture
def deferred(monkeypatch):
    """Debuggers' scans wait for nothing until the returned function is called; from then on reads are
    counted."""
    monkeypatch.setattr(_C, "TensorScans", AtOnce)

    def start():
        monkeypatch.setattr(_C, "TensorScans", OfADevice)
        OfADevice.reads = 0

    return start


def reads():
    return OfADevice.reads


# ---- The same text ------------------------------------------------------------------------------


@over_all_cases
def test_the_text_and_the_error_are_those_of_scans_that_do_not_wait(deferred, name, fault, dtype, mode):
    at_once = train_two_batches(ours, name, dtype, mode, fault)
    assert ("inf/nan detected" in str(at_once[1])) == (fault != "healthy")
    deferred()
    assert train_two_batches(ours, name, dtype, mode, fault) == at_once
    assert reads() > 0


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), BadInBackward()) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.linear(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("trace", [[], [0]])
@pytest.mark.parametrize("make", [BadInBackward, lambda: Checkpointed(True), lambda: Checkpointed(False)])
def test_frames_of_backward_have_the_same_text(deferred, make, trace):
    def run():
        torch.manual_seed(1)
        model = make()

        def train():
            model(torch.tensor([[1.0, 5.0]])).sum().backward()

        return watched_by(ours, model, train, train, backward=True, verbose=True, trace_batch_nums=trace)

    at_once = run()
    assert "backward of batch number=0 ***" in at_once[0] and "inf/nan detected" in at_once[1]
    deferred()
    assert run() == at_once


def test_what_follows_from_the_first_bad_value_is_not_reported_as_well(deferred):
    """The forward goes on after the first bad frame; the report ends with that frame."""

    def run():
        model = five_layers()
        with torch.no_grad():
            model[1].bias[0] = INF
        debugger = ours.DebugUnderflowOverflow(model)
        seen = [watch(lambda: model(GOOD)) for _ in range(2)]
        seen += [debugger.batch_number, debugger.total_calls, debugger.frames, debugger.detected_overflow]
        debugger.remove()
        return seen

    def watch(action):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(ValueError) as caught:
            action()
        return out.getvalue(), str(caught.value)

    at_once = run()
    assert at_once[0][0].startswith("bias has infs\noutput has infs\n\nDetected") and at_once[2:4] == [2, 4]
    deferred()
    assert run() == at_once
    assert reads() == 2 + 2  # the weights of the reported module are scanned again


# ---- Reading the scans --------------------------------------------------------------------------


def gpt2(checkpointing=None):
    model = language_model("gpt2", "sdpa").train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    tokens = torch.randint(2, 64, (2, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        loss = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        loss.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.parametrize(
    ("checkpointing", "options", "reads_of_a_step"),
    [
        (None, {}, 1),
        (None, {"backward": True}, 2),  # forward and backward
        (False, {}, 2),  # forward, and the second forward of all blocks
        (False, {"backward": True}, 2),
    ],
)
def test_a_healthy_batch_waits_once(deferred, checkpointing, options, reads_of_a_step):
    deferred()
    model, step = gpt2(checkpointing)
    with ours.DebugUnderflowOverflow(model, **options) as debugger:
        for number in range(1, 4):
            step()
            assert reads() == number * reads_of_a_step
        assert debugger.batch_number == 3 and len(debugger.frames) == 21
    assert reads() == 3 * reads_of_a_step


def test_the_error_comes_at_the_end_of_the_batchs_forward(deferred):
    class Goes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.has_gone_on = False

        def forward(self, x):
            x = self.linear(x)
            self.has_gone_on = True
            return torch.nan_to_num(x)

    model = Goes()
    assert "inf/nan detected" in watched_by(ours, model, lambda: model(BAD.clone()))[1]
    assert not model.has_gone_on
    deferred()
    assert "inf/nan detected" in watched_by(ours, model, lambda: model(BAD.clone()))[1]
    assert model.has_gone_on


def test_a_module_outside_of_the_model_is_judged_when_its_call_ends(deferred):
    deferred()
    model = five_layers()
    with ours.DebugUnderflowOverflow(model) as debugger:
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ValueError, match="inf/nan detected"):
            model[3](BAD)
        assert debugger.batch_number == 0


def test_a_traced_batch_is_printed_call_by_call(deferred):
    class Speaks(nn.Module):
        def forward(self, x):
            print("(the user's own words)")
            return x

    def run():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), Speaks(), nn.Linear(2, 2))
        return watched_by(ours, model, GOOD, GOOD, trace_batch_nums=[1])

    at_once = run()
    assert "0 Linear\n" in at_once[0].split("(the user's own words)")[1]
    deferred()
    assert run() == at_once


@pytest.mark.parametrize("most", [1, 7])
def test_more_scans_than_slots_change_nothing_but_the_number_of_reads(deferred, monkeypatch, most):
    at_once = train_two_batches(ours, "gpt2", torch.float16, "training", "overflow")
    deferred()
    assert train_two_batches(ours, "gpt2", torch.float16, "training", "overflow") == at_once
    few = reads()
    monkeypatch.setattr(scans, "_MOST_WAITING", most)
    assert train_two_batches(ours, "gpt2", torch.float16, "training", "overflow") == at_once
    assert reads() > few + 10


def test_no_tensor_is_kept_until_the_batch_ends(deferred):
    class Watches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            y = self.first(x)
            seen = weakref.ref(y)
            y = self.second(y)
            gc.collect()
            self.is_kept = seen() is not None
            return y

    deferred()
    model = Watches()
    with torch.no_grad():
        assert watched_by(ours, model, GOOD)[1] is None
    assert not model.is_kept


# ---- Errors of another kind ---------------------------------------------------------------------


class Fails(nn.Module):
    """Checks its values, like distributions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        y = self.linear(x)
        if y.isnan().any():
            raise KeyError("the user's own")
        return y


def test_an_error_that_leaves_the_forward_has_the_report_before_it(deferred):
    deferred()
    model = Fails()
    out = io.StringIO()
    with ours.DebugUnderflowOverflow(model) as debugger:
        with contextlib.redirect_stdout(out), pytest.raises(KeyError, match="the user's own") as caught:
            model(BAD)
        assert "Last 1 forward frames:\n" in out.getvalue() and "nan input[0]\n" in out.getvalue()
        (note,) = caught.value.__notes__
        assert note.startswith("nanlocator: before this, DebugUnderflowOverflow: inf/nan detected")
        assert debugger.detected_overflow
        model(GOOD)
        assert not debugger.detected_overflow


def test_an_error_of_a_healthy_forward_has_no_note(deferred):
    deferred()
    model = Fails()
    model.linear.register_forward_hook(lambda m, i, o: model.load_state_dict({"no": 1}))
    with ours.DebugUnderflowOverflow(model) as debugger:
        with pytest.raises(RuntimeError, match="Unexpected key") as caught:
            model(GOOD)
    assert not hasattr(caught.value, "__notes__") and debugger.batch_number == 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Fails()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("then", ["the next call", "remove", "leaving with an error", "frames"])
def test_what_a_call_outside_of_the_model_has_left_is_judged(deferred, then):
    """The end of the call is not seen if it raises."""
    deferred()
    model = nn.Sequential(Block())
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises((ValueError, KeyError)) as caught:
        with ours.DebugUnderflowOverflow(model) as debugger:
            if then == "leaving with an error":
                model[0](BAD)
            with contextlib.suppress(KeyError):
                model[0](BAD)
            assert out.getvalue() == ""
            if then == "the next call":
                model.register_forward_pre_hook(lambda m, args: pytest.fail("it has begun"))
                model(GOOD)
            elif then == "frames":
                assert debugger.frames
            elif then == "remove":
                debugger.remove()
            pytest.fail("went on")
    assert "0.inner.linear Linear\n" in out.getvalue() and out.getvalue().count("Detected inf/nan") == 1
    message = caught.value.__notes__[0] if then == "leaving with an error" else str(caught.value)
    assert "inf/nan detected" in message
    assert not model._forward_hooks and not model[0]._forward_hooks


# ---- Masks --------------------------------------------------------------------------------------


class Masks(nn.Module):
    def __init__(self, masks_more):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scores = Scores(masks_more)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask):
        return self.softmax(self.scores(self.linear(x), mask))


class Scores(nn.Module):
    def __init__(self, masks_more):
        super().__init__()
        self.masks_more = masks_more

    def forward(self, scores, mask):
        scores = scores.masked_fill(mask, -INF)
        return scores.index_fill(-1, torch.tensor([0]), -INF) if self.masks_more else scores


@pytest.mark.parametrize("masks_more", [True, False])
def test_infinities_that_only_the_elements_explain_are_judged_from_the_next_batch_on(deferred, masks_more):
    torch.manual_seed(1)
    model = Masks(masks_more)
    x, mask = torch.randn(4, 3), torch.tensor([[False, True, False]])

    def reported(batches):
        text, _ = watched_by(ours, model, *[lambda: model(x, mask)] * batches, max_frames_to_save=1)
        return text

    at_once = reported(1)
    assert (" scores Scores\n" in at_once) == masks_more
    deferred()
    assert reported(1) == ""
    assert reported(3) == at_once.replace("batch_number=0", "batch_number=1")


def test_an_additive_mask_is_known_as_such_without_its_elements(deferred):
    deferred()

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.inner = Exp()

        def forward(self, x, mask):
            return self.inner(self.linear(x), mask)

    class Exp(nn.Module):
        def forward(self, x, mask):
            return (x + mask).exp()

    model = Adds()
    mask = torch.tensor([[0.0, -INF]])
    assert watched_by(ours, model, *[lambda: model(GOOD, mask)] * 3)[1] is None
    assert reads() == 3
    assert "inf/nan detected" in watched_by(ours, model, lambda: model(GOOD, mask), count_masks=True)[1]


# ---- Several ranks ------------------------------------------------------------------------------


def run_until_notified(rank, size, folder, bad_ranks):
    import time

    _C.TensorScans = OfADevice
    model = five_layers()
    x = BAD if rank in bad_ranks else GOOD
    end = time.monotonic() + 30
    with contextlib.redirect_stdout(io.StringIO()), ours.DebugUnderflowOverflow(model, output_dir=folder):
        while time.monotonic() < end:
            try:
                model(x)
            except ValueError as error:
                return str(error)
    return ""


@pytest.mark.host
@pytest.mark.parametrize("bad_ranks", [[1], [0, 1]])
def test_ranks_tell_each_other(tmp_path, bad_ranks):
    errors = run_ranks(2, run_until_notified, str(tmp_path), bad_ranks)
    for rank, error in enumerate(errors):
        if rank in bad_ranks:
            assert f"This is rank {rank} of 2" in error and "0 Linear: input[0] has nans" in error
        else:
            assert "on another rank" in error and "rank 1 (host" in error
            text = (tmp_path / f"debug_rank{rank}.txt").read_text()
            assert "Stopped during batch_number=" in text and "4 Linear\n" in text


class Peers:
    """Another rank has a finding."""

    def __init__(self):
        self.finding = Finding(3, "a17", 0, "lm_head Linear: output has nans", "its report", "a file")

    def take_finding(self):
        finding, self.finding = self.finding, None
        return finding

    def publish(self, *_):
        assert self.finding is not None

    def close(self):
        pass


@pytest.mark.parametrize("x", [GOOD, BAD])
def test_a_rank_that_is_notified_in_the_middle_of_a_forward_shows_what_it_has_seen_in_it(deferred, x):
    deferred()
    model = five_layers()
    debugger = ours.DebugUnderflowOverflow(model)
    debugger._peers = Peers()
    model[1].register_forward_hook(lambda m, i, o: debugger._hear(debugger._peers.finding))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), debugger, pytest.raises(ValueError) as caught:
        model(x)
    own = out.getvalue().split("lm_head Linear: output has nans. Its frames are in a file\n", 1)[1]
    if x is BAD:
        assert "Detected inf/nan during batch_number=0" in own and "Last 1 forward frames:" in own
        assert "This is rank 0 of 1" in str(caught.value)
    else:
        assert "Stopped during batch_number=0: rank 3 (host a17)" in own and "Last 2 forward frames:" in own
        assert "detected on another rank" in str(caught.value)


# ---- A GPU --------------------------------------------------------------------------------------


def powers_of_two(depth):
    """Products and sums that no device rounds, until fp16 overflows in the second-to-last layer."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(depth)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(4).roll(1, 0) * 2)
    model = nn.Sequential(*layers, nn.ReLU(), nn.Tanh()).half()
    return model


WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


def waits_of(depth, batches):
    model = powers_of_two(depth).cuda()
    x = torch.ones(2, 4, dtype=torch.float16, device="cuda") / 2**depth
    with ours.DebugUnderflowOverflow(model):
        model(x)  # creates the slots
        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(batches):
                    model(x)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return sum(event.name in WAITS for event in profile.events())


class Doubled(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class Swapped(nn.Module):
    def forward(self, x):
        x.data = torch.full_like(x, NAN)
        return x


def test_what_one_module_hands_to_the_next_is_read_once(monkeypatch):
    read = []
    scan = scans.Scans.scan
    monkeypatch.setattr(
        scans.Scans, "scan", lambda self, tensor: (read.append(tensor), scan(self, tensor))[1]
    )
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Linear(3, 2))
    x = torch.randn(2, 3)
    with ours.DebugUnderflowOverflow(model):
        for batch in (1, 2):  # a later batch is read again: its memory may be the same
            model(x)
            passed = [tensor for tensor in read if not isinstance(tensor, nn.Parameter)]
            assert len(passed) == 5 * batch  # the input, and one output of each of four


@pytest.mark.parametrize("writer, row", [(Doubled(), "2.00e+00"), (Swapped(), "nan")])
def test_what_was_written_since_is_read_again(writer, row, capsys):
    model = nn.Sequential(nn.Identity(), writer)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    ours.DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(torch.ones(1))
    *_, output = (line for line in capsys.readouterr().out.splitlines() if line.endswith(" output"))
    assert row in output


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and _build_info.CUDA),
    reason="needs a GPU and a build with NANLOCATOR_CUDA",
)
def test_on_a_gpu_the_text_is_the_cpus_and_a_batch_waits_once():
    def run(device):
        model = powers_of_two(20).to(device)
        x = torch.tensor([[1.0, -2.0, 4.0, 8.0]], dtype=torch.float16, device=device)
        return watched_by(ours, model, x / 2**10, x, trace_batch_nums=[0], verbose=True)

    on_the_cpu = run("cpu")
    assert "Detected inf/nan during batch_number=1" in on_the_cpu[0]
    assert run("cuda") == on_the_cpu
    shallow, deep = waits_of(2, 5), waits_of(14, 5)
    assert shallow == deep  # no wait per tensor
    assert waits_of(2, 10) - shallow == 5
