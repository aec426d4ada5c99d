"""``detect_overflow`` and ``get_abs_min_max``: one tensor, anywhere in a forward or backward."""

from math import inf, nan

import torch

from nanlocator.transformers.frames import finding_lines, values_text
from nanlocator.transformers.values import Values, measure, plain_values

_LABELS = {100: " n100", 1000: "n1000", 10000: "n10000"}  # aligned as in the original


def get_abs_min_max(var: torch.Tensor, ctx: str) -> str:
    """The row of a frame: ``{abs min:8.2e} {abs max:8.2e} ctx``. Any tensor."""
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
) -> bool:
    """Prints ``ctx has nans`` and ``ctx has infs`` where ``var`` holds any, and tells whether it does.

        detect_overflow(forwarded_states, "after layer_norm", n10000=True)

    Any dtype and device; integers hold none. Waits for the device.

    Args:
        ctx: printed with each finding.
        n100, n1000, n10000: print how many elements have that magnitude or more, if any has.
        min_max: print the minimum and maximum.
        mean_var: print minimum, maximum, variance and mean; computed in fp64.
        backward: also look at the gradient of ``var`` when backward computes it (as "gradient of ctx",
            with the same options). Nothing to see where ``var`` needs no gradient.

    Returns:
        Whether ``var`` has a NaN or Inf. A hook of ``Tensor.register_hook`` must not return it: pass
        ``backward=True`` instead.
    """
    if not isinstance(var, torch.Tensor):
        raise TypeError(f"detect_overflow({ctx!r}): expected a tensor, got {type(var).__name__}")
    thresholds = [n for n, is_wanted in ((100, n100), (1000, n1000), (10000, n10000)) if is_wanted]

    def look(tensor: torch.Tensor, context: str) -> bool:
        values = measure(tensor)
        for line in finding_lines(values, context):
            print(line)
        if values.magnitudes is not None:
            with torch.no_grad():
                _print_more(tensor.detach(), values, context, thresholds, min_max, mean_var)
        return values.is_bad

    if backward and var.requires_grad:
        var.register_hook(lambda gradient: (look(gradient, f"gradient of {ctx}"), None)[1])
    return look(var, ctx)


def _print_more(
    tensor: torch.Tensor, values: Values, ctx: str, thresholds: list[int], min_max: bool, mean_var: bool
) -> None:
    if not (thresholds or min_max or mean_var):
        return
    plain = plain_values(tensor)
    wide = plain.abs().double() if plain.is_complex() else plain.double()  # fp8 and bool compare only so
    for threshold in thresholds:
        count = int((wide.abs() >= threshold).sum())
        if count > 0:
            print(f"{ctx}: {_LABELS[threshold]}={count}")
    if not (min_max or mean_var):
        return
    least, most = _minimum_and_maximum(values, wide)
    if min_max:
        print(f"min={least:9.2e} max={most:9.2e}")
    if mean_var:
        variance = wide.var().item() if wide.numel() > 1 else nan
        print(f"min={least:9.2e} max={most:9.2e} var={variance:9.2e} mean={wide.mean().item():9.2e} ({ctx})")


def _minimum_and_maximum(values: Values, wide: torch.Tensor) -> tuple[float, float]:
    stats = values.stats
    if stats is None or values.dtype.is_complex:
        least, most = torch.aminmax(wide)
        return least.item(), most.item()
    if stats.nan:
        return nan, nan
    # finite_min and finite_max are +Inf and −Inf where nothing is finite
    return (-inf if stats.neg_inf else stats.finite_min), (inf if stats.pos_inf else stats.finite_max)
