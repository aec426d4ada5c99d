"""Two runs, field by field and bit by bit; and the run that others are compared with."""

from __future__ import annotations

import json

STEPS = 12

_references: dict[str, list[dict]] = {}


def train(pool, name, layout, preparations=(), faults=(), steps=STEPS, **nanlocator):
    """`steps` steps of `layout` (a test_matrix.Layout), with dropout. `nanlocator`: options of install; none:
    a run without it."""
    return pool.run(
        {
            "name": name,
            "ranks": layout.ranks,
            "steps": steps,
            "training": layout.training | {"dropout": 0.1},
            "nanlocator": nanlocator or None,
            "faults": list(faults),
            "preparations": list(preparations),
            "timeout": 300.0,
        }
    )


def without_nanlocator(pool, layout) -> list[dict]:
    """The ranks of STEPS healthy steps with dropout, trained once for all tests of a session. `layout`: a
    test_matrix.Layout."""
    training = layout.training | {"dropout": 0.1}
    key = json.dumps([layout.ranks, training], sort_keys=True)
    if key not in _references:
        _references[key] = train(pool, f"reference_{len(_references)}", layout).require_success()
    return _references[key]


def differences(ours: list[dict], reference: list[dict]) -> dict[str, list[str]]:
    """What differs on any rank, fields of each step's record and fingerprints at the end: {field: where}."""
    found: dict[str, list[str]] = {}

    def compare(field: str, place: str, value: object, expected: object) -> None:
        if value != expected:
            found.setdefault(field, []).append(f"{place}: {value}, not {expected}")

    for one, other in zip(ours, reference, strict=True):
        rank = f"rank {one['rank']}"
        compare("records", rank, len(one["records"]), len(other["records"]))
        for step, expected in zip(one["records"], other["records"], strict=False):
            for field in (step.keys() | expected.keys()) - {"seconds"}:
                compare(field, f"{rank}, step {step['iteration']}", step.get(field), expected.get(field))
        for field, fingerprint in other["fingerprints"].items():
            compare(field, f"{rank}, at the end", one["fingerprints"][field], fingerprint)
    return found
