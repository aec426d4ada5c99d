"""Compares two runs, field by field and bit by bit; also has the reference run."""

from __future__ import annotations

import json

STEPS = 4

_references: dict[str, list[dict]] = {}


def train(pool, name, layout, preparations=(), faults=(), steps=STEPS, **nanlocator):
    """Trains `steps` steps of `layout` (a test_matrix.Layout), with dropout. `nanlocator`: options of
    install; none: a run without it."""
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


def without_nanlocator(pool, layout, steps=STEPS, preparations=()) -> list[dict]:
    """The ranks of healthy steps with dropout, trained once for all tests of a session. `layout`: a
    test_matrix.Layout."""
    key = json.dumps([layout.ranks, layout.training, steps, preparations], sort_keys=True)
    if key not in _references:
        name = f"reference_{len(_references)}"
        _references[key] = train(pool, name, layout, preparations, steps=steps).require_success()
    return _references[key]


def differences(ours: list[dict], reference: list[dict]) -> dict[str, list[str]]:
    """Differences on any rank between fields of each step's record and fingerprints at the end: {field:
    location}."""
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


def passes_of(rank, layout):
    """Number of executions of each step of the run (preparation note_each_forward)."""
    forwards = layout.training["num_microbatches"] * (layout.training.get("vp") or 1)
    passes = []
    for record in rank["records"]:
        count = sum(fact["iteration"] == record["iteration"] for fact in rank["planted"])
        assert count % forwards == 0
        passes.append(count // forwards)
    return passes
