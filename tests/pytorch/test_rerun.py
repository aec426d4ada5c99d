"""A bad step is re-run: which faults repeat, which are gone, and that no other state changes."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from behind_torch import write_behind
from ranks import run_ranks
from torch import nn
from watched_steps import verdict_of_closure

import nanlocator
from nanlocator import LocatingOptimizer, NonFiniteGradientError

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "verdict.schema.json").read_text())


class LogOfSquares(nn.Module):
    """log of a mean of squares: NaN gradients and an infinite value for rows of zeros."""

    def forward(self, x):
        return x.square().mean(-1, keepdim=True).log() + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.norm = LogOfSquares()
        self.head = nn.Linear(8, 2)
        self.gate = 1.0

    def forward(self, x):
        return self.head(self.norm(self.body(x) * self.gate))


def make(**options):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, LocatingOptimizer(optimizer, model, **options)


class Training:
    """A closure over its batch; `before_backward` and `after_backward` plant faults by call."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.batch = torch.randn(6, 4)
        self.calls = 0
        self.losses = []
        self.after_backward = lambda call: None

    def __call__(self):
        self.calls += 1
        self.optimizer.zero_grad()
        noise = random.random() + np.random.rand()
        loss = self.model(self.batch + noise).square().mean()
        loss.backward()
        self.after_backward(self.calls)
        self.losses.append(float(loss.detach()))
        return loss


def kinds(origin):
    """The kinds of an origin's facts."""
    return {fact["kind"] for fact in origin["facts"]}


def corrupt(tensor, index, value=float("nan")):
    """A bit error: no operator writes it."""
    write_behind(tensor, index, value)


def test_a_fault_that_repeats_names_operator_module_and_bundle():
    model, optimizer = make()
    training = Training(model, optimizer)
    optimizer.step(training)
    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(training)
    verdict = raised.value.verdict
    jsonschema.validate(verdict, SCHEMA)
    (origin,) = verdict["origins"]
    assert (origin["module"], origin["operator"], origin["direction"]) == ("norm", "aten::log", "forward")
    assert (origin["phase"], origin["cause"]) == ("forward", "operator_undefined")
    assert origin["tensor"]["first_bad_index"] == [0, 0] and origin["tensor"]["neg_inf"] == 6
    assert verdict["rerun"]["reproduced"] is True and verdict["rerun"]["not_restored"] == []
    assert kinds(origin) >= {"made_from_finite", "rerun_identical"}
    assert origin["code"]["file"].endswith("test_rerun.py")
    bundle = Path("nanlocator_run/a0") / origin["bundle"]
    assert {path.name for path in bundle.iterdir()} >= {"bundle.json", "tensors.safetensors"}
    content = json.loads((bundle / "bundle.json").read_text())
    assert any("at::" in line for line in content["cpp_stack"])
    assert content["birth"]["stack"][0].endswith("in forward")
    assert training.calls == 5  # first, bad, traced, memory filled, module calls


def test_the_bundle_holds_the_module_call_around_the_operator():
    model, optimizer = make()
    training = Training(model, optimizer)
    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(training)
    (origin,) = raised.value.verdict["origins"]
    call = nanlocator.replay.load(Path("nanlocator_run/a0") / origin["bundle"])
    (x,) = call.arguments
    assert x.shape == (6, 8) and not x.any()
    assert torch.isinf(call.outputs).all()
    again = call.bind(LogOfSquares())
    assert torch.equal(again().outputs, call.outputs)


def test_the_bundle_of_a_backward_fault_replays_and_holds_its_gradients():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.scale).sqrt()

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Root())
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].bias.copy_(torch.tensor([1.0, -1.0, 1.0]))  # the second is zero behind the ReLU
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).mean()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    (origin,) = raised.value.verdict["origins"]
    assert (origin["module"], origin["direction"], origin["phase"]) == ("2", "backward", "backward")
    assert origin["operator"].startswith("aten::div")
    assert origin["cause"] == "operator_undefined"
    call = nanlocator.replay.load(Path("nanlocator_run/a0") / origin["bundle"])
    assert torch.equal(call.grad_outputs[0], torch.full((2, 3), 1 / 6))
    assert not torch.isfinite(call.grad_inputs[0][:, 1]).any()
    assert torch.isfinite(call.grad_inputs[0][:, 0]).all()


