"""DistributedDataParallel: each rank's own gradients are scanned before reduction; results do not change."""

import ctypes
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, standard_error
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from watched_steps import verdict_of_closure

import nanlocator

VARIANTS = {
    "plain": {},
    "bucket_views": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused_parameters": {"find_unused_parameters": True},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "communication_hook": {},
    "no_sync": {},
    "two_backwards": {},
    "two_backwards_of_bucket_views": {"gradient_as_bucket_view": True},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x)).square().mean()


class Training:
    """One rank's training. ``fault(parameter)`` runs in backward, when a gradient of the head is ready."""

    def __init__(self, rank, variant, fault=lambda parameter: None):
        torch.manual_seed(0)
        self.rank, self.variant, self.steps = rank, variant, -1
        self.model = Net()
        self.model.head.weight.register_hook(lambda gradient: fault(gradient))
        self.ddp = DistributedDataParallel(self.model, **VARIANTS[variant])
        if variant == "communication_hook":
            self.ddp.register_comm_hook(None, fp16_compress_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(rank)

    def backward(self):
        self.ddp(torch.randn(6, 4)).backward()

    def step(self):
        self.steps += 1
        if self.variant == "no_sync":
            with self.ddp.no_sync():
                self.backward()
        if self.variant.startswith("two_backwards"):
            self.backward()
        self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        return [*(t.clone() for t in self.model.state_dict().values()), torch.rand(1)]


def healthy(rank, world_size, variant):
    alone = Training(rank, variant)
    for _ in range(3):
        alone.step()
    expected = alone.state()
    watched = Training(rank, variant)
    watch = nanlocator.watch(watched.ddp, watched.optimizer, rerun="always")
    with standard_error() as printed:
        for _ in range(3):
            watched.step()
        assert "other bits" not in printed()
    hooks = len(watch._adapter.own_gradients[0]._handles)
    watch.remove()
    assert all(torch.equal(a, b) for a, b in zip(expected, watched.state(), strict=True))
    assert not watched.model.head.bias._post_accumulate_grad_hooks
    assert not watched.model.head.bias._backward_hooks
    return hooks, watch.verdicts


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(variant):
    assert run_ranks(2, healthy, variant) == [(12, [])] * 2


def once_on_rank_1(rank, world_size, variant, call):
    calls = []

    def corrupt(gradient):
        calls.append(gradient)
        if rank == 1 and len(calls) == call:
            ctypes.c_float.from_address(gradient.data_ptr() + 8).value = math.nan

    return verdict_of_steps(Training(rank, variant, corrupt))


# The backward of step 2: its first, and its second if there is one.
BACKWARDS = [
    (variant, call)
    for variant in VARIANTS
    for call in ((3, 4) if variant.startswith(("no_sync", "two_backwards")) else (2,))
]


@pytest.mark.parametrize(("variant", "call"), BACKWARDS)
def test_a_fault_that_happens_once_names_its_rank_and_parameter(variant, call):
    for verdict in run_ranks(2, once_on_rank_1, variant, call):
        (origin,) = verdict["origins"]
        assert verdict["iteration"] == 2
        assert origin["coordinates"]["rank"] == 1 and origin["candidates"] in ([], [1])
        assert origin["parameter"].endswith("head.weight") and origin["tensor"]["first_bad"] == 2
        assert verdict["rerun"]["reproduced"] is False


def once_in_a_closure(rank, world_size):
    calls = []

    def corrupt(gradient):
        calls.append(gradient)
        if rank == 1 and len(calls) == 1:
            ctypes.c_float.from_address(gradient.data_ptr() + 8).value = math.nan

    training = Training(rank, "plain", corrupt)
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.model)
    return verdict_of_closure(optimizer, lambda: training.ddp(torch.ones(6, 4)))


def test_the_rank_is_named_with_a_closure_too():
    for verdict in run_ranks(2, once_in_a_closure):
        (origin,) = verdict["origins"]
        assert (origin["coordinates"]["rank"], origin["parameter"]) == (1, "head.weight")


