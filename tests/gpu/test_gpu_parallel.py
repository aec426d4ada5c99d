"""Megatron-Core, DistributedDataParallel and FSDP: a fault and its verdict in each case; and healthy steps,
each re-run, which change no bit.

One rank over NCCL (gloo on the CPU), and two that share the device, over gloo and over NCCL.
"""

import contextlib
import datetime
import gc
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_machine import DEVICE, ROOT, host_waits, synchronize
from ranks import KeptRanks, RankServer, standard_error
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from unseen_count import UnseenCount

import nanlocator
from nanlocator import _C, LocatingOptimizer, NonFiniteGradientError

pytestmark = pytest.mark.slow
HEALTHY_STEPS = {"cuda": 20, "cpu": 6}
ELEMENT = 3
BAD_ELEMENT = 11  # of a weight
CULPRIT = 1  # of two ranks

NCCL = "nccl" if DEVICE == "cuda" else "gloo"
BACKENDS = ["gloo", "nccl"] if DEVICE == "cuda" else ["gloo"]

_server = RankServer("torch", on_gpu=DEVICE == "cuda")
# What FSDP has offloaded is reduced on the host.
_one = KeptRanks(_server, "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
_two = {backend: KeptRanks(_server, backend) for backend in BACKENDS}
_megatron = KeptRanks(RankServer("torch", on_gpu=DEVICE == "cuda"), NCCL)


def found(ranks: KeptRanks, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The result of each rank; a tuple if the rank raises."""
    results = ranks.run_ranks(world_size, on_one_gpu, function, *arguments)
    assert all(isinstance(result, dict) for result in results), results
    return results


def on_one_gpu(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function. NCCL accepts two ranks on one GPU if each says that it is on another host; they
    then talk over the loopback interface, some 10 ms for each collective."""
    os.environ |= {
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MAX_CTAS": "2",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
    }
    return function(rank, world_size, *arguments)


def on_one_gpu_alone(rank: int, world_size: int, port: int, program: Callable[..., None]) -> None:
    """The same for a program of RankServer.run_programs."""
    on_one_gpu(rank, world_size, program, port)


# ---- faults --------------------

Fault = Callable[[torch.Tensor], torch.Tensor]


def log_of_negative(x: torch.Tensor) -> torch.Tensor:
    argument = torch.full_like(x, math.e, memory_format=torch.contiguous_format)
    argument.view(-1)[ELEMENT] = -1.0
    return x * torch.log(argument)


def overflow_of_exp(x: torch.Tensor) -> torch.Tensor:
    exponent = torch.zeros_like(x, memory_format=torch.contiguous_format)
    exponent.view(-1)[ELEMENT] = 100.0
    return x * torch.exp(exponent)


def bad_scalar(x: torch.Tensor) -> torch.Tensor:
    return x * math.nan


class _ZeroOverZeroInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        count = torch.ones_like(gradient, memory_format=torch.contiguous_format)
        count.view(-1)[ELEMENT] = 0.0
        return gradient * (count / count)


def overwritten_once() -> Fault:
    times = UnseenCount()

    def fault(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if times.one_more() == 1:
            x.data.view(-1)[ELEMENT] = math.nan
        return x

    return fault


def spoil_weight(weight: torch.Tensor) -> None:
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.detach().view(-1)[BAD_ELEMENT] = math.nan


# ---- expected verdicts --------------------


def device_of_gpu(device: str) -> str:
    """As the driver reports it, if it has a tool."""
    if device == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    expected = rf"cuda:0 GPU-{properties.uuid} "
    with contextlib.suppress(OSError, ValueError):
        query = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
        (line,) = output.strip().splitlines()
        uuid, address = (part.strip() for part in line.split(","))
        expected = f"cuda:0 {uuid} {address[-12:].lower()}"
    return expected


def origin_of(verdict: dict[str, Any]) -> dict[str, Any]:
    """The compared parts of the verdict, and parts that explain a difference."""
    keys = ("cause", "module", "parameter", "phase", "direction", "microbatch", "candidates")
    origins = [
        {
            **{key: origin[key] for key in keys},
            "operator": (origin["operator"] or "").split(".")[0],
            "rank": (origin["coordinates"] or {}).get("rank"),
            "device": (origin["coordinates"] or {}).get("device"),
            "first_bad": (origin["tensor"] or {}).get("first_bad"),
            "bundle": bool(origin["bundle"]),
        }
        for origin in verdict["origins"]
    ]
    rerun = verdict["rerun"]
    assert len(origins) == 1, f"{len(origins)} origins: {origins} {rerun} {verdict['notes']}"
    return origins[0] | {
        "iteration": verdict["iteration"],
        "reproduced": rerun["reproduced"],
        "not_restored": rerun["not_restored"],
        "notes": verdict["notes"],
    }


def check(
    verdict: dict[str, Any] | None, run_dir: str, expected: dict[str, Any], device: str
) -> dict[str, Any]:
    """Returns the part that is recorded."""
    assert verdict is not None, "not found"
    found = origin_of(verdict)
    expected = {"iteration": 2, "reproduced": True, "not_restored": [], "rank": 0, **expected}
    different = {
        key: f"{found[key]!r}, not {value!r}" for key, value in expected.items() if found[key] != value
    }
    where = device_of_gpu(device)
    if not (found["device"] or "").startswith(where):
        different["device"] = f"{found['device']!r}, not {where!r}"
    if found["candidates"] not in ([], [expected["rank"]]):
        different["candidates"] = found["candidates"]
    if expected["cause"].startswith("operator_") and not found["bundle"]:
        different["bundle"] = "none"
    assert not different, different
    if expected["rank"] == 0 or dist.get_rank() == 0:
        report = subprocess.run(["nanlocator", "report", run_dir], capture_output=True, text=True, timeout=60)
        assert report.returncode == 1, (
            f"nanlocator report: {report.returncode} {report.stdout} {report.stderr}"
        )
    return {"operator": found["operator"], "cause": found["cause"], "notes": found["notes"]}


def check_healthy(alone: list[torch.Tensor], watched: list[torch.Tensor], verdicts: Any, said: str) -> None:
    """Distinguishes two kinds of different bits: between the trainings, and between a step and its re-run."""
    complaints = [line for line in said.splitlines() if re.search(r"nanlocator: step|other bits", line)]
    different = sum(not torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert not verdicts, f"false alarm: {[origin_of(verdict) for verdict in verdicts]}"
    assert not complaints, f"{len(complaints)} complaints of the re-run, the first: {complaints[0]}"
    assert not different, f"{different} of {len(alone)} tensors have other bits than without nanlocator"


# ---- DDP and FSDP --------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.fault: Fault | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(nn.functional.gelu(self.up(self.norm(x))))
        if self.fault is not None:
            hidden = self.fault(hidden)
        return x + nn.functional.dropout(hidden, 0.1, self.training)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Wrap = Callable[[Net, str], nn.Module]


def ddp(net: Net, device: str) -> nn.Module:
    return DistributedDataParallel(net, device_ids=[0] if device == "cuda" else None)


def fsdp2(net: Net, device: str) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def fsdp2_offloaded(net: Net, device: str) -> nn.Module:
    """Weights, gradients and optimizer are on the host; gradients are copied there asynchronously."""
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    for block in net.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(net, mesh=mesh, offload_policy=policy)


def fsdp1(net: Net, device: str) -> nn.Module:
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    for number, block in enumerate(net.blocks):
        net.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True, device_id=where)
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=where)


class Loop:
    """Trains a ``Net``; ``wrap`` makes it parallel."""

    def __init__(self, wrap: Wrap, device: str, rank: int = 0) -> None:
        torch.manual_seed(0)
        self.device, self.width = device, 512 if device == "cuda" else 32
        self.net = Net(self.width).to(device)
        self.block = self.net.blocks[2]
        self.model = wrap(self.net, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.is_mask_empty = False
        torch.manual_seed(100 + rank)

    def loss(self) -> torch.Tensor:
        x = torch.randn(64, self.width, device=self.device)
        mask = torch.full((64, 1), 0.0 if self.is_mask_empty else 1.0, device=self.device)
        return (self.model(x).float().square() * mask).sum() / mask.sum()

    def step(self) -> None:
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        """This rank's weights, and a random number."""
        weights = [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]
        return [*(weight.detach().clone() for weight in weights), torch.rand(1, device=self.device)]

    def spoil_weight(self) -> None:
        spoil_weight(self.block.down.weight)


Plant = Callable[[Loop], None]


def at_block(fault: Fault) -> Plant:
    return lambda loop: setattr(loop.block, "fault", fault)


def in_net(cause: str, operator: str, phase: str = "forward") -> dict[str, Any]:
    return {"cause": cause, "operator": operator, "module": "blocks.2", "phase": phase}


BAD_WEIGHT = {"cause": "bad_weight", "parameter": "blocks.2.down.weight", "first_bad": BAD_ELEMENT}
LOG = at_block(log_of_negative), in_net("operator_undefined", "aten::log")
IN_BACKWARD = at_block(_ZeroOverZeroInBackward.apply), in_net("operator_undefined", "aten::div", "backward")
LOOP_FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "log of a negative": LOG,
    "0/0 in a Function's backward": IN_BACKWARD,
    "overflow of exp": (at_block(overflow_of_exp), in_net("operator_overflow", "aten::exp")),
    "bad scalar": (at_block(bad_scalar), in_net("bad_scalar", "aten::mul")),
    "bad weight": (Loop.spoil_weight, BAD_WEIGHT),
    "overwritten once": (
        lambda loop: setattr(loop.block, "fault", overwritten_once()),
        {
            "cause": "unknown",
            "reproduced": False,
            "not_restored": ["what Net.forward and Block.forward may read of the loop, which had gone on"],
        },
    ),
    "empty loss mask": (
        lambda loop: setattr(loop, "is_mask_empty", True),
        {"cause": "empty_loss_mask"},
    ),
}
# A replica has executed the same code, with finite results.
BESIDE_A_REPLICA: dict[str, dict[str, Any]] = {
    "overwritten once": {"cause": "not_reproduced", "not_restored": []},
}


def watched_verdict(loop: Loop, plant: Plant | None, **options: Any) -> tuple[dict[str, Any] | None, str]:
    """The second step's verdict, and the run's folder."""
    watch = nanlocator.watch(loop.model, loop.optimizer, on_bad="stop", **options)
    try:
        loop.step()
        with torch.no_grad():
            if plant is not None:
                plant(loop)
        loop.step()
    except NonFiniteGradientError as error:
        return error.verdict, watch.run_dir
    finally:
        watch.remove()
    return None, watch.run_dir


def verdict_of_closure(loop: Loop, plant: Plant | None, **options: Any) -> tuple[dict[str, Any] | None, str]:
    optimizer = LocatingOptimizer(loop.optimizer, loop.model, on_bad="stop", **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    run_dir = optimizer._driver.run_dir
    try:
        optimizer.step(closure)
        with torch.no_grad():
            if plant is not None:
                plant(loop)
        optimizer.step(closure)
    except NonFiniteGradientError as error:
        return error.verdict, run_dir
    finally:
        optimizer.remove()
    return None, run_dir


WRAPS = {"ddp": ddp, "fsdp2": fsdp2, "fsdp2, offloaded": fsdp2_offloaded, "fsdp1": fsdp1}
WAYS = {
    "watch": (watched_verdict, {}),
    "closure": (verdict_of_closure, {}),
    "closure, level operators": (verdict_of_closure, {"level": "operators"}),
}
IN_BACKWARD_OR_NOT = ("log of a negative", "0/0 in a Function's backward")
CASES = [
    *(("ddp", "watch", name) for name in LOOP_FAULTS),
    ("ddp", "closure, level operators", "log of a negative"),
    *(("fsdp2", "watch", name) for name in LOOP_FAULTS),
    *(("fsdp2", "closure", name) for name in IN_BACKWARD_OR_NOT),
    *(("fsdp2, offloaded", "watch", name) for name in IN_BACKWARD_OR_NOT),
    *(("fsdp1", "watch", name) for name in IN_BACKWARD_OR_NOT),
]
CASES_OF_TWO = [
    *(
        (backend, "ddp", way, name)
        for backend in BACKENDS
        for way, name in [
            ("watch", "log of a negative"),
            ("watch", "0/0 in a Function's backward"),
            ("watch", "bad weight"),
            ("watch", "overwritten once"),
            ("closure, level operators", "log of a negative"),
        ]
    ),
    *((BACKENDS[-1], "fsdp2", "watch", name) for name in IN_BACKWARD_OR_NOT),
    (BACKENDS[-1], "fsdp1", "watch", "log of a negative"),
]


def healthy(rank: int, world_size: int, wrap: str) -> dict[str, Any]:
    alone = Loop(WRAPS[wrap], DEVICE, rank)
    steps = HEALTHY_STEPS[DEVICE]
    for _ in range(steps):
        alone.step()
    expected = alone.state()
    loop = Loop(WRAPS[wrap], DEVICE, rank)
    watch = nanlocator.watch(loop.model, loop.optimizer, rerun="always", on_bad="report")
    try:
        with standard_error() as printed:
            for _ in range(steps):
                loop.step()
            said = printed()
    finally:
        watch.remove()
    check_healthy(expected, loop.state(), watch.verdicts, said)
    return {"steps": steps}


def located(rank: int, world_size: int, wrap: str, way: str, name: str) -> dict[str, Any]:
    """The fault is on the last rank."""
    plant, expected = LOOP_FAULTS[name]
    if world_size > 1:
        expected = expected | BESIDE_A_REPLICA.get(name, {})
    locate, options = WAYS[way]
    culprit = world_size - 1
    loop = Loop(WRAPS[wrap], DEVICE, rank)
    verdict, run_dir = locate(loop, plant if rank == culprit else None, gather_deadline=10.0, **options)
    return check(verdict, run_dir, expected | {"rank": culprit}, DEVICE)


@pytest.mark.parametrize("wrap", WRAPS)
def test_healthy_steps_are_executed_again_bit_for_bit(wrap):
    found(_one, 1, healthy, wrap)


@pytest.mark.parametrize(("wrap", "way", "name"), CASES)
def test_a_fault_is_located(wrap, way, name, tmp_path, replays, record_property):
    (result,) = found(_one, 1, located, wrap, way, name)
    record_property("found", result)
    if LOOP_FAULTS[name][1]["cause"].startswith("operator_"):
        replays.start(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_healthy_steps_of_two_ranks_on_one_device_are_executed_again_bit_for_bit(backend):
    found(_two[backend], 2, healthy, "ddp")


@pytest.mark.parametrize(("backend", "wrap", "way", "name"), CASES_OF_TWO)
def test_a_fault_of_one_of_two_ranks_on_one_device_is_located(backend, wrap, way, name, record_property):
    record_property("found", found(_two[backend], 2, located, wrap, way, name)[0])


# ---- one of two ranks runs out of memory in the re-run --------------------


def fails_in_the_rerun(rank: int, world_size: int, port: int) -> None:
    """Rank 0 computes the NaN; rank 1 fails in its re-run."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Net(32).to(DEVICE)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, gather_deadline=10.0)
    batch, calls = torch.randn(8, 32, device=DEVICE), []
    if rank == 0:
        model.blocks[2].fault = log_of_negative

    def closure() -> torch.Tensor:
        calls.append(None)
        if rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("planted in the re-run of rank 1")
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad.cpu()
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient)
        return loss

    optimizer.step(closure)


def test_a_rank_that_fails_in_the_rerun_ends_in_time_and_the_nans_rank_is_named(tmp_path, record_property):
    started = time.monotonic()
    done = _server.run_programs(2, fails_in_the_rerun)
    record_property("seconds", round(time.monotonic() - started, 1))
    record_property("ledgers", len(list(tmp_path.rglob("ledger_*.jsonl"))))
    assert all(code != 0 for code, _, _ in done), done
    (verdict,) = (json.loads(path.read_text()) for path in tmp_path.rglob("verdict.json"))
    assert [0] in [origin["candidates"] for origin in verdict["origins"]], verdict


# ---- one of two ranks is killed while the other waits for it in NCCL --------------------


def dies_in_backward(rank: int, world_size: int, port: int) -> None:
    """Rank 1 computes a NaN and is killed before its gradients are reduced."""
    url = f"tcp://127.0.0.1:{port}"
    patience = datetime.timedelta(seconds=40)
    dist.init_process_group(NCCL, init_method=url, rank=rank, world_size=world_size, timeout=patience)
    loop = Loop(ddp, DEVICE, rank)
    nanlocator.watch(loop.model, loop.optimizer, gather_deadline=5.0)
    loop.step()
    if rank == CULPRIT:
        loop.block.fault = log_of_negative
        loop.block.down.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    loop.step()


def test_the_files_of_a_rank_that_waits_for_a_killed_one_name_it(tmp_path, record_property):
    started = time.time()
    (waiting, _, said), (killed, _, _) = _server.run_programs(2, on_one_gpu_alone, dies_in_backward)
    record_property("seconds", round(time.time() - started, 1))
    assert killed == -signal.SIGKILL and waiting != 0
    found = {path.name: round(path.stat().st_mtime - started, 1) for path in tmp_path.rglob("*.json*")}
    record_property("seconds of files", found)
    assert any(name.startswith("ledger_") and "dp0" in name for name in found), found
    verdicts = [json.loads(path.read_text()) for path in tmp_path.rglob("verdict*.json")]
    assert [CULPRIT] in [verdict["silent_ranks"] for verdict in verdicts], said


# ---- Megatron-Core --------------------


class MegatronPlaces:
    """Places for faults in a ``Training`` of Megatron-Core: the outputs of two layers' MLPs and the loss
    mask, in the second microbatch."""

    BAD_MICROBATCH = 1

    def __init__(self, training: Any, device: str) -> None:
        self.training, self.device = training, device
        self.faults: dict[int, Fault] = {}
        self.is_mask_empty = False
        self.microbatch = 0
        (chunk,) = training.chunks
        self.model = chunk.module.module
        for layer in self.model.decoder.layers:
            self._wrap(layer.layer_number - 1, layer.mlp)
        training._forward = self._forward

    def _wrap(self, number: int, mlp: nn.Module) -> None:
        inner = mlp.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output, bias = inner(*args, **kwargs)
            if number in self.faults and self.microbatch == self.BAD_MICROBATCH:
                output = self.faults[number](output)
            return output, bias

        mlp.forward = forward

    def _forward(self, data: Any, model: nn.Module) -> tuple[torch.Tensor, Any]:
        self.microbatch = next(data)
        c = self.training.c
        tokens = torch.arange(c.sequence, device=self.device).expand(1, c.sequence) % c.vocabulary
        is_empty = self.is_mask_empty and self.microbatch == self.BAD_MICROBATCH
        mask = torch.full((1, c.sequence), 0.0 if is_empty else 1.0, device=self.device)

        def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = (output.float() * mask).sum() / mask.sum()
            return loss, {"lm loss": loss.detach()}

        return model(tokens, tokens, None, labels=tokens), loss_of


def training(*sizes: Any, **more: Any) -> Any:
    """Constructs the benchmarks' Training of a ``Configuration``."""
    sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
    os.environ["MEGATRON_ON"] = DEVICE
    from megatron_training import Training, parallel_state
    from plan_configurations import Configuration

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    torch.manual_seed(0)
    return Training(Configuration(*sizes, **more))


LAYOUTS: dict[str, dict[str, Any]] = {  # of two ranks
    "TP": {"tp": 2, "pp": 1},
    "PP": {"tp": 1, "pp": 2},
    "DP": {"tp": 1, "pp": 1},
    "EP": {"tp": 1, "pp": 1, "ep": 2, "experts": 4},
}


def places(layout: str | None = None) -> MegatronPlaces:
    sizes = 4, 64, 128, 4, 4, 256, 32
    if layout:
        made = training(layout, *sizes, ranks=2, microbatches=2, **LAYOUTS[layout])
    else:
        sizes = (4, 512, 1024, 8, 8, 1024, 256) if DEVICE == "cuda" else sizes
        made = training("one rank", *sizes, ranks=1, tp=1, pp=1, microbatches=2)
    made.config.bias_dropout_fusion = False  # compiling it takes a minute of device time
    return MegatronPlaces(made, DEVICE)


def weights(of: MegatronPlaces) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in of.model.parameters()]


def installed(of: Any, **options: Any) -> Any:
    import nanlocator.megatron

    return nanlocator.megatron.install(of.chunks, of.optimizer, **options)


def healthy_megatron(rank: int, world_size: int, layout: str | None = None) -> dict[str, Any]:
    steps = 3 if layout else HEALTHY_STEPS[DEVICE]
    alone = places(layout)
    for _ in range(steps):
        alone.training.step()
    watched = places(layout)
    locator = installed(watched.training, rerun="always", on_bad="report")
    with standard_error() as printed:
        for _ in range(steps):
            watched.training.step()
        said = printed()
    locator.remove()
    check_healthy(weights(alone), weights(watched), locator.verdicts, said)
    return {"steps": steps}


MLP = "decoder.layers.2.mlp"
WEIGHT = f"{MLP}.linear_fc1.weight"
MICROBATCH = {"microbatch": MegatronPlaces.BAD_MICROBATCH}
LOG_IN_MLP = {
    "cause": "operator_undefined",
    "operator": "aten::log",
    "module": MLP,
    "phase": "forward",
} | MICROBATCH
MEGATRON_FAULTS: dict[str, tuple[Callable[[MegatronPlaces], Any], dict[str, Any], dict[str, Any]]] = {
    "log of a negative": (lambda of: of.faults.update({2: log_of_negative}), {}, LOG_IN_MLP),
    "0/0 in a Function's backward": (
        lambda of: of.faults.update({2: _ZeroOverZeroInBackward.apply}),
        {},
        {"cause": "operator_undefined", "operator": "aten::div", "module": MLP, "phase": "backward"}
        | MICROBATCH,
    ),
    "bad weight": (
        lambda of: spoil_weight(of.model.get_parameter(WEIGHT)),
        {},
        {"cause": "bad_weight", "parameter": WEIGHT, "first_bad": BAD_ELEMENT},
    ),
    "bad scalar": (
        lambda of: of.faults.update({2: bad_scalar}),
        {},
        {"cause": "bad_scalar", "operator": "aten::mul", "module": MLP, "phase": "forward"} | MICROBATCH,
    ),
    "overwritten once": (
        lambda of: of.faults.update({2: overwritten_once()}),
        {"level": "modules"},
        {"cause": "not_reproduced", "module": MLP, "reproduced": False} | MICROBATCH,
    ),
    "overflow of bf16": (
        lambda of: of.model.get_parameter(WEIGHT).detach().mul_(1e25),
        {},
        {"cause": "operator_overflow", "operator": "aten::mul", "module": MLP, "phase": "forward"},
    ),
    "empty loss mask": (
        lambda of: setattr(of, "is_mask_empty", True),
        {},
        {"cause": "empty_loss_mask", "phase": "loss"} | MICROBATCH,
    ),
    "log of a negative, level operators": (
        lambda of: of.faults.update({2: log_of_negative}),
        {"level": "operators"},
        LOG_IN_MLP,
    ),
}


def located_in_megatron(rank: int, world_size: int, name: str, layout: str | None = None) -> dict[str, Any]:
    return located_in(places(layout), rank, world_size, name)


def located_in(of: MegatronPlaces, rank: int, world_size: int, name: str) -> dict[str, Any]:
    """The fault is on the last rank."""
    plant, options, expected = MEGATRON_FAULTS[name]
    locator = installed(of.training, on_bad="stop", **options)
    verdict = None
    try:
        of.training.step()
        if rank == world_size - 1:
            with torch.no_grad():
                plant(of)
        planted = weights(of)
        of.training.step()
    except NonFiniteGradientError as error:
        verdict = error.verdict
    finally:
        locator.remove()
    moved = [
        a
        for a, b in zip(planted, weights(of), strict=True)
        if not torch.equal(a.nan_to_num(), b.nan_to_num())
    ]
    assert not moved, "a weight moved"
    return check(verdict, locator.run_dir, expected | {"rank": world_size - 1}, DEVICE)


@pytest.mark.megatron
def test_healthy_steps_of_megatron_are_executed_again_bit_for_bit():
    found(_megatron, 1, healthy_megatron)


@pytest.mark.megatron
@pytest.mark.parametrize("name", MEGATRON_FAULTS)
def test_a_fault_in_megatron_is_located(name, tmp_path, replays, record_property):
    (result,) = found(_megatron, 1, located_in_megatron, name)
    record_property("found", result)
    if MEGATRON_FAULTS[name][2]["cause"].startswith("operator_"):
        replays.start(tmp_path)


def test_the_bundles_of_these_faults_replay(replays, record_property):
    record_property("replays", replays.check())


CASES_OF_LAYOUTS = [
    *((layout, "log of a negative") for layout in LAYOUTS),
    ("TP", "overwritten once"),
    ("PP", "0/0 in a Function's backward"),
    ("DP", "bad weight"),
    ("DP", "overflow of bf16"),
]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_healthy_steps_of_two_ranks_of_megatron_are_executed_again_bit_for_bit(layout):
    found(_megatron, 2, healthy_megatron, layout)


@pytest.mark.in_turn(3)
@pytest.mark.megatron
@pytest.mark.parametrize(("layout", "name"), CASES_OF_LAYOUTS)
def test_a_fault_of_one_of_two_ranks_of_megatron_is_located(layout, name, record_property):
    record_property("found", found(_megatron, 2, located_in_megatron, name, layout)[0])


def bits(of: Any) -> str:
    digest = hashlib.sha256()
    for parameter in (p for chunk in of.chunks for p in chunk.parameters()):
        digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def large_training() -> Any:
    """1.2 B parameters on the GPU."""
    if DEVICE == "cuda":
        return training("1 B", 16, 2048, 8192, 16, 16, 32000, 4096, ranks=1, tp=1, pp=1, microbatches=2)
    return training("tiny", 2, 64, 128, 4, 4, 256, 32, ranks=1, tp=1, pp=1, microbatches=2)


def cost_of_megatron(rank: int, world_size: int) -> dict[str, Any]:
    """The bits after three steps without nanlocator and with it; then its cost, in turns."""
    alone = large_training()
    for _ in range(3):
        alone.step()
    bits_alone = bits(alone)
    del alone
    gc.collect()
    watched = large_training()
    locator = installed(watched)
    for _ in range(3):
        watched.step()
    bits_watched = bits(watched)
    before = _C.scan_work()
    watched.step()
    after = _C.scan_work()
    waits = {"with": host_waits(DEVICE, watched.step)}
    locator.remove()
    waits["without"] = host_waits(DEVICE, watched.step)

    def seconds() -> float:
        synchronize(DEVICE)
        started = time.perf_counter()
        for _ in range(3):
            watched.step()
        synchronize(DEVICE)
        return (time.perf_counter() - started) / 3

    ratios, alone_seconds = [], []
    for _ in range(5):
        alone_seconds.append(seconds())
        locator = installed(watched)
        watched.step()
        ratios.append(seconds() / alone_seconds[-1])
        locator.remove()
    return {
        "bits_are_equal": bits_watched == bits_alone,
        "step_seconds": sorted(alone_seconds)[2],
        "ratios": sorted(ratios),
        "host_waits": waits,
        "work": {name: after[name] - before[name] for name in after},
    }


@pytest.mark.megatron
@pytest.mark.timed
def test_a_step_of_megatron_has_the_same_bits_with_and_without(record_property):
    (figures,) = found(_megatron, 1, cost_of_megatron)
    for name, value in figures.items():
        record_property(name, value)
    assert figures["bits_are_equal"] and figures["work"]["launches"] > 0
