"""Faults among data-parallel ranks of which a verdict could accuse a collective that is innocent."""

import ctypes
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from ranks import run_kept_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanlocator

BAD_STEP = 1


class Net(nn.Module):
    """``sums``: adds up its activations over the ranks."""

    def __init__(self, sums):
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 1)
        self.factor, self.sums = 1.0, sums

    def forward(self, x):
        hidden = self.body(x)
        if self.sums:
            large = torch.zeros_like(hidden)
            large[0, 3] = self.factor
            hidden = differentiable.all_reduce(hidden + large)
        return self.head(hidden)


def added_up(_, bucket):
    """A communication hook that adds the ranks' gradients without dividing them before."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def shard(module, wrapper):
    if wrapper == "fsdp2":
        fully_shard(module.body)
        fully_shard(module)
        return module
    return DistributedDataParallel(module)


def local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def verdict_of(rank, world_size, fault, wrapper="ddp", level="grads"):
    """Trains with ``fault`` in step 1."""
    torch.manual_seed(0)
    net = Net(sums=fault == "sum of activations")
    model = shard(net, wrapper)
    if fault == "sum of gradients":
        model.register_comm_hook(None, added_up)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer, level=level)
    is_bad = [False]

    def grow(gradient):
        if is_bad[0] and fault == "sum of gradients":
            gradient = gradient.clone()
            gradient[0, 3] = 0.75 * torch.finfo(gradient.dtype).max
        return gradient

    handle = net.head.weight.register_hook(grow) if wrapper == "ddp" else None
    try:
        for step in range(3):
            is_bad[0] = step == BAD_STEP
            if is_bad[0] and fault == "sum of activations":
                net.factor = 0.75 * torch.finfo(torch.float32).max
            loss = model(torch.ones(6, 4)).square().mean()
            (loss * 1e22 if is_bad[0] and fault == "large gradients" else loss).backward()
            if is_bad[0] and fault == "factor":
                for parameter in model.parameters():
                    parameter.grad.mul_(math.inf)
            if is_bad[0] and fault == "overwritten" and rank == 1:
                memory = local(net.body.weight.grad).data_ptr()
                ctypes.c_float.from_address(memory).value = math.nan
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
        if handle is not None:
            handle.remove()


def the_origin(verdict):
    assert verdict is not None, "no verdict"
    found = [(each["cause"], each["phase"], each["candidates"]) for each in verdict["origins"]]
    assert len(found) == 1, found
    return verdict["origins"][0]


@pytest.mark.parametrize(
    ("fault", "phase"), [("sum of gradients", "grad_reduced"), ("sum of activations", "forward")]
)
def test_a_sum_that_overflows_in_one_element_is_no_fault_of_the_collective(fault, phase):
    for verdict in run_kept_ranks(2, verdict_of, fault):
        origin = the_origin(verdict)
        assert (origin["phase"], origin["candidates"]) == (phase, [0, 1])
        assert (origin["cause"], origin["owner"]) == ("collective_sum", "model_author")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_factor_of_all_reduced_gradients_is_one_origin(wrapper):
    for verdict in run_kept_ranks(2, verdict_of, "factor", wrapper):
        origin = the_origin(verdict)
        assert (origin["cause"], origin["operator"]) == ("bad_scalar", "aten::mul_.Tensor")


def test_a_norm_that_overflows_after_the_reduction_is_found_on_every_rank():
    for verdict in run_kept_ranks(2, verdict_of, "large gradients"):
        origin = the_origin(verdict)
        assert (origin["phase"], origin["cause"]) == ("grad_norm", "unknown")
        assert {fact["kind"] for fact in origin["facts"]} >= {"norm_bad", "norm_overflows"}


@pytest.mark.host
def test_a_gradient_that_is_overwritten_after_it_arrived_finite_is_no_result_of_its_reduction():
    for verdict in run_kept_ranks(2, verdict_of, "overwritten", "fsdp2", "boundaries"):
        origin = the_origin(verdict)
        assert (origin["phase"], origin["cause"]) == ("grad_norm", "not_reproduced")
        assert origin["candidates"] == [1]
        assert origin["facts"][0]["kind"] == "clean_after_reduction"
        assert "writer" in origin["alternatives"]


@pytest.mark.host
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_where_nobody_saw_the_sum_arrive_code_that_wrote_to_it_later_is_a_suspect(wrapper):
    for verdict in run_kept_ranks(2, verdict_of, "overwritten", wrapper, "grads"):
        origin = the_origin(verdict)
        assert "not_seen_on_arrival" in [fact["kind"] for fact in origin["facts"]]
        assert "writer" in origin["alternatives"]
        assert verdict["narrative"]["code"] == "reduced_wrong"


class Expert(nn.Module):
    """One expert on each rank, under one name."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        torch.manual_seed(rank)
        self.expert = nn.Linear(8, 1)

    def forward(self, x):
        return self.expert(torch.tanh(self.body(x)))


def bad_expert(rank, world_size):
    model = Expert(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nanlocator.watch(model, optimizer)
    try:
        for step in range(3):
            if step == BAD_STEP and rank == 1:
                ctypes.c_float.from_address(model.expert.weight.data_ptr() + 12).value = math.nan
            optimizer.zero_grad()
            model(torch.ones(6, 4)).square().mean().backward()
            for parameter in model.body.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


def test_weights_of_one_name_that_differ_are_no_copies():
    for verdict in run_kept_ranks(2, bad_expert):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["parameter"]) == ("bad_weight", "expert.weight")
        assert origin["coordinates"]["rank"] == 1
        kinds = [fact["kind"] for fact in origin["facts"]]
        assert "copies_clean" not in kinds and "no_copy_elsewhere" in kinds
        assert verdict["decision"]["hosts"] == []


class Slots:
    __slots__ = ("divisor",)


class Scheduled(nn.Module):
    """Divides by what the loop lowers after each backward, where nobody can compare it."""

    def __init__(self, schedule):
        super().__init__()
        self.linear, self.schedule = nn.Linear(4, 1), [[schedule]]

    def forward(self, x):
        return self.linear(x) / self.schedule[0][0].divisor


def train_by_a_schedule(rank, world_size):
    torch.manual_seed(0)
    schedule = Slots()
    schedule.divisor = 1.0
    model = DistributedDataParallel(Scheduled(schedule))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = nanlocator.watch(model, optimizer)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            schedule.divisor -= 1.0
            optimizer.step()
    except nanlocator.NonFiniteGradientError:
        return watch.verdicts[0]
    finally:
        watch.remove()


def test_replicas_that_are_bad_at_once_at_the_same_place_accuse_no_machine():
    for verdict in run_kept_ranks(2, train_by_a_schedule):
        assert verdict["iteration"] == 2 and verdict["rerun"]["reproduced"] is False
        assert {origin["cause"] for origin in verdict["origins"]} == {"unknown"}
        assert not verdict["decision"]["hosts"] and verdict["decision"]["traced"]
