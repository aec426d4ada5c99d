"""Trains a small GPT on real Megatron-Core with several gloo processes on this machine's CPU, plants a NaN on
one rank, and shows the reports of Megatron and of nanlocator.

examples:
  tools/demo                                  an operator's fault in forward that spreads over all ranks
  tools/demo --fault activation_element       one element of an activation is overwritten, once
  tools/demo --fault tp_duplicated_layernorm  a gradient that Megatron's norm leaves out
  tools/demo --healthy                        a run with and without nanlocator, compared bit for bit

Exit status: 0 nanlocator found the fault as expected, 1 it did not, 2 wrong use. nanlocator's files go to
./nanlocator_run, as in any run.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = 4  # divisible into 1, 2 or 4 pipeline stages; so are the heads among tensor-parallel ranks

# The faults of examples/megatron_gpt/faults.py with the demonstration's descriptions, and whether nanlocator
# must also scan parameters to find them.
FAULTS = {
    "forward_operator": "log of a negative number in an MLP, in forward, on one tensor-parallel rank",
    "backward_operator": "the derivative of a square root at zero, in an MLP's backward",
    "activation_element": "one element of an activation is overwritten in memory, once: gone in a re-run",
    "pipeline_receive": "one element that a pipeline stage receives, once: the sender's was finite",
    "loss_zero_over_zero": "a microbatch without a valid label: its loss is 0/0",
    "tp_duplicated_layernorm": "a layer norm's weight gradient that Megatron's norm leaves out (tp rank > 0)",
    "main_grad_element": "one element of a gradient bucket, just before the data-parallel reduction",
    "after_reduction": "one element of a reduced gradient on one rank, as a faulty collective would leave it",
    "optimizer_update": "a negative second moment in Adam: gradients are clean, the weight becomes NaN",
    "bad_weight": "one element of a weight before forward",
    "large_gradients": "gradients of 1e24: each is finite, their norm is not",
}
CHECKS_PARAMETERS = {"optimizer_update"}
OF_A_LAYER = {"forward_operator", "backward_operator", "activation_element"}


def main() -> int:
    arguments = parse_arguments()
    if arguments.check_arguments:
        return 0
    started = time.monotonic()
    sys.path.insert(0, str(ROOT / "examples" / "megatron_gpt"))
    from launch import ScenarioPool

    python_path = [str(ROOT / "build" / "release" / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": ":".join(filter(None, python_path)), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(prefix="nanlocator-demo-") as temporary:
        directory = arguments.output / "demo_ranks" if arguments.keep else pathlib.Path(temporary)
        with ScenarioPool(directory, environment) as pool:
            demonstration = Demonstration(arguments, pool)
            is_as_promised = demonstration.healthy() if arguments.healthy else demonstration.fault()
    if arguments.keep:
        print(f"\nresults and logs of every rank: {directory}")
    print(f"\n{time.monotonic() - started:.0f} s")
    return 0 if is_as_promised else 1


def parse_arguments() -> argparse.Namespace:
    width = max(map(len, FAULTS))
    parser = argparse.ArgumentParser(
        prog="tools/demo",
        description=__doc__,
        epilog="faults:\n" + "\n".join(f"  {name:{width}}  {text}" for name, text in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fault", choices=FAULTS, default="forward_operator", metavar="NAME")
    parser.add_argument("--rank", type=int, help="faulty rank (default: last replica, last tp rank, stage 0)")
    parser.add_argument("--healthy", action="store_true", help="no fault: compare with and without")
    parser.add_argument("--tp", type=int, choices=[1, 2, 4], default=2, help="tensor-parallel size (2)")
    parser.add_argument("--pp", type=int, choices=[1, 2, 4], default=2, help="pipeline-parallel size (2)")
    parser.add_argument("--dp", type=int, choices=range(1, 9), default=2, metavar="1..8", help="replicas (2)")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps (20); the fault is planted in the second to last"
    )
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("nanlocator_run"))
    parser.add_argument("--keep", action="store_true", help="keep the ranks' logs in OUTPUT/demo_ranks")
    parser.add_argument("--check-arguments", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks = arguments.tp * arguments.pp * arguments.dp
    if ranks > 16:
        parser.error(f"tp x pp x dp is {ranks}; at most 16 processes")
    if arguments.steps < 4:
        parser.error("at least 4 steps")
    if arguments.rank is None:
        arguments.rank = arguments.tp * arguments.dp - 1
        if arguments.fault == "pipeline_receive":
            arguments.rank = ranks - 1
    if not 0 <= arguments.rank < ranks:
        parser.error(f"rank {arguments.rank} of {ranks}")
    if arguments.fault == "tp_duplicated_layernorm" and arguments.rank % arguments.tp == 0:
        parser.error("tp_duplicated_layernorm needs a rank whose tp rank is not 0 (and --tp 2 or 4)")
    if arguments.fault == "pipeline_receive" and arguments.rank < arguments.tp * arguments.dp:
        parser.error("pipeline_receive needs a rank of a later pipeline stage (and --pp 2 or 4)")
    arguments.output = arguments.output.resolve()
    return arguments


class Demonstration:
    def __init__(self, arguments: argparse.Namespace, pool) -> None:
        self.arguments = arguments
        self.pool = pool
        self.ranks = arguments.tp * arguments.pp * arguments.dp
        self.screen = Screen()
        print(
            f"A GPT of {LAYERS} layers on Megatron-Core {version('megatron-core')}: "
            f"TP{arguments.tp} x PP{arguments.pp} x DP{arguments.dp} = {self.ranks} processes, gloo on CPU; "
            "bytes of Python's standard library."
        )

    def healthy(self) -> bool:
        """Runs the same training twice. Returns whether all bits are equal and nothing was found."""
        print(self.screen.title("\nWithout nanlocator"))
        without = self.train("without", self.arguments.steps)
        print(self.screen.title("\nWith nanlocator"))
        with_it = self.train("with", self.arguments.steps, nanlocator={})
        print(self.screen.title("\nThe same, bit for bit?"))
        is_same = True
        for what in ("loss", "grad_norm", "gradients_sha256", "weights_sha256"):
            equal = all(
                a[what] == b[what]
                for x, y in zip(without, with_it, strict=True)
                for a, b in zip(x["records"], y["records"], strict=True)
            )
            is_same &= self.verify(equal, f"{what.split('_sha')[0]} of every step on every rank")
        for what in without[0]["fingerprints"]:
            pairs = zip(without, with_it, strict=True)
            equal = all(x["fingerprints"][what] == y["fingerprints"][what] for x, y in pairs)
            is_same &= self.verify(equal, f"final {what} on every rank")
        found = sum(len(rank["verdicts"]) for rank in with_it)
        is_same &= self.verify(found == 0, f"findings: {found}")
        medians = [
            statistics.median(record["seconds"] for record in run[0]["records"]) for run in (without, with_it)
        ]
        print(
            "  median step: {:.3f} s without, {:.3f} s with; no measurement, all share this CPU".format(
                *medians
            )
        )
        return is_same

    def fault(self) -> bool:
        arguments = self.arguments
        step = arguments.steps - 1
        fault = {"name": arguments.fault, "rank": arguments.rank, "iteration": step} | self.place()
        print(f"In step {step} a fault is planted on rank {arguments.rank}: {FAULTS[arguments.fault]}.")

        print(self.screen.title("\n1. Without nanlocator"))
        without = self.train("without", arguments.steps, faults=[fault])
        planted = [fact for rank in without for fact in rank["planted"]]
        self.show_megatrons_view(without, step)

        print(self.screen.title("\n2. With nanlocator.megatron.install(model_chunks, optimizer)"))
        options = {"on_bad": "stop", "output_dir": str(arguments.output)}
        if arguments.fault in CHECKS_PARAMETERS:
            options["check_params"] = True
        with_it = self.train("with", arguments.steps, faults=[fault], nanlocator=options)
        error = with_it[0]["error"]
        if error is None or error["verdict"] is None:
            return self.verify(False, f"nanlocator stopped the run (what happened instead: {error})")
        print(f"\n{error['report'].rstrip()}\n")
        is_as_promised = self.check(without, with_it, step, planted)
        self.replay(with_it)
        page = pathlib.Path(with_it[0]["run_dir"]) / "report.html"
        print(f"\nThe page of this finding, one file for any browser: {page.resolve().as_uri()}")
        return is_as_promised

    def replay(self, ranks: list[dict]) -> None:
        """Executes the origin's operator again, alone, from the failing step's bundle on disk."""
        bundles = [origin["bundle"] for origin in ranks[0]["error"]["verdict"]["origins"] if origin["bundle"]]
        if not bundles:
            return
        bundle = pathlib.Path(ranks[0]["run_dir"]) / bundles[0]
        print(self.screen.title(f"\nAgain, alone: nanlocator replay {os.path.relpath(bundle)}\n"), flush=True)
        subprocess.run([ROOT / "build" / "release" / "bin" / "nanlocator", "replay", bundle], check=False)

    def place(self) -> dict:
        """The first layer of the chosen rank's pipeline stage."""
        arguments = self.arguments
        stage = arguments.rank // (arguments.tp * arguments.dp)
        layer = stage * LAYERS // arguments.pp
        name = arguments.fault
        if name in OF_A_LAYER:
            return {"layer": layer, "microbatch": 1}
        if name == "pipeline_receive":
            return {"microbatch": 1}
        if name == "tp_duplicated_layernorm":
            return {"parameter": f"decoder.layers.{layer}.input_layernorm.weight"}
        if name in ("loss_zero_over_zero", "large_gradients"):
            return {}
        return {"parameter": f"decoder.layers.{layer}.mlp.linear_fc1.weight"}

    def train(self, name: str, steps: int, faults=(), nanlocator=None) -> list[dict]:
        """Runs one scenario with a line of progress and returns its per-rank results. Without faults, all
        ranks must succeed."""
        scenario = {
            "name": name,
            "ranks": self.ranks,
            "steps": steps,
            "training": {"tp": self.arguments.tp, "pp": self.arguments.pp, "layers": LAYERS},
            "faults": list(faults),
            "nanlocator": nanlocator,
            "timeout": 300.0,
        }
        directory = self.pool.directory(scenario)
        for old in directory.glob("*"):  # from an earlier --keep
            if old.is_file():
                old.unlink()
        self.screen.begin(directory / "progress.jsonl", steps)
        self.pool.start(scenario)
        outcome = self.pool.wait(self.screen.poll)
        self.screen.end()
        return outcome.require_results() if faults else outcome.require_success()

    def show_megatrons_view(self, ranks: list[dict], step: int) -> None:
        at_fault, after = (ranks[0]["records"][i] for i in (step - 1, step))
        norm = at_fault["grad_norm"]
        print(
            f"  Megatron on rank 0 reports of step {step}: success={at_fault['successful']}, "
            f"grad norm {norm:.4g}, loss {at_fault['loss']:.4f}."
            + ("  Nothing to see." if math.isfinite(norm) else "")
        )
        bad = sum(len(rank["non_finite_parameters"]) for rank in ranks)
        total = sum(len(rank["parameters"]) for rank in ranks)
        print(
            f"  One step later: loss {after['loss']:.4g}, and {bad} of {total} weight tensors "
            f"on {self.ranks} ranks hold NaN or Inf."
        )

    def check(self, without: list[dict], with_it: list[dict], step: int, planted: list[dict]) -> bool:
        """Compares the verdict with the planted fault, and the weights with those from before the step."""
        print(self.screen.title("Is that so?"))
        verdict = with_it[0]["error"]["verdict"]
        kinds = {(rank["error"] or {}).get("type") for rank in with_it}
        good = self.verify(
            len(kinds) == 1 and str(*kinds).endswith("NonFiniteGradientError"),
            f"all {self.ranks} ranks stopped with the same error, none hangs",
        )
        good &= self.verify(verdict["iteration"] == step, f"in step {step}")
        if self.arguments.fault == "optimizer_update":
            print("    (the update itself is at fault: it is found right after the step)")
        elif self.arguments.fault != "bad_weight":
            before = [rank["records"][step - 2]["weights_sha256"] for rank in without]
            now = [rank["fingerprints"]["weights"] for rank in with_it]
            good &= self.verify(before == now, "every weight on every rank is bit for bit as before the step")
        # A loss of 0/0 is planted on all ranks of a replica.
        fact = min(planted, key=lambda fact: fact["rank"] != self.arguments.rank)
        origins = verdict["origins"]
        named_ranks = {rank for origin in origins for rank in origin["candidates"]}
        named_ranks |= {o["coordinates"]["rank"] for o in origins if o["coordinates"]}
        what = "the rank named" if named_ranks == {fact["rank"]} else "among the ranks that can be meant"
        good &= self.verify(
            fact["rank"] in named_ranks, f"rank {fact['rank']} is {what}: {sorted(named_ranks)}"
        )
        for what in ("microbatch", "module", "operator"):
            if what in fact:
                named = {f"{o[what]} {o['facts']}" for o in origins}
                is_named = any(str(fact[what]) in text for text in named)
                good &= self.verify(is_named, f"the {what} is {fact[what]}")
        if "parameter" in fact:
            tensors = [(o["parameter"], (o["tensor"] or {}).get("first_bad")) for o in origins]
            good &= self.verify(
                any(name == fact["parameter"] for name, _ in tensors), f"the parameter is {fact['parameter']}"
            )
            good &= self.verify(
                (fact["parameter"], fact["element"]) in tensors, f"its first bad element is {fact['element']}"
            )
        run = pathlib.Path(with_it[0]["run_dir"])
        print(f"\nnanlocator's files are in {run}:")
        kinds = collections.Counter(re.sub(r"tp\d+pp\d+dp\d+", "*", path.name) for path in run.iterdir())
        print("  " + ", ".join(name + (f" ({n})" if n > 1 else "") for name, n in sorted(kinds.items())))
        return good

    def verify(self, is_so: bool, sentence: str) -> bool:
        print(f"  {self.screen.mark(is_so)} {sentence}")
        return is_so


class Screen:
    """Progress in place on a terminal, otherwise every fifth step; colours only on a terminal."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self.path: pathlib.Path | None = None

    def title(self, text: str) -> str:
        return self._coloured(text, "1")

    def mark(self, is_so: bool) -> str:
        return self._coloured("yes", "32") if is_so else self._coloured("NO ", "31")

    def _coloured(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.is_terminal else text

    def begin(self, path: pathlib.Path, steps: int) -> None:
        self.path, self.steps, self.shown = path, steps, 0
        if self.is_terminal:
            print("  starting ...", end="", flush=True)

    def poll(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        for line in lines[self.shown :]:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # incomplete
                return
            self.shown += 1
            norm = record["grad_norm"]
            where = f"  step {record['iteration']:3d}/{self.steps}"
            text = f"{where}  loss {record['loss']:.4f}  grad norm {norm:.4g}"
            if self.is_terminal:
                print(f"\r{text}   ", end="", flush=True)
            elif self.shown == 1 or self.shown % 5 == 0 or self.shown == self.steps:
                print(text, flush=True)

    def end(self) -> None:
        self.poll()
        if self.is_terminal:
            print()


if __name__ == "__main__":
    sys.exit(main())
