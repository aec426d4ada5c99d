"""A core attention for context parallelism on CPU and gloo, instead of TransformerEngine's.

Megatron-Core's own DotProductAttention refuses context_parallel_size > 1. `ContextParallelAttention` takes
the arguments of TEDotProductAttention and computes causal attention over the tokens of all context-parallel
ranks. Its three ways to exchange them are those of TransformerEngine (attention/dot_product_attention/
context_parallel.py, cp_comm_type):

    all_gather  keys and values are gathered; their gradients are reduce-scattered
    a2a         heads are scattered and tokens gathered; afterwards the reverse (Ulysses)
    p2p         blocks of keys and values travel in a ring; partial results are merged by their log-sum-exps

Everything else is plain autograd, so every operator of it is one of PyTorch's.
"""

from __future__ import annotations

import math

import cpu_platform
import torch
import torch.distributed as dist

cpu_platform.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

COMM_TYPES = ("all_gather", "a2a", "p2p")
_MASKED = -10000.0  # attention_mask_func of megatron/core/transformer/utils.py: exp() makes a zero of it


def tokens_of_rank(length: int, rank: int, size: int) -> torch.Tensor:
    """int64 [length]: the positions in the whole sequence of the tokens that `rank` of `size` holds. The
    sequence is cut into 2 * size chunks, and a rank has one from either end, so that causal attention is the
    same work for all (megatron/core/utils.py, get_batch_on_this_cp_rank)."""
    chunks = torch.arange(length * size).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


# ---- the exchanges: functions of this module, so that a fault can replace one ------------------------


def all_gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] of each rank to [size, n, ...] on all."""
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole.view(group.size(), *part.shape)


def reduce_scatter(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[size, n, ...] on all to the sum [n, ...] of this rank's part."""
    part = torch.empty_like(whole[0])
    dist.reduce_scatter_tensor(part, whole.contiguous().view(-1, *whole.shape[2:]), group=group)
    return part


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[size, ...]: part i goes to rank i of the group; what came from rank i is part i of the result."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def pass_on(block: torch.Tensor, group: dist.ProcessGroup, direction: int) -> torch.Tensor:
    """Sends `block` to the rank `direction` places further round the ring, and returns what came from the
    other side."""
    received = torch.empty_like(block, memory_format=torch.contiguous_format)
    rank, size = group.rank(), group.size()
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (direction, -direction))
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block.contiguous(), to, group),
            dist.P2POp(dist.irecv, received, source, group),
        ]
    )
    for request in requests:
        request.wait()
    return received


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(part, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return reduce_scatter(gradient, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return all_to_all(gradient, ctx.group), None


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return pass_on(block, group, 1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return pass_on(gradient, ctx.group, -1), None


# ---- the attention ------------------------------------------------------------------------------------


class ContextParallelAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v, causal, over all cp ranks' tokens. As many heads of keys as of
    queries; no attention bias, no packed sequences. The mask is always the causal one."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **unused,  # the groups, under names that differ between versions; parallel_state's are used
    ) -> None:
        super().__init__(config=config)
        self.group = parallel_state.get_context_parallel_group()
        if cp_comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type is {cp_comm_type!r}, expected one of {', '.join(COMM_TYPES)}")
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        if cp_comm_type == "a2a" and heads % self.group.size():
            raise ValueError(
                f"cp_comm_type a2a: {heads} heads do not divide into {self.group.size()} cp ranks"
            )
        self.cp_comm_type = cp_comm_type
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = torch.nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, **unused) -> torch.Tensor:
        """[own tokens, batch, heads, channels] each, to [own tokens, batch, heads * channels]."""
        attend = getattr(self, f"_attend_by_{self.cp_comm_type}")
        return attend(query, key, value).flatten(start_dim=2)

    def _attend_by_all_gather(self, query, key, value):
        size = self.group.size()
        keys, values = _AllGather.apply(torch.stack([key, value], dim=1), self.group).unbind(dim=2)
        positions = torch.cat([self._positions(len(key), rank) for rank in range(size)])
        output, _ = self._attend(
            query, keys.flatten(0, 1), values.flatten(0, 1), self._positions(len(query)), positions
        )
        return output

    def _attend_by_a2a(self, query, key, value):
        size, tokens = self.group.size(), len(query)
        # [tokens, 3, batch, heads, channels] to [ranks by heads, tokens, 3, batch, heads / size, channels]
        by_heads = torch.stack(torch.stack([query, key, value], dim=1).chunk(size, dim=3))
        query, key, value = _AllToAll.apply(by_heads, self.group).flatten(0, 1).unbind(dim=1)
        positions = torch.cat([self._positions(tokens, rank) for rank in range(size)])
        output, _ = self._attend(query, key, value, positions, positions)
        by_tokens = output.unflatten(0, (size, tokens))
        return torch.cat(_AllToAll.apply(by_tokens, self.group).unbind(), dim=2)

    def _attend_by_p2p(self, query, key, value):
        size, rank = self.group.size(), self.group.rank()
        own, block = self._positions(len(query)), torch.stack([key, value])
        output, log_sum = None, None
        for step in range(size):
            if step > 0:
                block = _PassOn.apply(block, self.group)
            positions = self._positions(len(query), (rank - step) % size)
            part, log_sum_of_part = self._attend(query, *block.unbind(), own, positions)
            if output is None:
                output, log_sum = part, log_sum_of_part
                continue
            whole = torch.logaddexp(log_sum, log_sum_of_part)
            weights = [torch.exp(each - whole)[..., None] for each in (log_sum, log_sum_of_part)]
            output = output * weights[0].to(output.dtype) + part * weights[1].to(output.dtype)
            log_sum = whole
        return output

    def _positions(self, tokens: int, rank: int | None = None) -> torch.Tensor:
        return tokens_of_rank(tokens, self.group.rank() if rank is None else rank, self.group.size())

    def _attend(self, query, keys, values, positions, positions_of_keys):
        """Output [queries, batch, heads, channels] and, in fp32, the log of the sum of the exponentials of
        each row of scores, [queries, batch, heads]."""
        scores = torch.einsum("qbhc,kbhc->bhqk", query, keys).float() * self.scale
        scores = scores.masked_fill(positions[:, None] < positions_of_keys[None, :], _MASKED)
        probabilities = torch.softmax(scores, dim=-1)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            probabilities = self.dropout(probabilities)
        output = torch.einsum("bhqk,kbhc->qbhc", probabilities.to(values.dtype), values)
        return output, torch.logsumexp(scores, dim=-1).permute(2, 0, 1)
