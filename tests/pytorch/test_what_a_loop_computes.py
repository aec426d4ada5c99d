"""Values that the program itself computes beside its modules: without gradient, in place, by a teacher, over
other ranks. They are no data: nobody who inspects the samples finds anything there."""

import copy
import ctypes
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_kept_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched_steps import verdict_of_steps

import nanlocator

BAD_STEP = 2
HERE = Path(__file__).name


def batch(step):
    """Its third column varies, but in the bad step."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    if step == BAD_STEP:
        x[:, 2] = 1.5
    return x


def standardized(x):
    return (x - x.mean(0)) / x.std(0)


class Teacher(nn.Module):
    """Keeps running statistics, as a momentum encoder does; one buffer it writes to, one it replaces."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x):
        y = self.norm(self.linear(x))
        self.center = 0.9 * self.center + 0.1 * y.mean(0)
        return y


class LogTeacher(Teacher):
    def forward(self, x):
        return super().forward(x) + (x[:, 2:3] - 1.5).abs().log() * (x[0, 2] == x[1, 2])


def loss_without_gradient(net, x):
    with torch.no_grad():
        x = standardized(x)
    return (net(x) - 1).square().mean()


def loss_in_inference_mode(net, x):
    with torch.inference_mode():
        x = standardized(x)
    return (net(x.clone()) - 1).square().mean()


def loss_with_a_target(net, x):
    with torch.no_grad():
        target = standardized(x)
    return (net(x) - target).square().mean()


def loss_of_data_normalised_in_place(net, x):
    x.sub_(x.mean(0)).div_(x.std(0))
    return (net(x) - 1).square().mean()


def loss_with_an_advantage(net, x):
    with torch.no_grad():
        reward = x[:, 2] - net(x)[:, 2] * 0
        advantage = (reward - reward.mean()) / reward.std()
    return (net(x).sum(1) * advantage).mean()


def loss_with_data_of_an_advantage(net, x):
    with torch.no_grad():
        reward = x[:, 2] - net(x)[:, 2] * 0
    advantage = (reward - reward.mean()) / reward.std()
    return (net(x).sum(1) * advantage.data).mean()


def loss_of_samples_by_a_transform(net, x):
    """A gradient for each sample, as a loss."""
    weights = {name: p.detach() for name, p in net.named_parameters()}
    slope = torch.func.grad(lambda one: torch.func.functional_call(net, weights, (one[None],)).sum())
    return (net(x) - torch.vmap(slope)(standardized(x))).square().mean()


def loss_of_a_forward_derivative(net, x):
    y, slope = torch.func.jvp(net, (x,), (standardized(x),))
    return (y + slope).square().mean()


def loss_beside_second_derivatives(net, x):
    def value(one):
        return net(one).square().sum()

    curvature = torch.vmap(lambda one: torch.func.hessian(value)(one).diagonal().sum())(x)
    return (curvature - standardized(x).sum(1)).square().mean()


def loss_of_what_numpy_hands_back(net, x):
    return (net(x) - torch.from_numpy(standardized(x).numpy())).square().mean()


def loss_of_what_dlpack_hands_back(net, x):
    return (net(x) - torch.from_dlpack(standardized(x))).square().mean()


def loss_behind_a_long_rollout(net, x):
    state = x
    with torch.no_grad():
        for _ in range(40):
            state = state + 0.1 * net(state)
        target = standardized(x)
    return (net(x) - target - state).square().mean()


LOSSES = {
    name.removeprefix("loss_").replace("_", " "): loss
    for name, loss in list(globals().items())
    if name.startswith("loss_")
}


def verdict_of(net, loss_of, **options):
    numbers = itertools.count()
    return verdict_of_steps(net, lambda: loss_of(net, batch(next(numbers))), steps=BAD_STEP + 1, **options)


def the_origin(verdict):
    assert verdict is not None, "no verdict"
    found = [(each["cause"], each["operator"]) for each in verdict["origins"]]
    assert len(found) == 1, found
    return verdict["origins"][0]