def test_a_fault_that_is_gone_is_not_reproduced_and_accuses_nothing_with_high_confidence():
    model, optimizer = make()
    training = Training(model, optimizer)
    training.after_backward = lambda call: call == 1 and corrupt(model.head.weight.grad, 5)
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(training)
    verdict = raised.value.verdict
    jsonschema.validate(verdict, SCHEMA)
    (origin,) = verdict["origins"]
    assert (origin["parameter"], origin["cause"]) == ("head.weight", "not_reproduced")
    assert origin["confidence"] != "high"
    assert verdict["rerun"]["reproduced"] is False
    # First, traced, with fresh memory filled, control; on a GPU also one under the stream sanitizer.
    assert training.calls == (4 if torch.get_default_device().type == "cpu" else 5)
    assert kinds(origin) >= {"rerun_clean", "control_clean"}


def test_a_fault_that_hides_from_the_trace_is_told_from_one_that_is_gone():
    model, optimizer = make()
    training = Training(model, optimizer)
    training.after_backward = lambda call: call != 2 and corrupt(model.head.weight.grad, 5)
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(training)
    (origin,) = raised.value.verdict["origins"]
    assert "control_bad" in kinds(origin)


def test_a_gradient_that_is_corrupted_every_time_is_memory_corruption():
    model, optimizer = make()
    training = Training(model, optimizer)
    training.after_backward = lambda call: corrupt(model.head.weight.grad, 5)
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(training)
    (origin,) = raised.value.verdict["origins"]
    assert (origin["parameter"], origin["cause"]) == ("head.weight", "memory_corruption")
    assert origin["tensor"]["first_bad"] == 5


def run_training(steps, optimizer_of):
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    model, optimizer = optimizer_of()
    training = Training(model, optimizer)
    for _ in range(steps):
        optimizer.step(training)
    if isinstance(optimizer, LocatingOptimizer):  # at level operators, only one trace at a time
        optimizer.remove()
    states = [*model.state_dict().values(), torch.get_rng_state()]
    return states, training.losses, (random.getstate(), np.random.get_state()[1].tolist())


def plain():
    torch.manual_seed(1)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("options", [{"level": "operators"}, {"level": "modules"}, {"rerun": "always"}])
def test_every_level_and_a_repeat_of_every_step_leave_training_bit_identical(options, capfd):
    states, losses, generators = run_training(12, plain)
    watched_states, watched_losses, watched_generators = run_training(12, lambda: make(**options))
    assert all(torch.equal(a, b) for a, b in zip(states, watched_states, strict=True))
    assert watched_losses[:: 2 if options.get("rerun") == "always" else 1] == losses
    assert generators == watched_generators
    assert "other bits" not in capfd.readouterr().err


def test_state_that_is_not_put_back_is_noticed_by_the_repeat_of_every_step(capfd):
    model, optimizer = make(rerun="always")
    training = Training(model, optimizer)
    training.after_backward = lambda call: model.head.bias.grad.add_(call)
    optimizer.step(training)
    assert "1 gradients have other bits" in capfd.readouterr().err


def test_a_nan_loss_with_finite_gradients_is_found():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def closure():
        optimizer.zero_grad()
        labels = torch.full((5,), -100)  # all are ignored
        loss = nn.functional.cross_entropy(model(torch.ones(5, 4)), labels)
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    (origin,) = raised.value.verdict["origins"]
    assert origin["operator"].startswith("aten::nll_loss")
    assert (origin["phase"], origin["cause"]) == ("loss", "empty_loss_mask")


