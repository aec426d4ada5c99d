"""Steps of tools/gpu on Megatron-Core, DistributedDataParallel and FSDP: a fault in each case, and what the
verdict says of it; and healthy steps, each executed again, which change no bit.

One rank over NCCL (gloo on the CPU), and two over gloo that share the device.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcomes import Cases, standard_error
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanlocator
from nanlocator import LocatingOptimizer, NonFiniteGradientError

ROOT = Path(__file__).resolve().parents[2]
HEALTHY_STEPS = {"cuda": 20, "cpu": 6}
ELEMENT = 3
BAD_ELEMENT = 11  # of a weight
SECONDS_OF_TWO_RANKS = 60


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
    times = []

    def fault(x: torch.Tensor) -> torch.Tensor:
        times.append(None)
        x = x.clone()
        if len(times) == 1:
            x.data.view(-1)[ELEMENT] = math.nan
        return x

    return fault


def spoil_weight(weight: torch.Tensor) -> None:
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.detach().view(-1)[BAD_ELEMENT] = math.nan


# ---- what a verdict must say --------------------


def device_of_gpu(device: str) -> str:
    """As the driver says it, where it has a tool to ask."""
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
    """What of the verdict is compared, and what explains a difference."""
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
    outcome: dict[str, Any], verdict: dict[str, Any] | None, expected: dict[str, Any], device: str
) -> None:
    assert verdict is not None, "not found"
    found = origin_of(verdict)
    outcome["found"] = found
    expected = {"reproduced": True, "not_restored": [], "rank": 0, **expected}
    different = {
        key: f"{found[key]!r} instead of {value!r}" for key, value in expected.items() if found[key] != value
    }
    if not (found["device"] or "").startswith(device):
        different["device"] = f"{found['device']!r} instead of {device!r}"
    if found["candidates"] not in ([], [expected["rank"]]):
        different["candidates"] = found["candidates"]
    if expected["cause"].startswith("operator_") and not found["bundle"]:
        different["bundle"] = "none"
    assert not different, different


def check_report(outcome: dict[str, Any], run_dir: str) -> None:
    done = subprocess.run(["nanlocator", "report", run_dir], capture_output=True, text=True, timeout=60)
    outcome["report"] = done.stdout.strip().splitlines()[:1]
    assert done.returncode == 1, f"nanlocator report: {done.returncode} {done.stdout} {done.stderr}"


def check_healthy(
    outcome: dict[str, Any], alone: list[torch.Tensor], watched: list[torch.Tensor], verdicts: Any, said: str
) -> None:
    """Differences in bits are told apart: between the two trainings, and between a step and its repeat."""
    complaints = [line for line in said.splitlines() if re.search(r"nanlocator: step|other bits", line)]
    different = sum(not torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    outcome |= {"different_tensors": different, "complaints": complaints[:5]}
    assert not verdicts, f"false alarm: {[origin_of(verdict) for verdict in verdicts]}"
    assert not complaints, f"{len(complaints)} complaints of the re-run, the first: {complaints[0]}"
    assert not different, f"{different} of {len(alone)} tensors have other bits than without nanlocator"


def start_one_rank(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


# ---- megatron-faults --------------------


class MegatronPlaces:
    """Where faults act in a ``Training`` of Megatron-Core: the outputs of two layers' MLPs and the loss mask,
    in the second microbatch."""

    BAD_MICROBATCH = 1

    def __init__(self, training: Any, device: str) -> None:
        self.training, self.device = training, device
        self.faults: dict[int, Fault] = {}
        self.is_mask_empty = False
        self.microbatch = 0
        (chunk,) = training.chunks
        self.model = chunk.module.module
        for number, layer in enumerate(self.model.decoder.layers):
            self._wrap(number, layer.mlp)
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


def import_megatron_training(device: str) -> tuple[Any, Any]:
    """The benchmarks' Configuration and Training."""
    sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
    os.environ.setdefault("MEGATRON_ON", device)
    try:
        from megatron_training import Training
    except ImportError as error:
        raise SystemExit(f"Megatron-Core is not here ({error}); tools/gpu --pack brings it along") from None
    from plan_configurations import Configuration

    return Configuration, Training


