"""``detect_overflow`` and ``get_abs_min_max``: one tensor, anywhere in a forward or backward."""

import os
import sys
from math import inf, nan

import torch
import torch.distributed as dist

from nanlocator import _C
from nanlocator.calls.modules import local_part
from nanlocator.debugger.frames import finding_lines, values_text
from nanlocator.debugger.output import say
from nanlocator.debugger.scans import measure, plain_values
from nanlocator.debugger.values import Values
from nanlocator.engine.this_rank import is_distributed

_MOST_BUNDLES = 16  # per process and folder, because a loop may have a finding in every step
_bundles_written: dict[str, int] = {}  # by folder

_LABELS = {100: " n100", 1000: "n1000", 10000: "n10000"}  # aligned as in the original


def get_abs_min_max(var: torch.Tensor, ctx: str) -> str:
    """Prints the row of a frame: ``{abs min:8.2e} {abs max:8.2e} ctx``. Any tensor."""
    return values_text(measure(var), ctx)


def detect_overflow(
    var: torch.Tensor,
    ctx: str,
    *,
    n100: bool = False,
    n1000: bool = False,
    n10000: bool = False,
    min_max: bool = False,
    mean_var: bool = False,
    backward: bool = False,
    bundle: str | os.PathLike[str] | None = None,
) -> bool:
    """Prints ``ctx has nans`` and ``ctx has infs`` if ``var`` holds any, and returns whether it does.

        detect_overflow(forwarded_states, "after layer_norm", n10000=True)

    Any dtype and device; integers hold none. Waits for the device.

    Args:
        ctx: printed with each finding.
        n100, n1000, n10000: print how many elements have that magnitude or more, if any has.
        min_max: print the minimum and maximum.
        mean_var: print minimum, maximum, variance and mean; computed in fp64.
        backward: also scan the gradient of ``var`` when backward computes it (as "gradient of ctx",
            with the same options). No effect if ``var`` needs no gradient.
        bundle: a folder. If ``var`` has a NaN or Inf, it is written below the folder as a bundle
            (``bundles/step0-...``, docs/formats.md), whose path is printed: ``nanlocator bundle show`` reads
            it, and ``nanlocator.replay.load(path).arguments[0]`` is the tensor. The bundle has no operator
            call; its module call is named ``ctx``. At most 16 in one folder; a failed write is reported in a
            line on stderr and raises nothing.

    Returns:
        Whether ``var`` has a NaN or Inf. A hook of ``Tensor.register_hook`` must not return it: pass
        ``backward=True`` instead.
    """
    if not isinstance(var, torch.Tensor):
        raise TypeError(f"detect_overflow({ctx!r}): expected a tensor, got {type(var).__name__}")
    thresholds = [n for n, is_wanted in ((100, n100), (1000, n1000), (10000, n10000)) if is_wanted]

    def scan(tensor: torch.Tensor, context: str) -> bool:
        values = measure(tensor)
        for line in finding_lines(values, context):
            say(line)
        if bundle is not None and values.is_bad:
            _write_bundle(tensor, context, bundle)
        if values.magnitudes is not None:
            with torch.no_grad():
                _print_more(tensor.detach(), values, context, thresholds, min_max, mean_var)
        return values.is_bad

    if backward and var.requires_grad:
        var.register_hook(lambda gradient: (scan(gradient, f"gradient of {ctx}"), None)[1])
    return scan(var, ctx)


def _write_bundle(tensor: torch.Tensor, ctx: str, folder: str | os.PathLike[str]) -> None:
    run_dir = os.path.abspath(folder)
    count = _bundles_written.get(run_dir, 0)
    if count >= _MOST_BUNDLES:
        return
    name = f"{ctx} (rank {dist.get_rank()})" if is_distributed() else ctx
    with torch.no_grad():
        call = _C.ModuleCall(name, "detect_overflow", False, (local_part(tensor).detach(),))
        try:
            written = call.write(run_dir)
        except (_C.Error, OSError) as error:
            print(f"nanlocator: detect_overflow({ctx!r}): no bundle was written: {error}", file=sys.stderr)
            return
    _bundles_written[run_dir] = count + 1
    is_last = count + 1 == _MOST_BUNDLES
    say(
        f"{ctx}: the tensor is in "
        f"{run_dir}/{written}{'; no more bundles are written there' if is_last else ''}"
    )


def _print_more(
    tensor: torch.Tensor, values: Values, ctx: str, thresholds: list[int], min_max: bool, mean_var: bool
) -> None:
    if not (thresholds or min_max or mean_var):
        return
    plain = plain_values(local_part(tensor))
    wide = plain.abs().double() if plain.is_complex() else plain.double()  # for fp8 and bool
    for threshold in thresholds:
        count = int((wide.abs() >= threshold).sum())
        if count > 0:
            say(f"{ctx}: {_LABELS[threshold]}={count}")
    if not (min_max or mean_var):
        return
    least, most = _minimum_and_maximum(values, wide)
    if min_max:
        say(f"min={least:9.2e} max={most:9.2e}")
    if mean_var:
        variance = wide.var().item() if wide.numel() > 1 else nan
        say(f"min={least:9.2e} max={most:9.2e} var={variance:9.2e} mean={wide.mean().item():9.2e} ({ctx})")


def _minimum_and_maximum(values: Values, wide: torch.Tensor) -> tuple[float, float]:
    stats = values.stats
    if stats is None or values.dtype.is_complex:
        least, most = torch.aminmax(wide)
        return least.item(), most.item()
    if stats.nan:
        return nan, nan
    # finite_min and finite_max are +Inf and −Inf if no element is finite
    return (-inf if stats.neg_inf else stats.finite_min), (inf if stats.pos_inf else stats.finite_max)
