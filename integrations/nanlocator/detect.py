"""The one-line check: ``nanlocator.detect(hidden, "after the MLP")``."""

import sys

import torch

from nanlocator import _C


def detect(
    tensor: "torch.Tensor | None", name: str = "tensor", *, raise_error: bool = False, backward: bool = False
) -> bool:
    """Returns whether ``tensor`` holds a NaN or Inf, and prints one line to stderr if it does.

        hidden = self.mlp(hidden)
        nanlocator.detect(hidden, "after the MLP")

    Any device and dtype; None, integers and empty tensors are fine. The tensor is not changed, and autograd
    records nothing. Waits for the device, so use it in a few places while debugging;
    :class:`LocatingOptimizer` watches training without such waits.

    Args:
        name: printed with the finding.
        raise_error: raise FloatingPointError with that line instead of printing it.
        backward: also scan the gradient of ``tensor`` when backward computes it (the gradient of the
            whole loss, summed over all uses of ``tensor``).
    """
    if tensor is None:
        return False
    if backward and tensor.requires_grad:
        _scan_gradient(tensor, name, raise_error)
    return _scan(tensor, name, raise_error)


def _scan(tensor: torch.Tensor, name: str, raise_error: bool, module: str | None = None) -> bool:
    stats = _C.scan_one(tensor)
    if stats is None or stats.is_finite:
        return False
    text = _describe(tensor, stats, name, module or _C.current_module())
    if raise_error:
        raise FloatingPointError(text)
    print(text, file=sys.stderr, flush=True)
    return True


def _scan_gradient(tensor: torch.Tensor, name: str, raise_error: bool) -> None:
    module = _C.current_module()  # the forward's: backward runs outside of modules

    def scan(gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[output]
        if gradient is not None:
            _scan(gradient, f"gradient of {name}", raise_error, module)

    if tensor.grad_fn is None:  # a leaf: its node is created at the first use
        tensor.register_hook(lambda g: scan((g,)))
        output = 0
    else:
        output = tensor.output_nr
        tensor.grad_fn.register_prehook(scan)


def _describe(tensor: torch.Tensor, stats: _C.TensorStats, name: str, module: str | None) -> str:
    counts = {"NaN": stats.nan, "+Inf": stats.pos_inf, "-Inf": stats.neg_inf}
    counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    shape = list(tensor.shape)
    has_parts = tensor.is_complex()  # parts are counted singly, as one more dimension
    sizes = [*shape, 2] if has_parts else shape
    where = f"first bad element {_unravel(stats.first_bad, sizes)}"
    if tensor.layout is not torch.strided:
        where = f"first bad stored value {stats.first_bad}"
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f"rank {torch.distributed.get_rank()}: "
    finite = stats.numel - stats.nan - stats.pos_inf - stats.neg_inf
    largest = f"finite |x| <= {stats.absmax:.4g}" if finite else "nothing finite"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (
        f"nanlocator: {rank}{name}{f' (in {module})' if module else ''} {dtype} {shape} on {tensor.device}: "
        f"{counted} of {stats.numel}; {where}; {largest}"
    )


def _unravel(flat: int, sizes: list[int]) -> list[int]:
    index: list[int] = []
    for size in reversed(sizes):
        index.append(flat % size)
        flat //= size
    return index[::-1]