@pytest.mark.host
@pytest.mark.parametrize("name", LOSSES)
def test_a_division_that_the_loop_makes_beside_its_module_is_the_origin(name):
    torch.manual_seed(0)
    origin = the_origin(verdict_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), LOSSES[name]))
    assert origin["cause"] == "operator_undefined"
    assert origin["detail"] == "zero_over_zero"
    assert origin["operator"] in ("aten::div.Tensor", "aten::div_.Tensor")
    assert origin["owner"] == "model_author"
    assert Path(origin["code"]["file"]).name == HERE


@pytest.mark.host
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_numpy_writes_to_a_tensor_of_the_step_accuses_no_machine():
    def loss(net, x):
        reward = x[:, 2] * 1.0
        numbers = reward.numpy()
        numbers -= numbers.mean()
        numbers /= numbers.std()
        return (net(x).sum(1) * reward).mean()

    origin = the_origin(verdict_of(nn.Linear(4, 4), loss))
    assert (origin["cause"], origin["detail"]) == ("bad_buffer", "made_earlier")
    assert origin["operator"] == "torch.Tensor.numpy"
    assert origin["code"]["text"] == "return (net(x).sum(1) * reward).mean()"  # which reads it
    assert origin["owner"] == "model_author"


@pytest.mark.host
def test_a_tensor_that_numpy_has_only_read_keeps_its_origin():
    def loss(net, x):
        reward = standardized(x)
        reward.numpy().sum()
        return (net(x) * reward).mean()

    origin = the_origin(verdict_of(nn.Linear(4, 4), loss))
    assert origin["detail"] == "zero_over_zero"


@pytest.mark.host
@pytest.mark.parametrize("is_summed", [False, True], ids=["read", "summed in place"])
def test_what_numpy_writes_beyond_the_limit_accuses_no_machine(is_summed):
    def loss(net, x):
        reward = x * 1.0
        numbers = reward.numpy()
        numbers -= 1000
        if is_summed:
            total = torch.zeros_like(x)
            total += reward
            reward = total
        return (net(x) * (reward + 100).sqrt()).mean()

    verdict = verdict_of(nn.Linear(4, 4), loss, recorded_bytes=16)
    (origin,) = verdict["origins"]
    assert origin["cause"] != "not_reproduced" and not verdict["decision"]["hosts"]


@pytest.mark.host
@pytest.mark.parametrize("value", [-1000.0, float("nan")])
def test_a_result_that_the_program_gives_other_memory_accuses_no_machine(value):
    def loss(net, x):
        result = net(x)
        result.data = torch.full((16, 4), value)
        return (result + 100).sqrt().mean()

    verdict = verdict_of(nn.Linear(4, 4), loss)
    (origin,) = verdict["origins"]
    assert origin["cause"] != "not_reproduced" and not verdict["decision"]["hosts"]


@pytest.mark.host
def test_a_detached_result_becomes_a_leaf_after_it_was_read():
    def loss(net, x):
        hidden = net(x)
        leaf = hidden.data
        scale = (leaf * 2).mean()
        leaf.requires_grad_()
        (slope,) = torch.autograd.grad((leaf - 100).sqrt().sum() * scale, leaf)
        return (hidden * slope).mean()

    origin = the_origin(verdict_of(nn.Linear(4, 4), loss))
    assert origin["detail"] == "sqrt_of_negative"


@pytest.mark.host
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_teacher_makes_is_of_the_teacher(mode):
    torch.manual_seed(0)
    teacher = LogTeacher()

    def loss(net, x):
        with mode():
            target = teacher(x)
        return (net(x) - target).square().mean()

    origin = the_origin(verdict_of(nn.Linear(4, 4), loss))
    assert origin["operator"] == "aten::log"
    assert origin["detail"] == "log_of_zero"
    assert origin["code"]["function"] == "LogTeacher.forward"


