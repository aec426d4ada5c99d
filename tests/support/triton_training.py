"""One training step of a model with Triton kernels, on the GPU or under the interpreter, for each case.
Writes the verdict, or null, to CASE.json, and stderr to CASE.err.

[TRITON_INTERPRET=1] python triton_training.py CASE...
"""

import functools
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import nn
from triton.language.extra import libdevice

import nanlocator
from nanlocator.calls.kernels import KernelCalls

WIDTH = 9
BLOCK = 8
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    import numpy
    from kernel_models import kernels
    from triton.runtime import interpreter


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
    """Sums the left columns of a buffer as wide as a block, whose other columns are NaN."""

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


# --- kernels of libraries ---

# Case -> module, the replaced source (once), the replacement: a launch with one program less, which leaves
# out the last row, or a kernel that adds NaN in one row.
_NAN_IN_ROW_3 = ' + tl.where({} == 3, float("nan"), 0.0)'
PLANTED = {
    "liger softmax": (
        "liger_kernel.ops.softmax",
        "forward_kernel[(n_rows,)]",
        "forward_kernel[(n_rows - 1,)]",
    ),
    "liger softmax in backward": (
        "liger_kernel.ops.softmax",
        "backward_kernel[(n_rows,)]",
        "backward_kernel[(n_rows - 1,)]",
    ),
    "liger rms_norm": (
        "liger_kernel.ops.rms_norm",
        "_rms_norm_forward_kernel[(n_rows,)]",
        "_rms_norm_forward_kernel[(n_rows - 1,)]",
    ),
    "liger layer_norm": ("liger_kernel.ops.layer_norm", "grid = (n_rows,)", "grid = (n_rows - 1,)"),
    "liger layer_norm in backward": (
        "liger_kernel.ops.layer_norm",
        "math.ceil(n_rows / sm_count)",
        "math.ceil(n_rows / sm_count) - 1",
    ),
    "liger swiglu": (
        "liger_kernel.ops.swiglu",
        "_swiglu_forward_kernel[(n_rows,)]",
        "_swiglu_forward_kernel[(n_rows - 1,)]",
    ),
    "liger geglu": (
        "liger_kernel.ops.geglu",
        "_geglu_tanh_forward_kernel[(n_rows,)]",
        "_geglu_tanh_forward_kernel[(n_rows - 1,)]",
    ),
    "liger rope": (
        "liger_kernel.ops.rope",
        "q_tile_1 * cos_row - q_tile_2 * sin_row",
        "q_tile_1 * cos_row - q_tile_2 * sin_row" + _NAN_IN_ROW_3.format("pid"),
    ),
    "liger rope in backward": (
        "liger_kernel.ops.rope",
        "q_tile_1 * cos_row + q_tile_2 * sin_row",
        "q_tile_1 * cos_row + q_tile_2 * sin_row" + _NAN_IN_ROW_3.format("pid"),
    ),
    "liger cross_entropy": (
        "liger_kernel.ops.cross_entropy",
        "dx_y = softmax_X_y",
        "dx_y = softmax_X_y" + _NAN_IN_ROW_3.format("program_id"),
    ),
    "fla l2norm": (
        "fla.modules.norm.l2norm",
        'return (triton.cdiv(T, meta["BT"]),)',
        'return (triton.cdiv(T, meta["BT"]) - 1,)',
    ),
}


