"""Drills: a small training with a planted fault, restarted as its verdicts decide until it ends or is down.

    PYTHONPATH=build/release/python:tests/drills python tests/drills/drills.py [COUNT]

prints a table of all kinds. Each drill is one process's training by `watch`, with checkpoints; the restart
script knows the decision alone, never the fault.
"""

import collections
import contextlib
import ctypes
import os
import random
import sys
import tempfile
import time
import warnings
import zlib
from dataclasses import dataclass, field

import torch
from torch import nn

import nanlocator

STEPS, EVERY, MOST_ATTEMPTS = 10, 2, 4
NAN, INF = float("nan"), float("inf")
# What the first decision may be, and how the drill must end. Two kinds of faults never go away by restarting.
RIGHT = {
    "transient": ({"RESTART_AS_IS traced"}, "trained"),  # or something that the model's own code reads
    "one device": ({"RESTART_AS_IS traced", "EXCLUDE"}, "trained"),
    "bad checkpoint": ({"OLDER_CHECKPOINT"}, "trained"),
    "bad batch": ({"SKIP_BATCH"}, "trained"),
    "optimizer": ({"OLDER_CHECKPOINT", "RESTART_AS_IS"}, "trained"),
    "race": ({"RESTART_AS_IS", "RESTART_AS_IS traced"}, "trained"),
    "code": ({"DO_NOT_RESTART"}, "down"),
    "overflow": ({"DO_NOT_RESTART"}, "down"),
}
KINDS = list(RIGHT)


@dataclass
class Fault:
    """Where and when, by the seed. ``attempt``: of the present training."""

    kind: str
    seed: int
    attempt: int = 0
    is_excluded: bool = False

    def __post_init__(self):
        chosen = random.Random(f"{self.kind} {self.seed}")
        self.step = chosen.randrange(4, STEPS - 1)  # absolute, from 0; a bad update shows in the next step
        self.layer = chosen.randrange(3)
        self.element = chosen.randrange(64)
        self.value = chosen.choice([NAN, NAN, INF])
        self.width = chosen.choice([8, 16])
        self.optimizer = chosen.choice(["SGD", "AdamW"]) if self.kind != "optimizer" else "AdamW"
        self.normalised = chosen.random() < 0.5
        self.form = chosen.randrange(4)

    def hits_memory(self, step, layer):
        """Whether a value in memory changes now, and which."""
        if layer != self.layer or step != self.step + self.attempt % 2:
            return False
        _executed[0] += 1
        is_again = _executed[0] > 1
        if self.kind == "race" and self.attempt == 0:  # also in some re-runs, elsewhere
            return not is_again or self.chance() % 10 < 3
        is_present = self.kind == "one device" and not self.is_excluded
        return not is_again and (is_present or (self.kind == "transient" and self.attempt == 0))

    def chance(self):
        """A number of this execution."""
        return zlib.crc32(f"{self.kind} {self.seed} {_executed[0]}".encode())


# How often the planted place was executed in this attempt. Neither an attribute nor a global that the program
# changes: a fault of the machine leaves no such trace.
_executed = (ctypes.c_int64 * 1)()


def strike(tensor, index, value):
    """Without an operator."""
    address = tensor.data_ptr() + index % tensor.numel() * tensor.element_size()
    ctypes.c_float.from_address(address).value = value


class Block(nn.Module):
    def __init__(self, fault, number):
        super().__init__()
        self.fault, self.number, self.step = fault, number, 0
        self.linear = nn.Linear(fault.width, fault.width)
        self.norm = nn.LayerNorm(fault.width) if fault.normalised else nn.Identity()

    def forward(self, x):
        fault = self.fault
        y = torch.tanh(self.linear(self.norm(x)))
        if fault.hits_memory(self.step, self.number):
            strike(y, fault.element + (fault.chance() if fault.kind == "race" else 0), fault.value)
        if self.step == fault.step and self.number == fault.layer:
            if fault.kind == "code":
                shifted = y - y.detach().min()  # holds an exact zero
                y = (
                    y
                    + [
                        lambda: torch.log(y - 2),
                        lambda: shifted / shifted,
                        lambda: torch.sqrt(y - 2),
                        lambda: torch.acos(y + 3),
                    ][fault.form]()
                )
            if fault.kind == "overflow":
                y = (
                    y
                    + [
                        lambda: torch.exp(y * 0 + 200),
                        lambda: (y + 3) * 1e30 * 1e30,
                        lambda: torch.pow(y + 10, 90),
                        lambda: torch.cosh(y * 0 + 500),
                    ][fault.form]()
                )
        return y


@dataclass
class Outcome:
    decisions: list = field(default_factory=list)
    codes: list = field(default_factory=list)
    end: str = ""  # "trained", "down", or "attempts spent"

    def problem(self, kind):
        """Empty if every decision was right."""
        first, end = RIGHT[kind]
        if not self.decisions:
            return "no verdict"
        if self.decisions[0] not in first:
            return f"first decision {self.decisions[0]}"
        if self.end != end:
            return f"{self.end} after {', '.join(self.decisions)}"
        return ""


def batch_of(fault, step):
    made = torch.Generator().manual_seed(1000 * fault.seed + step)
    x, y = torch.randn(8, fault.width, generator=made), torch.randn(8, fault.width, generator=made)
    if fault.kind == "bad batch" and step == fault.step:
        target = (x, y)[fault.form % 2]
        target.view(-1)[fault.element % target.numel()] = fault.value
    return x, y


