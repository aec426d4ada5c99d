"""Trains the small GPT on this rank; start it with torchrun.

    torchrun --standalone --nproc-per-node 8 examples/megatron_gpt/run_training.py --tp 2 --pp 2 --steps 10 \\
        --precision bf16 --distributed-optimizer --nanlocator --on-bad report \\
        --fault main_grad_element rank=5 iteration=4 value=nan --output results

Each rank writes `rank{N}.json` into --output (scenarios.py describes it). A rank that ends by an exception
writes it there, prints it, and still exits with 0: torchrun would otherwise terminate the other ranks before
they have written theirs. Look at "error" in the results, not at the exit code.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import torch.distributed as dist
from faults import FAULTS
from scenarios import PROCESS_GROUP_TIMEOUT, Scenario, prepare_process, run_rank


def main() -> int:
    arguments = _parse_arguments()
    scenario = Scenario(
        name="run_training",
        ranks=int(os.environ["WORLD_SIZE"]),
        steps=arguments.steps,
        training=_training_fields(arguments),
        nanlocator=_nanlocator_options(arguments) if arguments.nanlocator else None,
        faults=[parse_fault(words) for words in arguments.fault],
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    prepare_process()
    dist.init_process_group("gloo", timeout=PROCESS_GROUP_TIMEOUT)
    result = run_rank(scenario, arguments.output)
    if result["error"] is None:
        if dist.get_rank() == 0:
            for record in result["records"]:
                print("step {iteration:3d}  loss {loss:.4f}  norm {grad_norm}".format(**record))
        dist.destroy_process_group()
    return 0


def parse_fault(words: list[str]) -> dict:
    """["bad_weight", "rank=3", "value=nan"] as the dictionary that Scenario.faults holds."""
    fault: dict = {"name": words[0]}
    for word in words[1:]:
        key, _, value = word.partition("=")
        try:
            fault[key] = int(value)
        except ValueError:
            try:
                fault[key] = float(value)
            except ValueError:
                fault[key] = None if value == "none" else value
    return fault


def _parse_arguments() -> argparse.Namespace:
    faults = "\n".join(f"  {name:24} {fault.description}" for name, fault in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="faults:\n" + faults,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model and parallelism")
    for name, default in {"tp": 1, "pp": 1, "layers": 4, "hidden": 128, "heads": 4, "sequence": 64}.items():
        model.add_argument(f"--{name}", type=int, default=default)
    model.add_argument("--vp", type=int, help="model chunks per pipeline stage")
    model.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    model.add_argument("--cp-comm-type", choices=["all_gather", "a2a", "p2p"], default="all_gather")
    model.add_argument("--rope", action="store_true", help="rotary position embedding")
    model.add_argument("--sequence-parallel", action="store_true")
    model.add_argument("--tied-embeddings", action="store_true")
    model.add_argument("--num-experts", type=int, help="on all ranks together; default: dense layers")
    model.add_argument("--ep", type=int, default=1)
    model.add_argument("--etp", type=int, help="tensor-parallel ranks of an expert; default: --tp")
    model.add_argument("--token-dispatcher", choices=["alltoall", "allgather"], default="alltoall")
    model.add_argument("--expert-bias", action="store_true")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=10)
    training.add_argument("--micro-batch", type=int, default=2)
    training.add_argument("--num-microbatches", type=int, default=4)
    training.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    training.add_argument("--dropout", type=float, default=0.0)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--distributed-optimizer", action="store_true", dest="use_distributed_optimizer")
    training.add_argument("--megatron-fsdp", choices=["optim", "optim_grads", "optim_grads_params"])
    training.add_argument("--overlap-grad-reduce", action="store_true")
    training.add_argument("--overlap-param-gather", action="store_true")
    training.add_argument("--bucket-size", type=int)
    training.add_argument("--recompute", choices=["full", "selective"])
    training.add_argument("--overlap-p2p-comm", action="store_true")
    training.add_argument("--deallocate-pipeline-outputs", action="store_true")
    training.add_argument("--loss-of-own-tokens", action="store_true")
    training.add_argument("--loss-counts-tokens", action="store_true")
    training.add_argument("--calculate-per-token-loss", action="store_true")
    training.add_argument("--check-for-nan-in-grad", action="store_true")
    training.add_argument("--check-for-nan-in-loss", action="store_true")
    training.add_argument(
        "--rerun-state-machine", choices=["disabled", "validate_results"], default="disabled"
    )
    locating = parser.add_argument_group("nanlocator")
    locating.add_argument("--nanlocator", action="store_true", help="install it on the model")
    locating.add_argument("--on-bad", choices=["stop", "report"], default="stop")
    locating.add_argument("--level")
    locating.add_argument("--check-params", action="store_true")
    locating.add_argument("--output-dir", help="nanlocator's files; default: OUTPUT/nanlocator_run")
    parser.add_argument("--fault", nargs="+", action="append", default=[], metavar=("NAME", "key=value"))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("training_results"))
    return parser.parse_args()


def _training_fields(arguments: argparse.Namespace) -> dict:
    import dataclasses

    from gpt_training import TrainingConfig

    names = {field.name for field in dataclasses.fields(TrainingConfig)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _nanlocator_options(arguments: argparse.Namespace) -> dict:
    options: dict = {"on_bad": arguments.on_bad}
    if arguments.level:
        options["level"] = arguments.level
    if arguments.check_params:
        options["check_params"] = True
    if arguments.output_dir:
        options["output_dir"] = arguments.output_dir
    return options


if __name__ == "__main__":
    sys.exit(main())