# What these kernels need and Triton 3.6's interpreter lacks.
if IS_INTERPRETED:

    def float_as_compiled(argument, convert=interpreter._implicit_cvt):
        """Converts a float to a tensor, on which Liger calls ``to``."""
        if type(argument) is not float:
            return convert(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    def tensors_with_an_index(tensor, scope, patch=interpreter._patch_lang_tensor):
        """Makes an index from an array of one element, which NumPy 2.4 no longer converts."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def rsqrt(x):
        return tl.rsqrt(x)

    def tanh(x):
        return 2 * tl.sigmoid(2 * x) - 1

    interpreter._implicit_cvt = float_as_compiled
    interpreter._patch_lang_tensor = tensors_with_an_index
    libdevice.rsqrt, libdevice.tanh = rsqrt, tanh  # the interpreter's return None


def library(case):
    """The module of ``case``: healthy, or loaded from a file with the bug on the same line."""
    name, healthy, bug = PLANTED[case.removesuffix(" healthy")]
    importlib.import_module(name)
    if not case.endswith("healthy"):
        source = Path(sys.modules[name].__file__).read_text()
        assert healthy in source
        file = Path(f"{name.rpartition('.')[2]}.py")
        file.write_text(source.replace(healthy, bug, 1))
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class LibraryKernel(nn.Module):
    """A kernel of PLANTED; with " healthy" after the ``case``, without its bug."""

    def __init__(self, case):
        super().__init__()
        self.module, self.kernel = library(case), case.split()[1]
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return getattr(self, self.kernel)(x)

    def softmax(self, x):
        return self.module.LigerSoftmaxFunction.apply(x)

    def rms_norm(self, x):
        return self.module.LigerRMSNormFunction.apply(x, self.weight, 1e-6)

    def layer_norm(self, x):
        return self.module.LigerLayerNormFunction.apply(x, self.weight, self.bias, 1e-5)

    def swiglu(self, x):
        return self.module.LigerSiLUMulFunction.apply(x, x.flip(0))

    def geglu(self, x):
        return self.module.LigerGELUMulFunction.apply(x, x.flip(0))

    def rope(self, x):
        """Rotates two heads of four, in the first eight columns."""
        q = x[:, :8].reshape(1, len(x), 2, 4).transpose(1, 2)
        angles = torch.outer(torch.arange(len(x)), torch.tensor([1.0, 0.1])).repeat(1, 2)[None]
        q, k = self.module.LigerRopeFunction.apply(q, q.flip(2), angles.cos(), angles.sin())
        return torch.cat([(q + k).transpose(1, 2).reshape(len(x), 8), x[:, 8:]], dim=1)

    def cross_entropy(self, x):
        labels = torch.arange(len(x)) % WIDTH
        loss, *_ = self.module.LigerCrossEntropyFunction.apply(
            x.clone(), labels, None, -100, 0.0, 0.0, "mean"
        )
        return x + loss

    def l2norm(self, x):
        """Normalises thirds of the rows in three programs of eight. Autotuning would time them on a GPU."""
        for kernel in (self.module.l2norm_fwd_kernel, self.module.l2norm_bwd_kernel):
            kernel.configs = [config for config in kernel.configs if config.kwargs["BT"] == 8][:1]
        return self.module.l2norm(x.reshape(-1, 3)).reshape(x.shape)


CASES = {
    "element": lambda: Scale(forward="element"),
    "element in backward": lambda: Scale(backward="element"),
    "tail": lambda: Scale(forward="tail"),
    "tail in backward": lambda: Scale(backward="tail"),
    "reads beyond": lambda: RowSums(has_mask=False),
    "no maximum": lambda: Softmax(has_maximum=False),
    "healthy": lambda: nn.Sequential(Scale(), RowSums(), Softmax()),
    **{case: functools.partial(LibraryKernel, case) for case in PLANTED},
    "libraries healthy": lambda: nn.Sequential(
        *(LibraryKernel(f"{case} healthy") for case in PLANTED if "backward" not in case)
    ),
}


def spoil_memory():
    """Fills later allocations with NaN."""
    if IS_INTERPRETED:
        kernels.spoil_memory(True)
        return
    torch.set_default_device("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)


def verdict_of(case):
    spoil_memory()
    torch.manual_seed(0)
    guilty = CASES[case]()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(), guilty, Scale(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    nanlocator.watch(model, optimizer, rerun="always" if "healthy" in case else True)
    for _ in range(2):
        model(torch.randn(6, WIDTH)).square().mean().backward()
        try:
            optimizer.step()
        except nanlocator.NonFiniteGradientError as error:
            return error.verdict
        optimizer.zero_grad()
    return None


def main() -> None:
    """Runs each case in a process of its own. Interpreted cases run one after another and inherit imports and
    look-ups from this process. On a GPU all run at once, and nothing is imported here: the libraries' imports
    use the GPU, and then no process may fork."""
    cases = sys.argv[1:]
    if IS_INTERPRETED:
        for planted in PLANTED if "libraries healthy" in cases else [c for c in cases if c in PLANTED]:
            importlib.import_module(PLANTED[planted][0])
        importlib.import_module("torch._dynamo")  # an optimizer imports it
        KernelCalls().remove()
    running, failed = {}, []
    for case in cases:
        child = os.fork()
        if not child:
            with open(f"{case}.err", "w") as errors:
                os.dup2(errors.fileno(), 2)
            Path(f"{case}.json").write_text(json.dumps(verdict_of(case)))
            return
        running[child] = case
        while running and (IS_INTERPRETED or case is cases[-1]):
            child, status = os.wait()
            ended = running.pop(child)
            if status:
                failed.append(f"{ended}: exit status {status}\n{Path(f'{ended}.err').read_text()[-3000:]}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