def megatron_faults(device: str) -> dict[str, Any]:
    Configuration, Training = import_megatron_training(device)
    from megatron.core import parallel_state

    import nanlocator.megatron

    if device == "cuda":
        c = Configuration("small", 4, 512, 1024, 8, 8, 1024, 256, 1, 1, 1, 2)
    else:
        c = Configuration("tiny", 4, 64, 128, 4, 4, 256, 32, 1, 1, 1, 2)

    def make() -> MegatronPlaces:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        torch.manual_seed(0)
        training = Training(c)
        training.config.bias_dropout_fusion = False  # it is compiled: a minute of the device
        return MegatronPlaces(training, device)

    def weights(places: MegatronPlaces) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in places.model.parameters()]

    cases, where = Cases(), device_of_gpu(device)
    start_one_rank(device)
    with tempfile.TemporaryDirectory() as folder:

        def install(places: MegatronPlaces, name: str, **options: Any) -> Any:
            training, output = places.training, str(Path(folder) / name.replace(" ", "_"))
            return nanlocator.megatron.install(
                training.chunks, training.optimizer, output_dir=output, **options
            )

        with cases.case("healthy") as outcome:
            outcome["steps"] = steps = HEALTHY_STEPS[device]
            alone = make()
            for _ in range(steps):
                alone.training.step()
            watched = make()
            locator = install(watched, "healthy", rerun="always", on_bad="report")
            with standard_error() as printed:
                for _ in range(steps):
                    watched.training.step()
                said = printed()
            locator.remove()
            check_healthy(outcome, weights(alone), weights(watched), locator.verdicts, said)

        places = make()
        kept = weights(places)
        mlp = "decoder.layers.2.mlp"
        weight = f"{mlp}.linear_fc1.weight"
        in_microbatch = {"microbatch": places.BAD_MICROBATCH}

        def at(layer: int, fault: Fault) -> Callable[[], None]:
            return lambda: places.faults.update({layer: fault})

        def restore() -> None:
            places.faults.clear()
            places.is_mask_empty = False
            with torch.no_grad():
                for parameter, value in zip(places.model.parameters(), kept, strict=True):
                    parameter.copy_(value)

        def step_verdict() -> dict[str, Any] | None:
            try:
                places.training.step()
            except NonFiniteGradientError as error:
                return error.verdict
            return None

        def huge() -> None:
            places.model.get_parameter(weight).detach().mul_(1e25)

        plan: dict[str, tuple[Callable[[], None], dict[str, Any], dict[str, Any]]] = {
            "log of a negative": (
                at(2, log_of_negative),
                {},
                {"cause": "operator_undefined", "operator": "aten::log", "module": mlp, "phase": "forward"}
                | in_microbatch,
            ),
            "0/0 in a Function's backward": (
                at(1, _ZeroOverZeroInBackward.apply),
                {},
                {"cause": "operator_undefined", "operator": "aten::div", "module": "decoder.layers.1.mlp"}
                | {"phase": "backward"}
                | in_microbatch,
            ),
            "bad weight": (
                lambda: spoil_weight(places.model.get_parameter(weight)),
                {},
                {"cause": "bad_weight", "parameter": weight, "first_bad": BAD_ELEMENT},
            ),
            "bad scalar": (
                at(2, bad_scalar),
                {},
                {"cause": "bad_scalar", "operator": "aten::mul", "module": mlp, "phase": "forward"}
                | in_microbatch,
            ),
            "overwritten once": (
                at(2, overwritten_once()),
                {"level": "modules"},
                {"cause": "not_reproduced", "module": mlp, "reproduced": False} | in_microbatch,
            ),
            "overflow of bf16": (
                huge,
                {},
                {"cause": "operator_overflow", "operator": "aten::mul", "module": mlp, "phase": "forward"},
            ),
            "empty loss mask": (
                lambda: setattr(places, "is_mask_empty", True),
                {},
                {"cause": "empty_loss_mask", "phase": "loss"} | in_microbatch,
            ),
            "log of a negative, level operators": (
                at(2, log_of_negative),
                {"level": "operators"},
                {"cause": "operator_undefined", "operator": "aten::log", "module": mlp, "phase": "forward"}
                | in_microbatch,
            ),
        }
        for name, (plant, options, expected) in plan.items():
            with cases.case(name) as outcome:
                restore()
                locator = install(places, name.replace("/", "_"), on_bad="stop", **options)
                try:
                    places.training.step()
                    with torch.no_grad():
                        plant()
                    planted = weights(places)
                    verdict = step_verdict()
                finally:
                    locator.remove()
                outcome["bundles"] = cases.replay(name, Path(locator.run_dir))
                check_report(outcome, locator.run_dir)
                check(outcome, verdict, {"iteration": 2, **expected}, where)
                same = [
                    torch.equal(a.nan_to_num(), b.nan_to_num())
                    for a, b in zip(planted, weights(places), strict=True)
                ]
                assert all(same), "a weight moved"
        return cases.figures(device=where)


