"""Self-check: after the first step that Megatron called successful, compares the observations with what the
configuration must have executed.

If a version of torch or Megatron-Core no longer calls the wrapped names, no error is raised: nothing is seen
and nothing is found. So missing observations are reported once, written to run.json, and added to the notes
of every later verdict.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from nanlocator.megatron.configuration import unwatched_groups, uses_cuda_graphs
from nanlocator.megatron.data_parallel import DataParallelChunk
from nanlocator.megatron.layout import NamedParameter

Exchanges = set[tuple[str, str]]  # group as in ledgers; c10d's operator, "send" or "recv"


class FirstStep:
    """Collects observations as a listener of Microbatches; the locator's hooks add to its sets."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        data_parallel: list[DataParallelChunk],
        named: list[NamedParameter],
    ) -> None:
        self.exchanges: Exchanges | None = None  # None: not watched at this level
        self.buckets: set[int] = set()  # bucket groups whose gradients were scanned before their reduction
        self.chunks: set[int] = set()  # chunks whose gradients were scanned after their reduction
        self.hooks: set[str] = set()
        self.losses = 0
        self._chunks = chunks
        self._data_parallel = data_parallel
        self._named = named

    def begin_forward(self, microbatch: int | None, chunk: int, inputs: Any) -> None:
        self.hooks.add("forward")

    def end_forward(self, microbatch: int | None, chunk: int, outputs: Any) -> None:
        pass

    def begin_backward(self, microbatch: int | None, chunk: int, output_grads: Any) -> None:
        self.hooks.add("backward")

    def end_backward(self, microbatch: int | None, chunk: int, input_grads: Any) -> None:
        pass

    def missing(self) -> list[str]:
        """Readable phrases: what this rank has not seen."""
        if "forward" not in self.hooks:
            return [
                "forward and backward: the program got Megatron's schedule before nanlocator was installed, "
                "or the schedule does not call schedules.forward_step"
            ]
        missing = [*self._missing_gradients(), *self._missing_exchanges()]
        if "backward" not in self.hooks:
            missing.append("the backward microbatches (schedules.backward_step)")
        if self.losses == 0 and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            missing.append("the losses")
        missing += [
            f"the gradients that are clipped (optimizer.{name} was not called)"
            for name in ("prepare_grads", "get_grad_norm")
            if name not in self.hooks
        ]
        return missing

    def _missing_gradients(self) -> Iterator[str]:
        parameters_of = [set(group) for chunk in self._data_parallel for group in chunk.groups]
        unseen = set().union(*(p for n, p in enumerate(parameters_of) if n not in self.buckets))
        homeless = {entry.parameter for entry in self._named}.difference(*parameters_of)
        names = [entry.name for entry in self._named if entry.parameter in unseen | homeless]
        if names:
            yield f"the gradients of {_some_of(names)} before their data-parallel reduction"
        names = [entry.name for entry in self._named if entry.chunk not in self.chunks]
        if names:
            yield f"the gradients of {_some_of(names)} after their data-parallel reduction"

    def _missing_exchanges(self) -> Iterator[str]:
        if self.exchanges is None:
            return
        for groups, operator, words in self._expected_exchanges():
            if not any(group in groups and operator in seen for group, seen in self.exchanges):
                yield f"{words} (group {' or '.join(groups)})"

    def _expected_exchanges(self) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """(groups, any of which may serve; part of the operator's name; words)."""
        config, unwatched = get_model_config(self._chunks[0]), unwatched_groups(self._chunks)
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            yield ("pp",), "send", "messages to other pipeline stages"
            yield ("pp",), "recv", "messages from other pipeline stages"
        if uses_cuda_graphs(config):  # replays call nothing; already reported
            return
        has_layers = any(isinstance(module, TransformerLayer) for module in modules)
        if parallel_state.get_tensor_model_parallel_world_size() > 1 and has_layers and "tp" not in unwatched:
            if config.sequence_parallel:
                yield ("tp",), "allgather", "the all-gathers of sequence parallelism"
                yield ("tp",), "reduce_scatter", "the reduce-scatters of sequence parallelism"
            else:
                yield ("tp",), "allreduce", "the all-reduces of tensor parallelism"
        has_attention = any(isinstance(module, Attention) for module in modules)
        if parallel_state.get_context_parallel_world_size() > 1 and has_attention:
            for operator in sorted(_operators_of_attention(config)):
                yield ("cp", "hcp", "tp_cp"), operator, "the exchanges of context parallelism"
        has_experts = any(isinstance(module, BaseMoELayer) for module in modules) and "ep" not in unwatched
        if parallel_state.get_expert_model_parallel_world_size() > 1 and has_experts:
            if config.moe_token_dispatcher_type.startswith("alltoall"):
                yield ("ep", "tp_ep"), "alltoall", "the token exchanges between experts"
            elif config.moe_token_dispatcher_type == "allgather":
                yield ("ep", "tp_ep"), "allgather", "the tokens gathered for the experts"
                yield ("ep", "tp_ep"), "reduce_scatter", "the outputs of the experts"


def _operators_of_attention(config: Any) -> set[str]:
    """Parts of the names of the operators with which context-parallel ranks exchange tokens."""
    kinds = getattr(config, "cp_comm_type", None) or "p2p"  # TransformerEngine's default
    operators = {"p2p": "send", "all_gather": "allgather", "a2a": "alltoall"}
    parts = {part for kind in ([kinds] if isinstance(kinds, str) else kinds) for part in kind.split("+")}
    return {operators.get(part, "") for part in parts}


def _some_of(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more parameters"
