"""Modules around kernels that PyTorch's dispatcher does not see (planted_kernels.cpp), with bugs in them."""

import importlib.util
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from nanlocator import _C

_built = Path(_C.__file__).parents[2] / "tests"
_file = next(_built.glob("planted_kernels*.so"), _built / "planted_kernels.so")


def _module(name):
    spec = importlib.util.spec_from_file_location(name, _file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # as if installed
    spec.loader.exec_module(module)
    return module


kernels = _module("planted_kernels")
flash_attn, grouped_gemm, apex = map(
    _module, ("flash_attn_2_cuda", "grouped_gemm_backend", "fused_layer_norm_cuda")
)
from_elsewhere = kernels.row_sums  # another name, as after `from flash_attn_2_cuda import fwd`


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
    """The first expert has the first half of the rows, the third the rest, and the second none."""

    def __init__(self, width, fault=""):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / width**0.5)
        self.fault = fault

    def forward(self, x):
        half = x.shape[0] // 2
        return _Experts.apply(x, self.weight, [half, 0, x.shape[0] - half], self.fault)


class RowSums(nn.Module):
    """Sums the left columns of a wider buffer, which must not depend on the others."""

    def __init__(self, fault="", beside=0.0):
        super().__init__()
        self.fault, self.beside = fault, beside

    def forward(self, x):
        wide = torch.full((x.shape[0], x.shape[1] + 1), self.beside)
        wide[:, :-1] = x.detach()
        return x + from_elsewhere(wide[:, :-1], self.fault)[:, None]


class Scaled(nn.Module):
    """Scales in place by a method of a class of the extension."""

    def __init__(self, by=0.5):
        super().__init__()
        self.workspace, self.by = kernels.Workspace(), by

    def forward(self, x):
        factor = torch.ones_like(x)
        self.workspace.scale(factor, self.by)
        return x * factor


class _Called(torch.autograd.Function):
    """Runs a kernel in forward, and PyTorch's derivative of the same function in backward."""

    @staticmethod
    def forward(ctx, kernel, definition, *tensors):
        ctx.definition = definition
        ctx.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
            output = ctx.definition(*leaves)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(output, wanted, gradient), strict=True))
        return None, None, *(found.get(id(leaf)) for leaf in leaves)


