"""Two runs, field by field and bit by bit."""

from __future__ import annotations


def differences(ours: list[dict], reference: list[dict]) -> list[str]:
    """What differs on any rank: fields of the records of each step, and of the fingerprints at the end."""
    found = []
    for one, other in zip(ours, reference, strict=True):
        rank = f"rank {one['rank']}"
        if len(one["records"]) != len(other["records"]):
            found.append(f"{rank}: {len(one['records'])} steps, not {len(other['records'])}")
        for step, expected in zip(one["records"], other["records"], strict=False):
            found += [
                f"{rank}, step {step['iteration']}: {field} {step[field]}, not {expected[field]}"
                for field in sorted(step.keys() | expected.keys())
                if field != "seconds" and step.get(field) != expected.get(field)
            ]
        found += [
            f"{rank}, at the end: {name}"
            for name, fingerprint in other["fingerprints"].items()
            if one["fingerprints"][name] != fingerprint
        ]
    return found
