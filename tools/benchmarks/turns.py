"""Variants of a step that take turns on a noisy machine, and their relative cost."""

import json
import math
import statistics
from collections.abc import Callable, Iterable


def take_turns(variants: Iterable[str], run: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round. Each round begins with a different variant, so that none always
    follows the same one."""
    order = list(variants)
    times: dict[str, list[float]] = {variant: [] for variant in order}
    for variant in order:
        run(variant)
    for number in range(rounds):
        first = number % len(order)
        for variant in order[first:] + order[:first]:
            times[variant].append(run(variant))
    return times


def ratio(seconds: list[float], base: list[float]) -> dict[str, float]:
    """Median of seconds / base over the rounds; see ``_middle``."""
    return _middle([a / b for a, b in zip(seconds, base, strict=True)])


def ratio_of_starts(starts: list[dict[str, list[float]]], variant: str, base: str) -> dict[str, float]:
    """Median over process starts of the median of variant / base. The addresses that a process happens to get
    affect all of its rounds, so rounds are not independent of each other; starts are."""
    return _middle([ratio(times[variant], times[base])["median"] for times in starts])


def _middle(ratios: list[float]) -> dict[str, float]:
    """The median, and an interval that covers the true one with 95 %: the order statistics
    n/2 -+ 0.98 sqrt(n) (Conover, Practical Nonparametric Statistics, 3.2)."""
    ratios = sorted(ratios)
    count = len(ratios)
    low = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return {"median": statistics.median(ratios), "low": ratios[low], "high": ratios[count - 1 - low]}


def print_table(times: dict[str, list[float]], ratios: dict[str, dict[str, float]]) -> None:
    width = max(map(len, times))
    for variant, seconds in times.items():
        r = ratios[variant]
        interval = f"  [{r['low']:.3f}, {r['high']:.3f}]" if r["low"] != r["high"] else ""
        print(f"{variant:{width}} {statistics.median(seconds) * 1e3:9.1f} ms {r['median']:7.3f} x{interval}")


def print_result(
    heading: str, starts: list[dict[str, list[float]]], base: str, *, as_json: bool, **facts: object
) -> None:
    """Prints everything relative to the variant ``base``: a table below the heading, or JSON with the facts.
    With a single process start, the ratios are over its rounds."""
    times = {variant: [each for start in starts for each in start[variant]] for variant in starts[0]}
    if len(starts) > 1:
        ratios = {variant: ratio_of_starts(starts, variant, base) for variant in times}
    else:
        ratios = {variant: ratio(seconds, times[base]) for variant, seconds in times.items()}
    if as_json:
        print(json.dumps({**facts, "starts": starts, "ratio": ratios}, indent=1))
    else:
        print(heading)
        print_table(times, ratios)