def bad_data_on_rank_1(rank, world_size):
    training = Training(rank, "plain")
    nanlocator.watch(training.ddp, training.optimizer)
    training.step()
    batch = torch.randn(6, 4)
    if rank == 1:
        batch[3, 1] = math.nan
    training.ddp(batch).backward()
    try:
        training.optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


def test_bad_data_of_one_rank_is_that_ranks():
    for verdict in run_ranks(2, bad_data_on_rank_1):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["coordinates"]["rank"]) == ("bad_input", 1)
        assert verdict["rerun"]["reproduced"] is True


def opposite_infinities(rank, world_size):
    def large(gradient):
        if len(calls) == 1:
            gradient[0, 0] = 3e38
        calls.append(0)

    calls = []
    training = Training(rank, "plain", large)
    training.ddp.register_comm_hook(None, summing)
    nanlocator.watch(training.ddp, training.optimizer)
    try:
        for _ in range(2):
            training.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


def fault_in_a_hook(rank, world_size, where):
    training = Training(rank, "plain")

    def hook(_, bucket):
        is_bad, buffer = training.steps == 1, bucket.buffer()

        def received(done):
            (summed,) = done.value()
            if where == "after" and is_bad and rank == 1:
                summed = summed / summed.mul(0).norm()
            return summed / world_size

        if where == "before" and is_bad:
            buffer = buffer / buffer.mul(0).norm()
        return dist.all_reduce(buffer, async_op=True).get_future().then(received)

    training.ddp.register_comm_hook(None, hook)
    return verdict_of_steps(training)


def verdict_of_steps(training):
    nanlocator.watch(training.ddp, training.optimizer)
    try:
        for _ in range(3):
            training.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


@pytest.mark.parametrize(("where", "ranks"), [("before", [0, 1]), ("after", [1])])
def test_a_fault_in_a_communication_hook_is_the_hooks(where, ranks):
    for verdict in run_ranks(2, fault_in_a_hook, where):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["phase"]) == ("user_hook", "backward")
        assert origin["code"]["text"].startswith(("buffer = buffer /", "summed = summed /"))
        assert (origin["candidates"] or [origin["coordinates"]["rank"]]) == ranks
        assert "called in forward" not in verdict["narrative"]["place"]
        assert verdict["decision"]["hosts"] == []


def too_large_for_half(rank, world_size):
    training = Training(rank, "communication_hook", lambda gradient: gradient.mul_(1e7))
    return verdict_of_steps(training)


def test_an_overflow_in_pytorchs_communication_hook_is_that_of_its_conversion():
    for verdict in run_ranks(2, too_large_for_half):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["operator"]) == ("operator_overflow", "aten::_to_copy")


def data_under_a_hook_with_state(rank, world_size):
    training = Training(rank, "plain")
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    training.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    nanlocator.watch(training.ddp, training.optimizer)
    try:
        for step in range(5):
            batch = torch.randn(6, 4)
            batch[2, 1] = math.nan if step == 3 and rank == 1 else 0.0
            training.ddp(batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict, state.iter
    return None


def test_what_a_communication_hook_keeps_is_said_to_be_lost():
    for verdict, iteration in run_ranks(2, data_under_a_hook_with_state):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["coordinates"]["rank"]) == ("bad_input", 1)
        assert any("PowerSGDState.error_dict" in each for each in verdict["rerun"]["not_restored"])
        assert iteration == 4


