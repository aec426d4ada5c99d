"""Modules around kernels that PyTorch's dispatcher does not see (planted_kernels.cpp), with bugs in them."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from nanlocator import _C

_built = Path(_C.__file__).parents[2] / "tests"
_spec = importlib.util.spec_from_file_location(
    "planted_kernels", next(_built.glob("planted_kernels*.so"), _built / "planted_kernels.so")
)
kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels)
from_elsewhere = kernels.row_sums  # bound by another name, as `from flash_attn_2_cuda import fwd` does


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_fault, backward_fault):
        ctx.save_for_backward(x)
        ctx.fault = backward_fault
        return kernels.silu(x, forward_fault)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        of_x = torch.empty_like(x)
        kernels.silu_gradient(gradient, x, of_x, fault=ctx.fault)
        return of_x, None, None


class Silu(nn.Module):
    def __init__(self, forward="", backward=""):
        super().__init__()
        self.faults = (forward, backward)

    def forward(self, x):
        return _Silu.apply(x, *self.faults)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, fault):
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.fault = counts, fault
        return kernels.grouped_gemm(x, weight, counts)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_weight = torch.empty_like(weight)
        kernels.grouped_gemm_gradient(gradient, x, of_weight, ctx.counts, ctx.fault)
        of_x = kernels.grouped_gemm(gradient, weight.transpose(1, 2).contiguous(), ctx.counts)
        return of_x, of_weight, None, None


class Experts(nn.Module):
    """Of the rows the first half is the first expert's, the rest the third's; the second has none."""

    def __init__(self, width, fault=""):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / width**0.5)
        self.fault = fault

    def forward(self, x):
        half = x.shape[0] // 2
        return _Experts.apply(x, self.weight, [half, 0, x.shape[0] - half], self.fault)


class RowSums(nn.Module):
    """Of the left columns of a wider buffer, whose others nobody has asked for."""

    def __init__(self, fault="", beside=0.0):
        super().__init__()
        self.fault, self.beside = fault, beside

    def forward(self, x):
        wide = torch.full((x.shape[0], x.shape[1] + 1), self.beside)
        wide[:, :-1] = x.detach()
        return x + from_elsewhere(wide[:, :-1], self.fault)[:, None]


class Scaled(nn.Module):
    """By a method of a class of the extension, in place."""

    def __init__(self, by=0.5):
        super().__init__()
        self.workspace, self.by = kernels.Workspace(), by

    def forward(self, x):
        factor = torch.ones_like(x)
        self.workspace.scale(factor, self.by)
        return x * factor