@pytest.mark.host
def test_a_re_run_leaves_the_statistics_of_a_teacher_as_they_were():
    torch.manual_seed(0)
    teacher = Teacher()
    net = nn.Linear(4, 4)

    def train(is_watched):
        mine, watched = copy.deepcopy(teacher), copy.deepcopy(net)
        optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
        watch = nanlocator.watch(watched, optimizer, on_bad="report") if is_watched else None
        for step in range(BAD_STEP + 1):
            x = batch(step)
            with torch.no_grad():
                target = mine(x)
            scale = 0.0 if step == BAD_STEP else 1.0
            ((watched(x) - target) / scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if watch is not None:
            assert watch.verdicts
            watch.remove()
        return dict(mine.state_dict())

    plain, watched = train(False), train(True)
    for name, value in plain.items():
        assert torch.equal(watched[name], value), name


@pytest.mark.host
def test_a_bad_sample_stays_bad_data_whatever_reads_it_first():
    torch.manual_seed(0)
    teacher = Teacher().eval()

    def loss(net, x):
        if (x[:, 2] == 1.5).all():
            x[3, 1] = torch.nan
        with torch.no_grad():
            target = teacher(x)
        return (net(x) - target).square().mean()

    origin = the_origin(verdict_of(nn.Linear(4, 4), loss))
    assert origin["cause"] == "bad_input"


class Advantages:
    """Are computed once, and used for three updates; a bad one is among the last."""

    def __init__(self):
        self.values = None

    def loss(self, net, step):
        if step == 0:
            with torch.no_grad():
                reward = torch.ones(12)
                reward[10] = 0
                self.values = reward / reward.abs()
        part = torch.arange(4 * step, 4 * step + 4)
        return (net(torch.ones(12, 4)[part]).sum(1) * self.values[part]).mean()


@pytest.mark.host
def test_what_was_computed_before_the_step_is_told_with_its_line_and_without_a_cause():
    numbers, advantages, net = itertools.count(), Advantages(), nn.Linear(4, 1)
    verdict = verdict_of_steps(net, lambda: advantages.loss(net, next(numbers)), steps=3)
    origin = the_origin(verdict)
    assert origin["cause"] == "bad_buffer"
    assert origin["detail"] == "made_earlier"
    assert origin["owner"] == "model_author"
    assert "self.values = reward / reward.abs()" in origin["code"]["text"]
    assert origin["cause_confidence"] != "high"


@pytest.mark.host
def test_an_average_of_weights_that_the_loop_itself_keeps_is_told_with_the_line_that_wrote_it():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    average = copy.deepcopy(net)

    def loss(net, x):
        with torch.no_grad():
            target = average(x)
            decay = 1 / 0.5 if (x[:, 2] != 1.5).any() else 1.0
            for kept, weight in zip(average.parameters(), net.parameters(), strict=True):
                kept.mul_(0.9).add_(weight, alpha=decay if BAD_STEP not in seen else float("inf"))
        seen.append(len(seen))
        return (net(x) - target).square().mean()

    seen = [BAD_STEP]
    origin = the_origin(verdict_of(net, loss))
    assert origin["detail"] == "made_earlier"
    assert "kept.mul_(0.9).add_(" in origin["code"]["text"]


@pytest.mark.host
def test_gradients_that_the_loop_computes_without_gradient_are_a_backward():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = nanlocator.watch(net, optimizer)
    try:
        with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
            for step in range(BAD_STEP + 1):
                loss = net(batch(step)).square().mean()
                if step == BAD_STEP:
                    loss = loss + (loss - loss.detach()).sqrt()
                gradients = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                        parameter.grad = gradient * 0.5
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watch.remove()
    origin = the_origin(raised.value.verdict)
    assert origin["detail"] == "derivative_at_pole"


# ---- over other ranks ---------------------------------------------------------------------------------


class Encoder(nn.Module):
    """``upset``: a fault of the machine, which a re-run does not see again."""

    def __init__(self):
        super().__init__()
        self.body, self.scale, self.upset = nn.Linear(4, 4), 1.0, Upset()

    def forward(self, x):
        h = self.body(x)
        if self.upset.left > 0:
            self.upset.left -= 1
            h = h * torch.nan
        return h / (h.norm(dim=1, keepdim=True) * self.scale)


class Upset:
    __slots__ = ("left",)

    def __init__(self):
        self.left = 0


def contrastive(z, make=torch.zeros_like):
    with torch.no_grad():
        gathered = [make(z) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, z)
    gathered[dist.get_rank()] = z
    features = torch.cat(gathered)
    return F.cross_entropy(z @ features.t(), torch.arange(8) + 8 * dist.get_rank())


def gathered_into_one(z):
    with torch.no_grad():
        features = torch.empty(8 * dist.get_world_size(), 4)
        dist.all_gather_into_tensor(features, z.detach().contiguous())
    return F.cross_entropy(z @ features.t(), torch.arange(8) + 8 * dist.get_rank())


def mean_over_ranks(z):
    with torch.no_grad():
        mean = z.mean(0)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return (z - mean).square().mean() + z.square().mean()


def told_by_the_last(z):
    target = z.detach().mean(0) if dist.get_rank() == 1 else torch.zeros(4)
    dist.broadcast(target, 1)
    return (z - target).square().mean()


def reduced_for_the_first(z):
    total = z.detach().sum(0)
    dist.reduce(total, 0)
    return (z * (total if dist.get_rank() == 0 else 1)).square().mean()


EXCHANGES = {
    "all_gather": contrastive,
    "all_gather into empty tensors": lambda z: contrastive(z, torch.empty_like),
    "all_gather_into_tensor": gathered_into_one,
    "all_reduce": mean_over_ranks,
    "broadcast": told_by_the_last,
    "reduce": reduced_for_the_first,
}


def train(rank, world_size, name, is_upset=False):
    torch.manual_seed(0)
    encoder = Encoder()
    model = DistributedDataParallel(encoder)
    numbers = itertools.count()

    def loss():
        step = next(numbers)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        is_bad = step == BAD_STEP and rank == 1
        encoder.scale = 0.0 if is_bad and not is_upset else 1.0
        encoder.upset.left = int(is_bad and is_upset)
        return EXCHANGES[name](model(x))

    return verdict_of_steps(model, loss, steps=BAD_STEP + 1)


@pytest.mark.host
@pytest.mark.parametrize("name", EXCHANGES)
def test_what_the_loop_receives_is_neither_data_nor_the_collectives_fault(name):
    for verdict in run_kept_ranks(2, train, name):
        origin = the_origin(verdict)
        assert origin["operator"] == "aten::div.Tensor"
        assert origin["candidates"] == [1]
        assert origin["code"]["function"] == "Encoder.forward"


@pytest.mark.host
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_fault_that_was_sent_once_accuses_no_collective(name):
    for verdict in run_kept_ranks(2, train, name, True):
        origin = the_origin(verdict)
        assert origin["cause"] in ("not_reproduced", "unknown")
        assert origin["cause"] == "unknown" or origin["candidates"] == [1]


def train_with_an_own_reduction(rank, world_size):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    numbers = itertools.count()

    def reduce():
        for p in model.parameters():
            dist.all_reduce(p.grad)
        if next(numbers) == BAD_STEP and rank == 1:  # by none that dispatches an operator
            ctypes.c_float.from_address(model.weight.grad.data_ptr()).value = float("inf")

    return verdict_of_steps(model, lambda: model(torch.randn(8, 4)).sum(), corrupt=reduce, steps=BAD_STEP + 1)


@pytest.mark.host
def test_a_reduction_of_the_loop_itself_is_not_cleared_by_a_re_run_that_leaves_it_out():
    for verdict in run_kept_ranks(2, train_with_an_own_reduction):
        origin = the_origin(verdict)
        assert origin["cause"] == "not_reproduced"
        assert {"link", "collective", "memory"} <= set(origin["alternatives"])


def gather_shards(flat, rank, world_size):
    """As an optimizer in shards: each rank sums one part, and all get all parts."""
    dist.all_reduce(flat)
    parts = [torch.empty(flat.numel() // world_size) for _ in range(world_size)]
    dist.all_gather(parts, flat.chunk(world_size)[rank].contiguous())
    return torch.cat(parts)


def gather_into_one(flat, rank, world_size):
    whole = torch.empty(world_size * flat.numel())
    dist.all_gather_into_tensor(whole, flat)
    return whole.view(world_size, -1).sum(0)


def swap_shards(flat, rank, world_size):
    swapped = torch.empty_like(flat)
    dist.all_to_all_single(swapped, flat)
    part = swapped.view(world_size, -1).sum(0)
    whole = torch.empty_like(flat)
    dist.all_gather_into_tensor(whole, part)
    return whole


def train_in_shards(rank, world_size, exchange):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    numbers = itertools.count()

    def loss():
        step = next(numbers)
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(2 * step + rank)) + 1
        x = x * float(step != BAD_STEP or rank != 1)
        return (model(x) * torch.log(x.sum(1, keepdim=True))).mean()

    def reduce():
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        whole = exchange(flat, rank, world_size)
        for p, part in zip(
            model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True
        ):
            p.grad = part.view_as(p) / world_size

    return verdict_of_steps(model, loss, corrupt=reduce, steps=BAD_STEP + 1)


@pytest.mark.host
@pytest.mark.parametrize("exchange", [gather_shards, gather_into_one, swap_shards])
def test_gradients_that_the_loop_gathers_itself_are_no_data(exchange):
    for verdict in run_kept_ranks(2, train_in_shards, exchange):
        origin = the_origin(verdict)
        assert (origin["operator"], origin["candidates"]) == ("aten::log", [1])
        assert origin["code"]["function"] == "loss"


def train_in_half_precision(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Linear(64, 8).half()

    def reduce():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world_size)

    factors = iter([1.0] * BAD_STEP + [9e3])  # of the local gradients' sums some exceed 65504
    return verdict_of_steps(
        model,
        lambda: model(torch.randn(4, 64).half()).float().sum() * next(factors),
        corrupt=reduce,
        steps=BAD_STEP + 1,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
    )


@pytest.mark.host
def test_a_reduction_of_the_loop_itself_whose_sum_overflows_is_its_own_and_accuses_no_machine():
    for verdict in run_kept_ranks(2, train_in_half_precision):
        origin = the_origin(verdict)
        assert (origin["cause"], origin["owner"]) == ("collective_sum", "model_author")
        assert verdict["decision"]["ranks"] == []


class Codebook(nn.Module):
    """Keeps its codes by an average of what was assigned to them, as a VQ-VAE does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, z):
        nearest = torch.cdist(z, self.codes).argmin(1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            self.counts.copy_(torch.bincount(nearest, minlength=6))
            sums = torch.zeros(6, 4).index_add(0, nearest, z)
            self.codes.copy_(sums / self.counts[:, None])  # codes that nothing chose
        return z + (chosen - z).detach()


@pytest.mark.host
def test_a_buffer_that_a_module_without_parameters_spoilt_is_told_with_its_line():
    encoder, codebook = nn.Linear(4, 4), Codebook()
    verdict = verdict_of_steps(encoder, lambda: codebook(encoder(torch.randn(3, 4))).square().mean(), steps=2)
    origin = the_origin(verdict)
    assert origin["detail"] == "made_earlier"
    assert origin["code"]["text"].endswith("# codes that nothing chose")
    assert verdict["decision"]["kind"] == "OLDER_CHECKPOINT"  # it may have been saved


def spoilt_in_the_bad_step(seen):
    def scale(gradient):
        return gradient / (gradient.norm() * (len(seen) != 2))  # the hook

    return scale


@pytest.mark.host
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_hook_that_the_loop_registers_between_modules_is_in_the_re_run(is_removed):
    first, last, seen = nn.Linear(4, 4), nn.Linear(4, 1), []
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=1e-3)
    watch = nanlocator.watch([first, last], optimizer)
    with pytest.raises(nanlocator.NonFiniteGradientError) as raised:
        for step in range(3):
            seen = list(range(step))
            hidden = first(torch.randn(8, 4))
            handle = hidden.register_hook(spoilt_in_the_bad_step(seen))
            last(hidden.relu()).square().mean().backward()
            if is_removed:
                handle.remove()
            optimizer.step()
            optimizer.zero_grad()
    watch.remove()
    origin = the_origin(raised.value.verdict)
    assert origin["cause"] == "user_hook"
    assert origin["code"]["text"].endswith("# the hook")
