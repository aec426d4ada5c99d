"""Judges cases with nanlocator_corpus (tests/corpus/compare_verdicts.cpp) and lists the differences."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from storage import Case, Corpus, Facts


@dataclasses.dataclass(frozen=True)
class Change:
    where: str  # "origins[0].cause"
    was: str
    now: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """Equal for the same change in several cases, in any origin."""
        return re.sub(r"\[\d+\]", "[]", self.where), self.was, self.now


@dataclasses.dataclass(frozen=True)
class Difference:
    case: str
    source: str
    test: str
    ranks: int
    changes: list[Change]
    now: Facts | None  # None: without ledgers, or without a verdict on them


@dataclasses.dataclass(frozen=True)
class Comparison:
    cases: int
    differences: list[Difference]


def judge_text(program: Path, text: str) -> dict[str, dict[str, Any]]:
    """By case: {"facts": ...}, or {"error": text}."""
    done = subprocess.run([program], input=text.encode(), capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    records = (json.loads(each) for each in done.stdout.splitlines())
    return {record.pop("case"): record for record in records}


def judge(program: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    return judge_text(program, "".join(case.text for case in cases))


def compare(corpus: Corpus, program: Path, show_progress: Callable[[int, int], None]) -> Comparison:
    """Compares the stored facts with today's; files of cases are judged in parallel."""
    sources = corpus.sources()
    found: list[tuple[int, list[Difference]]] = []
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        tasks = [pool.submit(_compare_source, corpus, program, source) for source in sources]
        for task in concurrent.futures.as_completed(tasks):
            found.append(task.result())
            show_progress(len(found), len(sources))
    differences = [each for _, some in found for each in some]
    return Comparison(
        sum(count for count, _ in found),
        sorted(differences, key=lambda each: (each.source, each.test, each.case)),
    )


def _compare_source(corpus: Corpus, program: Path, source: str) -> tuple[int, list[Difference]]:
    stored, now = corpus.facts(source), judge_text(program, corpus.text(source))
    tests = None
    differences = []
    for name in stored.keys() | now.keys():
        was, judged = stored.get(name), now.get(name)
        if was and judged and was["facts"] == judged.get("facts"):
            continue
        if was is None:  # the only reason to read the ledgers
            tests = tests or {case.name: case for case in corpus.cases(source)}
        test, ranks = (was["test"], was["ranks"]) if was else (tests[name].test, tests[name].ranks)
        changes = list(_changes(was, judged))
        differences.append(Difference(name, source, test, ranks, changes, (judged or {}).get("facts")))
    return len(stored.keys() | now.keys()), differences


def _changes(was: dict[str, Any] | None, judged: dict[str, Any] | None) -> Iterator[Change]:
    if was is None:
        yield Change("facts", "none stored", "error: " + judged["error"] if "error" in judged else "some")
    elif judged is None:
        yield Change("ledgers", "stored", "none")
    elif "error" in judged:
        yield Change("verdict", "facts", "error: " + judged["error"])
    else:
        yield from changes_between(was["facts"], judged["facts"])


def changes_between(was: Any, now: Any, where: str = "") -> Iterator[Change]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from changes_between(was.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif _is_list_of_objects(was) and _is_list_of_objects(now):
        for i in range(max(len(was), len(now))):
            pair = [values[i] if i < len(values) else None for values in (was, now)]
            yield from changes_between(*pair, f"{where}[{i}]")
    elif isinstance(was, list) and isinstance(now, list):
        gone = collections.Counter(was) - collections.Counter(now)
        added = collections.Counter(now) - collections.Counter(was)
        if gone or added:
            yield Change(where, *(", ".join(sorted(some.elements())) or "-" for some in (gone, added)))
        elif was != now:
            yield Change(where, ", ".join(was), ", ".join(now))
    elif was != now:
        yield Change(where, _text(was), _text(now))


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict) and "cause" in value:  # an origin that exists on one side only
        return f"{value['cause']} in {value['phase']} on {value.get('candidates', 'no rank')}"
    return value if isinstance(value, str) else json.dumps(value)
