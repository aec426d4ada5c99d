"""Time of a healthy step with nanlocator relative to one without, and of other tools.

    tools/bench overhead [--hidden 256] [--sequence 128] [--ranks 2] [--tp 2] [--rounds 30] [--json]
    tools/bench overhead --integration pytorch [--batch 4] [--starts 10]
    tools/bench overhead --integration fsdp2|zero2|pipelining [--ranks 2] [--starts 10] [--clock cpu]
    tools/bench overhead --integration small [--rounds 25] [--steps 100]
    tools/bench overhead --instructions [--integration pytorch] [--against OTHER_BUILD/python]

All variants take turns in the same processes, on the same model. Megatron-Core: no tool, nanlocator with
its defaults (level boundaries), level grads, with check_params, and Megatron's check_for_nan_in_grad. Plain
PyTorch (GPT-2 of transformers, one CPU thread): no tool, nanlocator's levels, transformers'
DebugUnderflowOverflow, torch's anomaly mode. The same GPT-2 in shards (fully_shard; DeepSpeed's ZeRO-2) and
in a pipeline (torch.distributed.pipelining): no tool, nanlocator's defaults. A step is zero_grad, forward,
backward and optimizer.step; the figures are medians over rounds of this round's variant over this round's
bare step, with a 95 % interval; with --starts, medians over process starts of each start's median.

small: processor time of MLPs with 2 to 128 parameters with and without nanlocator.watch, and what it adds: a
constant, and a part for each parameter.

With --instructions: the instructions of a step without nanlocator and with its defaults, for each
integration, counted by callgrind; and the same with another build of nanlocator.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import instructions
import overhead_pytorch
import overhead_sharded
import overhead_small
import torchrun
import turns

VARIANTS: dict[str, dict | None] = {  # options of nanlocator.megatron.install, None: not installed
    "no tool": None,
    "nanlocator": {},
    "nanlocator, level grads": {"level": "grads"},
    "nanlocator, check_params": {"check_params": True},
    "Megatron's check_for_nan_in_grad": None,
}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_gpt"


def megatron_step(trainer: Any) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trainer.iteration += 1
    for chunk in trainer.model_chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=trainer.forward_step,
        data_iterator=trainer._data_iterator(),
        model=trainer.model_chunks,
        num_microbatches=trainer.config.num_microbatches,
        seq_length=trainer.config.sequence,
        micro_batch_size=trainer.config.micro_batch,
        forward_only=False,
    )
    trainer.optimizer.step()


def work(arguments: argparse.Namespace) -> None:
    """One rank, started by torchrun."""
    sys.path.insert(0, str(EXAMPLE))
    import torch.distributed as dist
    from gpt_training import Trainer, TrainingConfig
    from scenarios import PROCESS_GROUP_TIMEOUT, prepare_process

    import nanlocator.megatron

    prepare_process()
    dist.init_process_group("gloo", timeout=PROCESS_GROUP_TIMEOUT)
    trainer = Trainer(
        TrainingConfig(
            tp=arguments.tp,
            hidden=arguments.hidden,
            sequence=arguments.sequence,
            precision=arguments.precision,
        )
    )

    clock = time.perf_counter if arguments.clock == "wall" else time.process_time

    def step() -> float:
        dist.barrier()
        start = clock()
        megatron_step(trainer)
        dist.barrier()
        return clock() - start

    def run(variant: str) -> float:
        locator = None
        if (options := VARIANTS[variant]) is not None:
            locator = nanlocator.megatron.install(
                trainer.model_chunks,
                trainer.optimizer,
                output_dir=Path(arguments.directory) / "run",
                **options,
            )
        for chunk in trainer.model_chunks:
            chunk.ddp_config.check_for_nan_in_grad = variant.startswith("Megatron's")
        step()  # the first step of a variant makes plans and observes the order of backward
        seconds = statistics.median(step() for _ in range(arguments.steps))
        if locator is not None:
            locator.remove()
        return seconds

    times = turns.take_turns(VARIANTS, run, arguments.rounds)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in trainer.parameters.values())
        heading = (
            f"GPT hidden {arguments.hidden}, sequence {arguments.sequence}, {arguments.precision}, "
            f"{parameters / 1e6:.1f} M parameters a rank, {dist.get_world_size()} gloo ranks"
        )
        result = {"heading": heading, "parameters": parameters, "seconds": times}
        (Path(arguments.directory) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/bench overhead"
    )
    parser.add_argument(
        "--integration",
        choices=(*instructions.INTEGRATIONS, *overhead_sharded.INTEGRATIONS, "small"),
        help="default: megatron; with --instructions all that can. transformers is the Trainer, "
        "watch a plain loop under nanlocator.watch",
    )
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count the instructions of a step under callgrind, in place of its time; takes some minutes",
    )
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        help="with --instructions: the python folder of a build to compare with",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="Megatron-Core")
    parser.add_argument("--ranks", type=int, default=2, help="not of plain PyTorch")
    parser.add_argument("--tp", type=int, default=2, help="Megatron-Core")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: CPU time of rank 0, which other work on the machine disturbs less, and which sees no "
        "waiting; not of plain PyTorch",
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences a step; not of Megatron-Core")
    parser.add_argument(
        "--loss-outside", action="store_true", help="of the model, not in its forward; plain PyTorch"
    )
    parser.add_argument("--rounds", type=_count, default=12)
    parser.add_argument("--starts", type=_count, default=1, help="of the processes, each with all rounds")
    parser.add_argument("--steps", type=_count, help="of each variant in a round; default 3, of small 100")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = 100 if arguments.integration == "small" else 3
    if arguments.directory:
        workers = dict.fromkeys(overhead_sharded.INTEGRATIONS, overhead_sharded.work)
        workers |= {"pytorch": overhead_pytorch.work}
        workers.get(arguments.integration, work)(arguments)
        return
    if arguments.instructions and arguments.integration in (*overhead_sharded.INTEGRATIONS, "small"):
        parser.error(f"--instructions does not count {arguments.integration}")
    if arguments.instructions:
        instructions.main(arguments)
        return
    if arguments.integration == "small":
        overhead_small.main(arguments)
        return
    if arguments.against or arguments.integration in ("watch", "transformers"):
        parser.error("--against and --integration watch and transformers need --instructions")
    ranks = 1 if arguments.integration == "pytorch" else arguments.ranks
    results = torchrun.results_of_starts(__file__, ranks, arguments.starts)
    starts = f"{arguments.starts} starts of " if arguments.starts > 1 else ""
    turns.print_result(
        f"{results[0]['heading']}; {starts}{arguments.rounds} rounds of {arguments.steps} steps",
        [result["seconds"] for result in results],
        "no tool",
        as_json=arguments.json,
        parameters=results[0]["parameters"],
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    main()
