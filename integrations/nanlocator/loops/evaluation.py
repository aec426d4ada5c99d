"""Evaluation and generation: calls of a model without a backward."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanlocator import _C
from nanlocator.engine.driver import Driver, Named, Pass
from nanlocator.engine.options import Options, resolve_options
from nanlocator.engine.this_rank import is_distributed
from nanlocator.engine.verdict import Verdict
from nanlocator.loops.plain import PlainAdapter, are_in_shards


class Evaluation:
    """Scans the results of each call. If one holds a NaN or +Inf, executes the call again with every operator
    traced. A -Inf is intended: it masks a token.

    Ranks evaluate and generate a different number of times, so each rank judges alone: its verdicts go to its
    own folder, and with several ranks none of them stops. One rank cannot re-run a call in which ranks
    exchange data, for example with a sharded model; the next calls are traced instead.
    """

    def __init__(self, models: dict[str, nn.Module], output_dir: str, options: Options) -> None:
        several = is_distributed()
        place = os.path.join(output_dir, "evaluation")
        if several:
            place = os.path.join(place, f"rank{torch.distributed.get_rank()}")
        options = {**options, "output_dir": place}
        if several:
            options["on_bad"] = "report"
        self._adapter = PlainAdapter([], models)
        resolved = resolve_options(options, "watch")
        if resolved.level == "boundaries":  # all ranks judge crossings together
            resolved.level = "grads"
        if several and torch.distributed.get_rank() != 0:
            resolved.on_finding = None  # on rank 0 alone, as in training
        self._driver = Driver(self._adapter, resolved, None, follows_checkpoints=False)
        self._calls = 0

    @property
    def verdicts(self) -> list[Verdict]:
        return self._adapter.verdicts

    def call(self, call: Callable[[], Any]) -> Any:
        self._calls += 1
        with self._driver.abandoning():
            execution = _Execution(self._adapter, call)
            self._driver.begin_pass(execution, self._calls)
            output = call()
            execution.bad = [i for i, t in enumerate(_C.tensors_in(output)) if is_bad(t)]
            if execution.bad:
                self._driver.end_pass([_C.LossView(tensor) for _, tensor in execution.results(output)])
                self._driver.end_step()
            else:
                self._driver.abandon()
        return output

    def close(self) -> None:
        self._driver.close()


class _Execution(Pass):
    """One call; its bad results serve as its losses."""

    def __init__(self, adapter: PlainAdapter, call: Callable[[], Any]) -> None:
        self._adapter = adapter
        self._call = call
        self.bad: list[int] = []  # indices of the bad tensors in its result

    def results(self, output: Any) -> Named:
        tensors = _C.tensors_in(output)
        return [(f"output[{i}]", tensors[i]) for i in self.bad if i < len(tensors)]

    def obstacle(self) -> str:
        is_alone = not are_in_shards(self._adapter.models)
        return "" if is_alone else "all ranks that hold shards of the model would have to re-run it together"

    def run_again(self) -> Named:
        with torch.no_grad(), self._adapter.naming_modules():
            return self.results(self._call())

    def clear_gradients(self) -> None:
        """Evaluation has no gradients."""


def is_bad(tensor: torch.Tensor) -> bool:
    """A -Inf alone counts as intended."""
    stats = _C.scan_one(tensor)
    return stats is not None and (stats.nan > 0 or stats.pos_inf > 0)