# ---- ddp-faults and fsdp-faults --------------------


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


def fsdp1(net: Net, device: str) -> nn.Module:
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    for number, block in enumerate(net.blocks):
        net.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True, device_id=where)
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=where)


class Loop:
    """Training of a ``Net``; ``wrap`` makes it parallel."""

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
        """Weights, as this rank has them, and a random number."""
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
        {"cause": "not_reproduced", "reproduced": False},
    ),
    "empty loss mask": (
        lambda loop: setattr(loop, "is_mask_empty", True),
        {"cause": "empty_loss_mask"},
    ),
}


def watched_verdict(loop: Loop, plant: Plant | None, **options: Any) -> tuple[dict[str, Any] | None, str]:
    """Of the second step, and the run's folder."""
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


Locate = Callable[..., tuple[dict[str, Any] | None, str]]


def locate(
    cases: Cases,
    name: str,
    loop: Callable[[], Loop],
    fault: tuple[Plant, dict[str, Any]],
    how: Locate,
    folder: Path,
    where: str,
    **options: Any,
) -> None:
    """At one rank."""
    plant, expected = fault
    with cases.case(name) as outcome:
        output = folder / re.sub(r"\W", "_", name)
        verdict, run_dir = how(loop(), plant, output_dir=str(output), **options)
        outcome["bundles"] = cases.replay(name, output)
        check(outcome, verdict, {"iteration": 2, **expected}, where)
        check_report(outcome, run_dir)


def healthy(cases: Cases, name: str, make: Callable[[], Loop], folder: Path) -> None:
    with cases.case(name) as outcome:
        alone = make()
        outcome["steps"] = steps = HEALTHY_STEPS[alone.device]
        for _ in range(steps):
            alone.step()
        expected = alone.state()
        loop = make()
        watch = nanlocator.watch(
            loop.model, loop.optimizer, rerun="always", on_bad="report", output_dir=str(folder / "healthy")
        )
        try:
            with standard_error() as printed:
                for _ in range(steps):
                    loop.step()
                said = printed()
        finally:
            watch.remove()
        check_healthy(outcome, expected, loop.state(), watch.verdicts, said)


