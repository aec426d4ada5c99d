"""Stand-ins for TransformerEngine: autograd Functions of the same structure around kernels that PyTorch's
dispatcher does not see (opaque_kernels.cpp). Like TransformerEngine's, a linear layer adds its weight's
gradient to ``main_grad`` itself, if there is one, and then returns unwritten memory to autograd.

``replace_megatrons`` puts them into Megatron-Core in place of TransformerEngine's.
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nanlocator import _C

sys.path.insert(0, str(Path(_C.__file__).parents[2] / "tests"))
import opaque_kernels as kernels  # built by tests/CMakeLists.txt


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x, bias, group, is_sequence_parallel, reduces_gradient):
        given = _gathered(x, group) if is_sequence_parallel else x
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.has_bias, ctx.group = weight, bias is not None, group
        ctx.is_sequence_parallel, ctx.reduces_gradient = is_sequence_parallel, reduces_gradient
        y = kernels.linear(_rows(given), weight.detach()).view(*given.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        given = _gathered(x, ctx.group) if ctx.is_sequence_parallel else x
        of_x = kernels.linear_input_gradient(_rows(gradient), weight.detach()).view(given.shape)
        if ctx.is_sequence_parallel:
            shard = torch.empty_like(x)
            dist.reduce_scatter_tensor(shard, of_x, group=ctx.group)
            of_x = shard
        elif ctx.reduces_gradient:
            dist.all_reduce(of_x, group=ctx.group)
        main_grad = getattr(ctx.weight, "main_grad", None)
        is_fused = main_grad is not None
        of_weight = torch.empty_like(weight) if is_fused else torch.zeros_like(weight)
        kernels.add_weight_gradient(_rows(gradient), _rows(given), main_grad if is_fused else of_weight)
        if is_fused:
            ctx.weight.grad_added_to_main_grad = True
        of_bias = _rows(gradient).sum(dim=0) if ctx.has_bias else None
        return of_weight, of_x, of_bias, None, None, None


def _gathered(x: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.detach().contiguous(), group=group)
    return whole


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        y, means, inverses = kernels.norm(_rows(x), weight.detach(), bias.detach(), epsilon)
        ctx.save_for_backward(x, weight, means, inverses)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, means, inverses = ctx.saved_tensors
        of_x, of_weight, of_bias = kernels.norm_gradients(
            _rows(gradient), _rows(x), weight.detach(), means, inverses
        )
        return of_x.view(x.shape), of_weight, of_bias, None


class _Attention(torch.autograd.Function):
    """Causal attention over [length, batch, heads, width]."""

    @staticmethod
    def forward(ctx, query, key, value):
        heads = [_heads_first(each) for each in (query, key, value)]
        y, probabilities = kernels.attention(*heads)
        ctx.save_for_backward(*heads, probabilities)
        ctx.shape = query.shape
        return _heads_last(y, query.shape).flatten(2)

    @staticmethod
    def backward(ctx, gradient):
        gradients = kernels.attention_gradients(
            _heads_first(gradient.reshape(ctx.shape)), *(each.detach() for each in ctx.saved_tensors)
        )
        return tuple(_heads_last(each, ctx.shape) for each in gradients)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().permute(1, 2, 0, 3).flatten(0, 1).contiguous()


def _heads_last(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    length, batch, heads, width = shape
    return tensor.view(batch, heads, length, width).permute(2, 0, 1, 3).contiguous()


class _CrossEntropy(torch.autograd.Function):
    """For logits [..., vocabulary]; the vocabulary is sharded over the ranks of `group`."""

    @staticmethod
    def forward(ctx, logits, labels, group):
        rows, flat = _rows(logits), labels.reshape(-1).contiguous()
        first = group.rank() * rows.shape[1]
        most = kernels.largest(rows)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        powers, sums = kernels.exponentials(rows, most, flat, first)
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers, sums, flat)
        ctx.first, ctx.shape = first, logits.shape
        return kernels.losses(sums).view(labels.shape)

    @staticmethod
    def backward(ctx, gradient):
        powers, sums, labels = ctx.saved_tensors
        of_logits = kernels.logit_gradients(
            gradient.reshape(-1).contiguous(), powers, sums, labels, ctx.first
        )
        return of_logits.view(ctx.shape), None, None


class _NoContext:
    def save_for_backward(self, *_: torch.Tensor) -> None:
        pass


def _apply(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    """Calls the kernels without the Function if autograd is not recording, as in the first pass of a
    recomputed region, like TransformerEngine's modules."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


class Linear(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) * width_in**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(_Linear, self.weight, x, None, None, False, False)


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(_LayerNorm, x, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Self-attention with one head and one batch: [length, width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, None]
        return _apply(_Attention, x, x, x)[:, 0]


def replace_megatrons() -> None:
    """Replaces Megatron-Core's layers, attention and cross entropy; call it before the model is built."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    @functools.wraps(tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce)
    def linear(
        input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, **options
    ):
        group = options.get("tp_group") or parallel_state.get_tensor_model_parallel_group()
        return _apply(_Linear, weight, input, bias, group, sequence_parallel, allreduce_dgrad)

    def norm(self, x):
        return _apply(_LayerNorm, x, self.weight, self.bias, self.eps)

    def attention(self, query, key, value, attention_mask, *_, **__):
        return _apply(_Attention, query, key, value)

    def cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0):
        group = parallel_state.get_tensor_model_parallel_group()
        return _apply(_CrossEntropy, vocab_parallel_logits, target, group)

    tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce = linear
    nn.LayerNorm.forward = norm
    DotProductAttention.forward = attention
    tensor_parallel.vocab_parallel_cross_entropy = cross_entropy