def made(fault):
    torch.manual_seed(fault.seed)
    model = nn.Sequential(*(Block(fault, number) for number in range(3)), nn.Linear(fault.width, fault.width))
    kind = getattr(torch.optim, fault.optimizer)
    return model, kind(model.parameters(), lr=1e-2)


def save(folder, step, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/step_{step}.pt")


def saved_steps(folder):
    return sorted(int(name[5:-3]) for name in os.listdir(folder) if name.startswith("step_"))


def train(fault, folder, run, start, skipped, *, is_traced=False):
    """From the checkpoint after ``start`` steps. Returns the verdict, or None at the end."""
    _executed[0] = 0
    model, optimizer = made(fault)
    state = torch.load(f"{folder}/step_{start}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    level = "operators" if is_traced else "grads"
    watch = nanlocator.watch(model, optimizer, output_dir=run, level=level)
    try:
        for step in range(start, STEPS):
            for block in model[:3]:
                block.step = step
            if step in skipped:
                continue
            x, y = batch_of(fault, step)
            (model(x) - y).square().mean().backward()
            if fault.kind == "optimizer" and step == fault.step and fault.attempt == 0:
                spoil(optimizer, fault)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % EVERY == 0:
                save(folder, step + 1, model, optimizer)
    except nanlocator.NonFiniteGradientError as error:
        return error.verdict
    finally:
        watch.remove()
    return None


def spoil(optimizer, fault):
    """Memory of the optimizer's state changes, once."""
    states = list(optimizer.state.values())
    state = states[fault.element % len(states)]["exp_avg" if fault.form % 2 else "exp_avg_sq"]
    strike(state, fault.element, NAN)  # Inf only ends the training of that element


def is_finite(path):
    return bool(nanlocator.check_checkpoint(path, compare=None).is_safe)


@contextlib.contextmanager
def quiet(folder):
    """Without the blocks, which C++ writes to the descriptor."""
    kept = os.dup(2)
    with open(os.path.join(folder, "blocks"), "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def drill(kind, seed):
    """Trains, and restarts as decided."""
    fault, outcome = Fault(kind, seed), Outcome()
    with tempfile.TemporaryDirectory() as folder, quiet(folder):
        run = os.path.join(folder, "run")
        model, optimizer = made(fault)
        save(folder, 0, model, optimizer)
        start, skipped, is_traced = 0, set(), False
        if kind == "bad checkpoint":
            train(fault, folder, os.path.join(folder, "before"), 0, skipped)
            start = fault.step // EVERY * EVERY
            for later in saved_steps(folder):
                if later > start:
                    os.remove(f"{folder}/step_{later}.pt")
            path = f"{folder}/step_{start}.pt"
            state = torch.load(path, weights_only=True)
            weights = [tensor for name, tensor in state["model"].items() if "linear" in name]
            weight = weights[fault.element % len(weights)]
            strike(weight, fault.element, NAN)  # tanh makes 1 of Inf
            torch.save(state, path)
        for attempt in range(MOST_ATTEMPTS):
            fault.attempt = attempt
            verdict = train(fault, folder, run, start, skipped, is_traced=is_traced)
            if verdict is None:
                outcome.end = "trained"
                return outcome
            decision = verdict["decision"]
            outcome.decisions.append(decision["kind"] + (" traced" if decision["traced"] else ""))
            outcome.codes.append(verdict["narrative"]["code"])
            if decision["kind"] == "DO_NOT_RESTART":
                outcome.end = "down"
                return outcome
            fault.is_excluded |= decision["kind"] == "EXCLUDE"
            is_traced = decision["traced"]
            if decision["kind"] == "SKIP_BATCH":
                skipped.add(start + verdict["iteration"] - 1)
            newest = decision["newest_step"]
            allowed = [each for each in saved_steps(folder) if newest is None or each <= start + newest]
            if decision["kind"] == "OLDER_CHECKPOINT":
                # Those above hold the fault; whether one below does, is read.
                if newest == 0:
                    allowed = [each for each in allowed if each < start]
                allowed = [each for each in allowed if is_finite(f"{folder}/step_{each}.pt")]
            if not allowed:
                outcome.end = "no checkpoint left"
                return outcome
            start = allowed[-1]
    outcome.end = "attempts spent"
    return outcome


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = time.monotonic()
    rows = collections.defaultdict(list)
    for number in range(count):
        kind, seed = KINDS[number % len(KINDS)], number // len(KINDS)
        outcome = drill(kind, seed)
        rows[kind].append(outcome)
        if problem := outcome.problem(kind):
            print(f"{kind} {seed}: {problem}; {', '.join(outcome.codes)}", flush=True)
    print("\n| fault | drills | right | decisions |\n|---|---|---|---|")
    right = 0
    for kind, outcomes in rows.items():
        good = sum(not each.problem(kind) for each in outcomes)
        right += good
        ways = collections.Counter(" > ".join([*each.decisions, each.end]) for each in outcomes)
        shown = "; ".join(f"{way} ({number})" for way, number in ways.most_common())
        print(f"| {kind} | {len(outcomes)} | {good} | {shown} |")
    print(f"\nright: {right} of {count}, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