def summing(_, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def test_a_sum_that_overflows_is_the_collectives():
    for verdict in run_ranks(2, opposite_infinities):
        (origin,) = verdict["origins"]
        assert origin["cause"] in ("collective_sum", "collective_result")
        assert origin["parameter"].endswith("head.weight")


def without_ddp(rank, world_size):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    model(torch.randn(6, 4)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return json.loads((Path(watch.run_dir) / "run.json").read_text())["not_covered"]


def test_where_the_program_reduces_by_itself_the_run_says_what_is_not_seen():
    for not_covered in run_ranks(2, without_ddp):
        assert "gradients before the program itself reduces them across ranks" in not_covered


def two_wrappers(rank, world_size, wrong):
    """A generator whose buckets are sent in every backward, and a critic that accumulates first."""
    torch.manual_seed(0)
    models = {"one": Net(), "other": Net()}
    ddps = {name: DistributedDataParallel(model) for name, model in models.items()}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    calls = []

    def corrupt(gradient):
        calls.append(gradient)
        if rank == 1 and len(calls) == 3:  # the second microbatch of step 2, or its only one
            ctypes.c_float.from_address(gradient.data_ptr() + 8).value = math.nan

    models[wrong].head.weight.register_hook(corrupt)
    nanlocator.watch(ddps, optimizers)
    try:
        for _ in range(3):
            ddps["one"](torch.randn(6, 4)).backward()
            with ddps["other"].no_sync():
                ddps["other"](torch.randn(6, 4)).backward()
            ddps["other"](torch.randn(6, 4)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


@pytest.mark.parametrize("wrong", ["one", "other"])
def test_of_two_wrappers_each_goes_by_its_own_synchronisation(wrong):
    for verdict in run_ranks(2, two_wrappers, wrong):
        (origin,) = verdict["origins"]
        assert (origin["coordinates"]["rank"], origin["parameter"]) == (1, f"{wrong}.head.weight")


def backward_before_the_closure(rank, world_size):
    """A warm-up is not scanned; the following steps are."""
    calls = []

    def corrupt(gradient):
        calls.append(gradient)
        if rank == 1 and len(calls) == 2:
            ctypes.c_float.from_address(gradient.data_ptr() + 8).value = math.nan

    training = Training(rank, "plain", corrupt)
    optimizer = nanlocator.LocatingOptimizer(training.optimizer, training.model)
    training.backward()
    verdict = verdict_of_closure(optimizer, lambda: training.ddp(torch.ones(6, 4)))
    optimizer.remove()
    assert not training.model.head.bias._post_accumulate_grad_hooks
    return verdict


def test_a_backward_outside_of_every_closure_does_not_end_the_watch():
    for verdict in run_ranks(2, backward_before_the_closure):
        (origin,) = verdict["origins"]
        assert (origin["coordinates"]["rank"], origin["parameter"]) == (1, "head.weight")


def bad_buffer_of_rank_0(rank, world_size, level):
    training = Training(rank, "plain")
    nanlocator.watch(training.ddp, training.optimizer, level=level)
    training.step()
    training.model.eval()  # batch norm uses its running mean, which rank 0 broadcasts before forward
    if rank == 0:
        training.model.body[1].running_mean[3] = math.nan
    training.ddp(torch.randn(6, 4)).backward()
    try:
        training.optimizer.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


@pytest.mark.parametrize("level", ["operators", "boundaries"])
def test_a_bad_buffer_that_is_broadcast_is_rank_0s(level):
    for verdict in run_ranks(2, bad_buffer_of_rank_0, level):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["parameter"]) == ("bad_buffer", "body.1.running_mean")
        assert origin["coordinates"]["rank"] == 0


def spoil(tensor, element):
    """Writes a NaN without an operator."""
    ctypes.c_float.from_address(tensor.data_ptr() + 4 * element).value = math.nan


class Damaged:
    """Rank 1's result of the second collective is wrong; with `always`, also those of later ones."""

    def __init__(self, rank, always):
        self.is_wrong_rank, self.always, self.calls = rank == 1, always, 0

    def __call__(self, tensor, element):
        self.calls += 1
        if self.is_wrong_rank and (self.calls == 2 or (self.always and self.calls > 2)):
            spoil(tensor, element)


def damaged_bucket(rank, world_size, always, level):
    training, damage = Training(rank, "plain"), Damaged(rank, always)

    def reduce(_, bucket):
        def received(done):
            (summed,) = done.value()
            damage(summed, 3)
            return summed

        return dist.all_reduce(bucket.buffer() / world_size, async_op=True).get_future().then(received)

    training.ddp.register_comm_hook(None, reduce)
    return train(training, level)


def damaged_broadcast(rank, world_size, always, level):
    training, damage = Training(rank, "plain"), Damaged(rank, always)
    training.model.eval()
    inner = dist._broadcast_coalesced

    def broadcast(*args):
        inner(*args)
        damage(training.model.body[1].running_mean, 3)

    dist._broadcast_coalesced = broadcast
    return train(training, level)


class Spoiling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer, is_wrong):
        if is_wrong:
            spoil(buffer, 3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


def spoilt_after_the_broadcast(rank, world_size, wrong_rank):
    training = Training(rank, "plain")
    training.model.eval()
    norm = training.model.body[1]
    norm.register_forward_pre_hook(
        lambda _, args: (Spoiling.apply(args[0], norm.running_mean, rank == wrong_rank),)
    )
    return train(training, "operators")


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_buffer_that_a_function_spoils_after_its_broadcast_is_no_fault_of_the_broadcast(wrong_rank):
    for verdict in run_ranks(2, spoilt_after_the_broadcast, wrong_rank):
        (origin,) = verdict["origins"]
        assert origin["coordinates"]["rank"] == wrong_rank
        assert origin["cause"] != "collective_result" and origin["operator"] == "Spoiling"


def train(training, level):
    nanlocator.watch(training.ddp, training.optimizer, level=level)
    try:
        for _ in range(3):
            training.step()
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict


def each_way(*usual, others):
    """Cases of (does the damage repeat, the watch's level): `usual` has each value, `others` the rest."""
    marked = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in others]
    return pytest.mark.parametrize(("always", "level"), [*usual, *marked])


@each_way((False, "operators"), (True, "boundaries"), others=[(False, "boundaries"), (True, "operators")])
def test_a_bucket_that_arrives_wrong_is_the_reductions(always, level):
    for verdict in run_ranks(2, damaged_bucket, always, level):
        (origin,) = verdict["origins"]
        # If the callback runs on a traced thread, its write is not part of the collective.
        assert origin["cause"] in ("collective_result", "memory_corruption")
        assert (origin["phase"], origin["coordinates"]["rank"]) == ("grad_reduced", 1)
        assert origin["parameter"]
        assert verdict["rerun"]["reproduced"] is always


@each_way((False, "boundaries"), (True, "operators"), others=[(True, "boundaries")])
def test_a_buffer_that_arrives_wrong_is_the_broadcasts(always, level):
    for verdict in run_ranks(2, damaged_broadcast, always, level):
        (origin,) = verdict["origins"]
        assert (origin["cause"], origin["operator"]) == ("collective_result", "c10d::broadcast_")
        assert (origin["phase"], origin["coordinates"]["rank"]) == ("forward", 1)
        assert verdict["rerun"]["reproduced"] is always


def watched_at_boundaries(rank, world_size):
    alone = Training(rank, "plain")
    for _ in range(3):
        alone.step()
    expected = alone.state()
    method = vars(DistributedDataParallel)["_default_broadcast_coalesced"]
    watched = Training(rank, "plain")
    watch = nanlocator.watch(watched.ddp, watched.optimizer, level="boundaries", rerun="always")
    for _ in range(3):
        watched.step()
    watch.remove()
    assert vars(DistributedDataParallel)["_default_broadcast_coalesced"] is method
    return all(torch.equal(a, b) for a, b in zip(expected, watched.state(), strict=True))


def test_buffers_are_followed_without_changing_a_bit():
    assert run_ranks(2, watched_at_boundaries) == [True, True]
