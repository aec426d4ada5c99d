"""One training step of a model with Triton kernels, under the interpreter: prints the verdict, or null.

TRITON_INTERPRET=1 python triton_training.py CASE
"""

import ctypes
import json
import sys

import torch
import triton
import triton.language as tl
from torch import nn

import nanlocator

WIDTH = 9
BLOCK = 8


@triton.jit
def scale_kernel(x, y, count, factor: tl.constexpr, wrong_at: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(x + at, mask=at < count) * factor
    tl.store(y + at, tl.where(at == wrong_at, float("nan"), scaled), mask=at < count)


@triton.jit
def row_sum_kernel(x, y, stride, width, has_mask: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width if has_mask else columns < BLOCK
    tl.store(y + row, tl.sum(tl.load(x + row * stride + columns, mask=mask, other=0.0), axis=0))


@triton.jit
def softmax_kernel(x, y, width, has_maximum: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < width
    values = tl.load(x + at, mask=mask, other=-float("inf"))
    if has_maximum:
        values -= tl.max(values, axis=0)
    values = tl.exp(values)
    tl.store(y + at, values / tl.sum(values, axis=0), mask=mask)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, faults):
        ctx.faults = faults
        return scaled(x, faults.get("forward"))

    @staticmethod
    def backward(ctx, gradient):
        return scaled(gradient, ctx.faults.get("backward")), None


def scaled(x, fault):
    x = x.contiguous()
    y = torch.empty_like(x)
    blocks = x.numel() // BLOCK if fault == "tail" else triton.cdiv(x.numel(), BLOCK)
    scale_kernel[(blocks,)](x, y, x.numel(), 2.0, 5 if fault == "element" else -1, BLOCK=BLOCK)
    return y


class Scale(nn.Module):
    def __init__(self, **faults):
        super().__init__()
        self.faults = faults

    def forward(self, x):
        return _Scale.apply(x, self.faults)


class RowSums(nn.Module):
    """Of the left columns of a buffer that is as wide as a block, and NaN where nobody has asked."""

    def __init__(self, has_mask=True):
        super().__init__()
        self.has_mask = has_mask

    def forward(self, x):
        wide = torch.full((x.shape[0], 16), torch.nan)
        wide[:, : x.shape[1]] = x.detach()
        sums = torch.zeros(x.shape[0])
        row_sum_kernel[(x.shape[0],)](wide[:, : x.shape[1]], sums, 16, x.shape[1], self.has_mask, BLOCK=16)
        return x + sums[:, None]


class Softmax(nn.Module):
    def __init__(self, has_maximum=True):
        super().__init__()
        self.has_maximum = has_maximum

    def forward(self, x):
        given, y = x.detach() * 200, torch.empty_like(x)
        softmax_kernel[(x.shape[0],)](given, y, x.shape[1], self.has_maximum, BLOCK=16)
        return x + y


class LigerSoftmax(nn.Module):
    def forward(self, x):
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return LigerSoftmaxFunction.apply(x)


class OneRowLess:
    """Launches a kernel whose programs are rows of its output for all but the last row."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.kernel[(grid[0] - 1, *grid[1:])]


def softmax_that_leaves_out_a_row(name):
    from liger_kernel.ops import softmax

    setattr(softmax, name, OneRowLess(getattr(softmax, name)))
    return LigerSoftmax()


CASES = {
    "element": lambda: Scale(forward="element"),
    "element in backward": lambda: Scale(backward="element"),
    "tail": lambda: Scale(forward="tail"),
    "tail in backward": lambda: Scale(backward="tail"),
    "reads beyond": lambda: RowSums(has_mask=False),
    "no maximum": lambda: Softmax(has_maximum=False),
    "sums and softmax healthy": lambda: nn.Sequential(RowSums(), Softmax()),
    "liger row": lambda: softmax_that_leaves_out_a_row("_softmax_single_block_forward_kernel"),
    "liger row in backward": lambda: softmax_that_leaves_out_a_row("_softmax_single_block_backward_kernel"),
    "healthy": Scale,
    "liger healthy": LigerSoftmax,
}


def main() -> None:
    ctypes.CDLL(None).mallopt(-6, 0x80)  # M_PERTURB: memory from malloc holds 3.4e38
    torch.manual_seed(0)
    guilty = CASES[sys.argv[1]]()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(), guilty, Scale(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rerun = "always" if "healthy" in sys.argv[1] else True
    nanlocator.watch(model, optimizer, rerun=rerun)
    verdict = None
    for _ in range(2):
        model(torch.randn(6, WIDTH)).square().mean().backward()
        try:
            optimizer.step()
        except nanlocator.NonFiniteGradientError as error:
            verdict = error.verdict
            break
        optimizer.zero_grad()
    print(json.dumps(verdict))


if __name__ == "__main__":
    main()