def ddp_faults(device: str) -> dict[str, Any]:
    cases, where = Cases(), device_of_gpu(device)

    def make() -> Loop:
        return Loop(ddp, device)

    start_one_rank(device)
    with tempfile.TemporaryDirectory() as folder:
        healthy(cases, "healthy", make, Path(folder))
        for name, fault in LOOP_FAULTS.items():
            locate(cases, name, make, fault, watched_verdict, Path(folder), where)
        locate(
            cases, "closure, level operators", make, LOG, verdict_of_closure, Path(folder), where,
            level="operators",
        )  # fmt: skip
        with cases.case("two ranks") as outcome:
            outcome["ranks"] = two_ranks(device, Path(folder) / "two_ranks")
            assert len(outcome["ranks"]) == 2, "a rank has left nothing"
            wrong = [
                f"rank {rank}: {name}: {case.get('why')}"
                for rank, outcomes in enumerate(outcome["ranks"])
                for name, case in outcomes.items()
                if not case["shown"]
            ]
            assert not wrong, wrong
        return cases.figures(device=where)


def fsdp_faults(device: str) -> dict[str, Any]:
    cases, where = Cases(), device_of_gpu(device)

    def make() -> Loop:
        return Loop(fsdp2, device)

    def make_fsdp1() -> Loop:
        return Loop(fsdp1, device)

    start_one_rank(device)
    with tempfile.TemporaryDirectory() as folder:
        healthy(cases, "healthy", make, Path(folder))
        for name, fault in LOOP_FAULTS.items():
            locate(cases, name, make, fault, watched_verdict, Path(folder), where)
        for name, fault in (("log", LOG), ("backward", IN_BACKWARD)):
            locate(cases, f"closure, {name}", make, fault, verdict_of_closure, Path(folder), where)
        healthy(cases, "FSDP1, healthy", make_fsdp1, Path(folder) / "fsdp1")
        for name, fault in (("log", LOG), ("backward", IN_BACKWARD)):
            locate(cases, f"FSDP1, {name}", make_fsdp1, fault, watched_verdict, Path(folder), where)
        return cases.figures(device=where)


# ---- two ranks on one device --------------------


def two_ranks(device: str, folder: Path) -> list[dict[str, Any]]:
    """The outcomes of each rank's cases."""
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--local-addr", "127.0.0.1"]
    command = [*launcher, __file__, "--device", device, "--folder", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=SECONDS_OF_TWO_RANKS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    print(output.decode(errors="replace")[-12_000:], flush=True)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


CULPRIT = 1


def be_one_of_two(device: str, folder: Path) -> None:
    """Under torchrun; NCCL refuses two ranks on one GPU."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank, cases, where = dist.get_rank(), Cases(), device_of_gpu(device)

    def make() -> Loop:
        return Loop(ddp, device, rank)

    def leave() -> None:
        (folder / f"rank_{rank}.json").write_text(json.dumps(cases.outcomes))

    def on_culprit(plant: Plant) -> Plant | None:
        return plant if rank == CULPRIT else None

    healthy(cases, "healthy", make, folder / "healthy")
    leave()
    faults: dict[str, tuple[str, Locate, dict[str, Any]]] = {
        "watch": ("log of a negative", watched_verdict, {}),
        "watch, in backward": ("0/0 in a Function's backward", watched_verdict, {}),
        "watch, bad weight": ("bad weight", watched_verdict, {}),
        "watch, overwritten once": ("overwritten once", watched_verdict, {}),
        "closure, level operators": ("log of a negative", verdict_of_closure, {"level": "operators"}),
    }
    for name, (fault, how, options) in faults.items():
        plant, expected = LOOP_FAULTS[fault]
        with cases.case(name) as outcome:
            output = folder / re.sub(r"\W", "_", name)
            verdict, run_dir = how(
                make(), on_culprit(plant), output_dir=str(output), gather_deadline=10.0, **options
            )
            check(outcome, verdict, {"iteration": 2, **expected, "rank": CULPRIT}, where)
            if rank == 0:
                check_report(outcome, run_dir)
        leave()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of ddp-faults.")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    be_one_of_two(arguments.device, arguments.folder)


if __name__ == "__main__":
    main()