def test_a_loss_scaler_is_put_back_before_the_repeat():
    torch.manual_seed(1)
    model = Net()
    # Below 1: no routine overflow any more.
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=0.5)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, grad_scaler=scaler)
    batch = torch.randn(6, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # raises if it was called in this step already
        return loss

    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    verdict = raised.value.verdict
    assert verdict["rerun"]["reproduced"] is True and verdict["rerun"]["not_restored"] == []
    assert verdict["origins"][0]["operator"] == "aten::log"


class Sampler:
    """Draws batches in order; a batch of zeros makes the step bad."""

    def __init__(self):
        self.position = 0

    def draw(self):
        self.position += 1
        return torch.zeros(6, 4) if self.position == 3 else torch.full((6, 4), float(self.position))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_registered_sampler_repeats_the_batch(is_registered):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), LogOfSquares())
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    sampler = Sampler()
    if is_registered:
        optimizer.register_state("the sampler", sampler)

    def closure():
        optimizer.zero_grad()
        loss = model(sampler.draw()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    rerun = raised.value.verdict["rerun"]
    assert rerun["reproduced"] is is_registered


def test_state_that_cannot_be_put_back_is_named():
    class Broken(Sampler):
        def load_state_dict(self, state):
            raise OSError("the stream cannot seek")

    model, optimizer = make()
    optimizer.register_state("the stream", Broken())
    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(Training(model, optimizer))
    (problem,) = raised.value.verdict["rerun"]["not_restored"]
    assert "the stream" in problem and "cannot seek" in problem


def test_without_a_closure_the_next_bad_step_is_traced_and_the_verdict_says_so():
    model, optimizer = make(on_bad="report")
    training = Training(model, optimizer)
    model.gate = 0.0
    training()
    optimizer.step()
    first = optimizer.verdicts[0]
    assert not first["rerun"]["done"] and first["origins"][0]["operator"] is None
    assert any("without a closure" in note for note in first["notes"])
    for parameter in model.parameters():  # Adam has made them NaN
        nn.init.normal_(parameter)
    training()
    optimizer.step()
    (origin,) = optimizer.verdicts[1]["origins"]
    assert (origin["module"], origin["operator"]) == ("norm", "aten::log")
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"  # the hooks are off again


def test_level_operators_names_the_operator_without_a_closure():
    model, optimizer = make(level="operators")
    training = Training(model, optimizer)
    model.gate = 0.0
    training()
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step()
    (origin,) = raised.value.verdict["origins"]
    assert (origin["module"], origin["operator"]) == ("norm", "aten::log")
    optimizer.remove()
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_level_modules_names_the_module_without_a_repeat():
    model, optimizer = make(level="modules", rerun=False)
    training = Training(model, optimizer)
    optimizer.step(training)
    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(training)
    (origin,) = raised.value.verdict["origins"]
    assert (origin["module"], origin["direction"], origin["operator"]) == ("norm", "forward", None)
    assert training.calls == 2
    optimizer.remove()


def test_nan_from_adam_with_clean_gradients_is_the_optimizers():
    model, optimizer = make(level="operators", check_params=True)
    training = Training(model, optimizer)
    training()
    optimizer.step()
    optimizer.state[model.head.weight]["exp_avg_sq"][1, 2] = -1.0  # its root is NaN
    training()
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step()
    (origin,) = raised.value.verdict["origins"]
    assert (origin["phase"], origin["direction"]) == ("params_after", "none")
    assert origin["cause"] in ("optimizer_update", "optimizer_state")
    assert "sqrt" in origin["operator"]
    assert origin["parameter"] == "head.weight"
    optimizer.remove()


def test_a_repeat_that_fails_costs_neither_verdict_nor_training():
    model, optimizer = make(on_bad="report")
    training = Training(model, optimizer)
    model.gate = 0.0

    def fail_when_repeated(call):
        if call > 1:
            raise RuntimeError("the file is gone")

    training.after_backward = fail_when_repeated
    optimizer.step(training)
    (verdict,) = optimizer.verdicts
    assert verdict["rerun"]["done"] and verdict["rerun"]["reproduced"] is None
    assert any("the file is gone" in note for note in verdict["notes"])
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_interrupt_in_the_repeat_ends_it_at_once():
    model, optimizer = make()
    training = Training(model, optimizer)
    model.gate = 0.0

    def interrupt(call):
        if call > 1:
            raise KeyboardInterrupt

    training.after_backward = interrupt
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(training)
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_a_bundle_that_cannot_be_written_leaves_a_note_and_training_goes_on():
    model, optimizer = make(on_bad="report")
    Path("nanlocator_run/a0/bundles").write_text("in the way")
    model.gate = 0.0
    optimizer.step(Training(model, optimizer))
    (verdict,) = optimizer.verdicts
    (origin,) = verdict["origins"]
    assert (origin["operator"], origin["bundle"]) == ("aten::log", None)
    assert any("bundle" in note for note in verdict["notes"])


def test_lbfgs_repeats_the_evaluation_that_was_bad():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), LogOfSquares())
    optimizer = LocatingOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), model)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        x = model[0](torch.ones(2, 4)) * (0.0 if len(calls) >= 3 else 1.0)
        loss = model[1](x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(closure)
    assert raised.value.verdict["origins"][0]["operator"] == "aten::log"


def verdict_of_a_step(model, rank, divides_by_zero):
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def loss():
        torch.manual_seed(rank)
        total = model(torch.randn(3, 4)).square().sum()
        return total / (0.0 * total.detach() if divides_by_zero else 3.0)

    return verdict_of_closure(optimizer, loss)


def one_rank_divides_by_zero(rank, world_size):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    return verdict_of_a_step(model, rank, divides_by_zero=rank == 1)


@pytest.mark.host
def test_over_ranks_the_repeat_accuses_the_rank_where_it_was_born():
    verdicts = run_ranks(2, one_rank_divides_by_zero)
    assert verdicts[0] == verdicts[1]
    (origin,) = verdicts[0]["origins"]
    assert origin["coordinates"]["rank"] == 1
    assert origin["operator"] == "aten::div.Tensor" and origin["phase"] == "loss"
    assert verdicts[0]["rerun"]["reproduced"] is True


def sharded_model_fails(rank, world_size, what):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    if rank == 1 and what == "weight":
        with torch.no_grad():
            model[2].weight.to_local()[0, 1] = math.nan
    return verdict_of_a_step(model, rank, divides_by_zero=rank == 1 and what == "loss")


@pytest.mark.host
@pytest.mark.parametrize("what", ["weight", "loss"])
def test_a_model_in_shards_is_scanned_where_the_shards_are(what):
    verdicts = run_ranks(2, sharded_model_fails, what)
    assert verdicts[0] == verdicts[1]
    (origin,) = verdicts[0]["origins"]
    assert origin["candidates"] == [1]
    assert verdicts[0]["rerun"]["reproduced"] is True
    if what == "weight":
        assert (origin["cause"], origin["parameter"]) == ("bad_weight", "2.weight")
        assert origin["tensor"]["first_bad"] == 5  # of the whole: element 1 of the shard that begins at 4
    else:
        assert (origin["phase"], origin["operator"]) == ("loss", "aten::div.Tensor")


@pytest.mark.parametrize("value", ["perhaps", 3])
def test_an_unknown_rerun_option_is_refused(value):
    with pytest.raises(nanlocator.UsageError, match="rerun"):
        make(rerun=value)


def test_an_unknown_level_is_refused_with_the_known_ones():
    with pytest.raises(nanlocator.UsageError, match="'grads', 'boundaries', 'modules', 'operators'"):
        make(level="everything")


def test_the_command_replays_the_bundle_that_the_verdict_names():
    model, optimizer = make()
    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError) as raised:
        optimizer.step(Training(model, optimizer))
    (origin,) = raised.value.verdict["origins"]
    bundle = Path("nanlocator_run/a0") / origin["bundle"]
    done = subprocess.run(
        [sys.executable, "-m", "nanlocator.replay", str(bundle), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr  # bad again: a finding
    report = json.loads(done.stdout)
    assert report["conclusion"] == "deterministic_undefined" and report["is_bit_exact"]


def test_recover_goes_on_as_if_the_fault_had_never_been():
    def train(plant, **options):
        random.seed(7)
        np.random.seed(7)
        model, optimizer = make(**options)
        training = Training(model, optimizer)
        if plant:
            training.after_backward = lambda call: corrupt(model.head.weight.grad, 1) if call == 2 else None
        losses = [optimizer.step(training).item() for _ in range(3)]
        return losses, [p.detach().clone() for p in model.parameters()], optimizer.verdicts, random.random()

    healthy = train(False)
    recovered = train(True, on_bad="recover")
    assert recovered[0] == healthy[0]
    assert all(torch.equal(a, b) for a, b in zip(recovered[1], healthy[1], strict=True))
    assert recovered[3] == healthy[3]
    (verdict,) = recovered[2]
    assert verdict["rerun"]["reproduced"] is False


def test_recover_stops_where_the_fault_repeats():
    model, optimizer = make(on_bad="recover")
    model.gate = 0.0
    with pytest.raises(NonFiniteGradientError):
        optimizer.step(Training(model, optimizer))


@pytest.mark.parametrize("with_closure", [True, False])
def test_skip_leaves_the_bad_update_out_and_goes_on(with_closure):
    model, optimizer = make(on_bad="skip")
    training = Training(model, optimizer)

    def step():
        if with_closure:
            return optimizer.step(training)
        training()
        norm = optimizer.clip_grad_norm(1.0)
        optimizer.step()
        return norm

    step()
    before = [p.detach().clone() for p in model.parameters()]
    model.gate = 0.0
    step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.gate = 1.0
    step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [verdict["iteration"] for verdict in optimizer.verdicts] == [2]


def test_beside_an_overflow_stand_the_maxima_of_its_weight_in_the_steps_before(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = LocatingOptimizer(inner, model, output_dir=tmp_path / "run", check_params=True)
    batch = torch.ones(2, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    largest = model[0].weight.abs().max().item()
    for _ in range(3):
        optimizer.step(closure)
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    with pytest.raises(NonFiniteGradientError) as stopped:
        optimizer.step(closure)
    (origin,) = stopped.value.verdict["origins"]
    (maxima,) = (fact for fact in origin["facts"] if fact["kind"] == "weight_maxima")
    assert maxima["parameter"] == "0.weight"
    assert [each["value"] for each in maxima["values"]] == pytest.approx([largest] * 3)