class Called(nn.Module):
    """Runs ``kernel`` with ``fault`` on an input of (rows, width), multiplied by ``scale``."""

    def __init__(self, kernel, fault="", width=9, scale=1.0):
        super().__init__()
        self.kernel, self.fault, self.scale = kernel, fault, scale
        shapes = {
            "gemm": (width, width),
            "embedding": (5, width),
            "rms_norm": (width,),
            "layer_norm": (width,),
        }
        shape = shapes.get(kernel)
        self.weight = nn.Parameter(torch.randn(shape) / width**0.5) if shape else None

    def forward(self, x):
        return getattr(self, self.kernel)(x * self.scale) / max(1.0, self.scale)

    def silu_into(self, x):
        def kernel(x):
            out = torch.empty_like(x)
            kernels.silu_into(x, out, self.fault)
            return out

        return _Called.apply(kernel, torch.nn.functional.silu, x)

    def tanh_scaled(self, x):
        return _Called.apply(lambda x: kernels.tanh_scaled(x, self.fault), torch.tanh, x)

    def softmax(self, x):
        return _Called.apply(lambda x: kernels.softmax(x, self.fault), lambda x: torch.softmax(x, -1), x)

    def rms_norm(self, x):
        def definition(x, weight):  # for backward, which must not overflow
            return x * weight

        def kernel(x, weight):
            return kernels.rms_norm(x, weight, 1e-6, self.fault)

        return _Called.apply(kernel, definition, x, self.weight)

    def layer_norm(self, x):
        """Normalises the left columns of a wider buffer with NaN in the last; the first row is constant."""
        wide = torch.cat([torch.cat([x[:1] * 0 + 1, x[1:]]), torch.full_like(x[:, :1], torch.nan)], dim=1)
        bias = torch.zeros(x.shape[1])

        def definition(x, weight):
            return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias)

        def kernel(x, weight):
            return kernels.layer_norm(x, weight, bias, 1e-5, self.fault)

        return _Called.apply(kernel, definition, wide[:, :-1], self.weight)

    def swiglu(self, x):
        def definition(x):
            return torch.nn.functional.silu(x) * torch.flip(x, [0])

        return _Called.apply(lambda x: kernels.swiglu(x, torch.flip(x, [0]), self.fault), definition, x)

    def rope(self, x):
        """Rotates all columns but the last."""
        even = x[:, : x.shape[1] // 2 * 2].contiguous()
        cos, sin = rotations(even)
        rotated = _Called.apply(
            lambda x: kernels.rope(x, cos, sin, self.fault), lambda x: _rotated(x, cos, sin), even
        )
        return torch.cat([rotated, x[:, even.shape[1] :]], dim=1)

    def embedding(self, x):
        ids = torch.arange(x.shape[0]) % self.weight.shape[0]

        def kernel(weight, ids):
            out = torch.empty(len(ids), weight.shape[1])
            kernels.embedding(weight, ids, out, self.fault)
            return out

        return x + _Called.apply(kernel, lambda weight, ids: weight[ids], self.weight, ids)

    def cross_entropy(self, x):
        labels = torch.arange(x.shape[0]) % x.shape[1]
        labels[3] = -100

        def definition(x, labels):
            return torch.nn.functional.cross_entropy(x, labels, reduction="none")

        def kernel(x, labels):
            return kernels.cross_entropy(x, labels, -100, self.fault)

        return x + _Called.apply(kernel, definition, x, labels)[:, None]

    def gemm(self, x):
        return _Called.apply(
            lambda x, w: kernels.gemm(x, w, self.fault), torch.nn.functional.linear, x, self.weight
        )

    def attention_varlen(self, x):
        """Two sequences, one head of the whole width."""
        ends = torch.tensor([0, x.shape[0] // 2, x.shape[0]])

        def kernel(x):
            out = torch.empty_like(x)
            q = x[:, None].contiguous()
            kernels.attention_varlen(q, q, q, out[:, None], ends, 0.5, True, self.fault)
            return out

        def definition(x):
            pieces = []
            for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                part = x[begin:end]
                mask = torch.ones(len(part), len(part), dtype=torch.bool).tril()
                pieces.append(torch.softmax((part @ part.T * 0.5).masked_fill(~mask, -torch.inf), -1) @ part)
            return torch.cat(pieces)

        return _Called.apply(kernel, definition, x)


def _rotated(x, cos, sin):
    first, second = x.chunk(2, dim=1)
    return x * cos + torch.cat([-second, first], dim=1) * sin


DEFINITIONS = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "gelu": F.gelu,
    "softmax": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "swiglu": lambda a, b: F.silu(a) * b,
    "geglu": lambda a, b: F.gelu(a) * b,
    "rms_norm": lambda x, weight: F.rms_norm(x, x.shape[1:], weight, 1e-6),
    "embedding": lambda weight, ids: F.embedding(ids, weight),
    "rope": _rotated,
}


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, fault, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.fault = name, fault
        if name in DEFINITIONS:
            return getattr(kernels, name)(*tensors, fault=fault)  # planted: fused forward
        return DEFINITIONS[name.removesuffix("_backward")](*tensors)

    @staticmethod
    def backward(ctx, gradient):
        tensors = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ctx.name in DEFINITIONS:
            leaves = [t.detach().requires_grad_() for t in tensors]
            with torch.enable_grad():
                return None, None, *torch.autograd.grad(DEFINITIONS[ctx.name](*leaves), leaves, gradient)
        given = tensors[1:] if ctx.name == "rope_backward" else tensors
        found = getattr(kernels, ctx.name)(gradient, *given, fault=ctx.fault)  # planted: fused backward
        found = found if isinstance(found, list) else [found]
        return None, None, *found, *[None] * (len(tensors) - len(found))


class Fused(nn.Module):
    """Runs ``kernel`` ("gelu", "gelu_backward") with ``fault``; PyTorch runs the rest."""

    def __init__(self, kernel, fault="", width=9):
        super().__init__()
        self.kernel, self.fault, self.family = kernel, fault, kernel.removesuffix("_backward")
        shape = {"rms_norm": (width,), "embedding": (5, width)}.get(self.family)
        self.weight = nn.Parameter(torch.randn(shape) / width**0.5) if shape else None

    def forward(self, x):
        if self.family == "embedding":
            return x + self.call(self.weight, torch.arange(len(x)) % len(self.weight))
        if self.family == "rope":
            even = x[:, : x.shape[1] // 2 * 2].contiguous()
            return torch.cat([self.call(even, *rotations(even)), x[:, even.shape[1] :]], dim=1)
        others = {"rms_norm": [self.weight], "swiglu": [x.flip(0)], "geglu": [x.flip(0)]}
        return self.call(x, *others.get(self.family, []))

    def call(self, *tensors):
        return _Fused.apply(self.kernel, self.fault, *tensors)


def rotations(x):
    angles = torch.outer(torch.arange(len(x)), 10.0 ** -torch.arange(x.shape[1] // 2)).repeat(1, 2)
    return angles.cos(), angles.sin()


class _FlashAttention(torch.autograd.Function):
    """The calls of flash_attn/flash_attn_interface.py, v2.8.3."""

    @staticmethod
    def forward(ctx, q, k, v, ends, longest, scale, dropout):
        out, lse, _, rng_state = flash_attn.varlen_fwd(  # planted: flash forward
            *(q, k, v, None, ends, ends, None, None, None, None),
            *(longest, longest, dropout, scale, False, True, -1, -1, 0.0, False, None),
        )
        ctx.save_for_backward(q, k, v, out, lse, ends, rng_state)
        ctx.numbers = longest, longest, dropout, scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse, ends, rng_state = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
        flash_attn.varlen_bwd(  # planted: flash backward
            *(gradient, q, k, v, out, lse, dq, dk, dv, ends, ends, None),
            *(*ctx.numbers, False, True, -1, -1, 0.0, False, None, rng_state),
        )
        return dq, dk, dv, None, None, None, None


class FlashAttention(nn.Module):
    """Causal attention over two packed sequences. The last key of the first one is nearly the largest number;
    only its own query, which is zero, may attend to it."""

    def __init__(self, width=9, heads=3, dropout=0.0):
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = self.project(x).unflatten(1, (3, self.heads, -1)).unbind(1)
        middle = len(x) // 2 - 1
        is_last = torch.arange(len(x))[:, None, None] == middle - 1
        q, k = (q.abs() + 1).masked_fill(is_last, 0), k.masked_fill(is_last, 3e38)
        ends = torch.tensor([0, middle, len(x)], dtype=torch.int32)
        longest = len(x) - middle
        return _FlashAttention.apply(q, k, v, ends, longest, q.shape[-1] ** -0.5, self.dropout).flatten(1)


class _GroupedProduct(torch.autograd.Function):
    """The calls of grouped_gemm/ops.py, v1.1.4."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight, counts)
        out = torch.empty(len(x), weight.shape[2])
        grouped_gemm.gmm(x, weight, out, counts, False, False)  # planted: gmm forward
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight, counts = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        gradient = gradient.contiguous()
        grouped_gemm.gmm(gradient, weight, of_x, counts, False, True)
        grouped_gemm.gmm(x, gradient, of_weight, counts, True, False)  # planted: gmm of weights
        return of_x, of_weight, None


class GroupedProduct(nn.Module):
    """A grouped product with three experts; the second has no tokens."""

    def __init__(self, width=9):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x):
        half = len(x) // 2
        return _GroupedProduct.apply(x, self.weight, torch.tensor([half, 0, len(x) - half]))


class _ApexLayerNorm(torch.autograd.Function):
    """The calls of apex/normalization/fused_layer_norm.py, 25.09."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        shape = (x.shape[-1],)
        out, mean, invvar = apex.forward_affine(x, shape, weight, bias, eps)  # planted: Apex forward
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        ctx.numbers = shape, eps
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias, mean, invvar = ctx.saved_tensors
        shape, eps = ctx.numbers
        return *apex.backward_affine(  # planted: Apex backward
            gradient.contiguous(), mean, invvar, x, shape, weight, bias, eps, False
        ), None


class ApexLayerNorm(nn.Module):
    """Normalises rows; the first one is constant."""

    def __init__(self, width=9):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = torch.cat([x[:1] * 0 + 1, x[1:]])
        return _ApexLayerNorm.apply(x, self.norm.weight, self.norm.bias, 1e-5)
