"""Makes cases from the ledgers that the suites pass to locate().

A build in build/corpus keeps every set of ledgers on which a verdict is made (tests/corpus/collect.cpp). The
suites run with it, and the corpus takes the sets that show something new:

  1. Values specific to this machine or run (paths, host, run, fingerprints) are replaced by fixed ones, and
     the ledgers are sorted by rank. Sets that are then equal are one case.
  2. The verdict on the stored text must equal the test's. A set with another verdict is left out and named:
     a ledger has changed when it was written and read, or the order has mattered.
  3. A test that draws its incidents makes thousands of sets. For each test and each of these features,
     MOST_ALIKE cases are kept, the shortest first: an origin's cause, owner, confidences, action and kinds of
     facts, and which of its fields are known; the verdict's status, number of origins, facts, re-run and
     restart; which records, keys and process groups the ledgers have.

Sets whose text is longer than a megabyte (jobs of hundreds of ranks) are not kept (collect.cpp).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import platform
import re
import site
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from comparing import changes_between, judge
from storage import ROOT, Case, Corpus, Facts

sys.path.append(str(ROOT / "tests" / "support_matrix"))
from work import CommandFailed, fresh, last_lines, work

BUILD = ROOT / "build" / "corpus"
LOGS = BUILD / "logs"
SUITES = ("cpp", "pytest")
MOST_ALIKE = 2


@dataclasses.dataclass(frozen=True)
class Kept:
    """A set of ledgers as written by a suite."""

    test: str  # "tests/locate/races_test.cpp::Races.AreFound", "tests/pytorch/test_races.py::test_x[1]"
    ranks: int
    facts: Facts  # of the test's verdict
    ledgers: str


@dataclasses.dataclass
class Collection:
    made: int = 0  # sets from the suites
    known: int = 0  # already cases
    alike: int = 0  # with nothing new
    added: list[Case] = dataclasses.field(default_factory=list)
    changed: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # test, difference: see 2. above


# ---- the suites -----------------------------------------------------------------------------------------


def build() -> str | None:
    """The reason if the build fails, else None."""
    configure = ["cmake", "--preset", "release", "-B", BUILD, "-DNANLOCATOR_COLLECT_CORPUS=ON"]
    configure += ["-DNANLOCATOR_BENCHMARKS=OFF", f"-DPython3_EXECUTABLE={ROOT}/.venv/bin/python"]
    log = fresh(LOGS / "build.log")
    try:
        work("configuration", configure, log, _environment())
        work("build", ["cmake", "--build", BUILD, "-j", str(_cores())], log, _environment())
    except CommandFailed as error:
        return f"{last_lines(error.log)}\n\n{error}"
    return None


def run_suites(suites: Iterable[str], pytest_arguments: list[str], folder: Path) -> list[str]:
    """Writes the kept sets to `folder`. Returns the failed suites; their sets count, too."""
    kept, runs = folder / "kept", folder / "runs"
    kept.mkdir()
    variables = _environment() | {"VERDICT_CORPUS": str(kept), "OMP_NUM_THREADS": "1"}
    commands = {
        "cpp": ["ctest", "--test-dir", BUILD, "-L", "cpu", "-j", str(_cores()), "--timeout", "900"],
        "pytest": [
            *(sys.executable, "-m", "pytest", "-q", "-n", str(_cores()), "--dist", "loadfile"),
            *("--no-loadscope-reorder", "-m", "not exhaustive"),
            f"--basetemp={runs}",
            *(pytest_arguments or ["tests"]),
        ],
    }
    failures = []
    for suite in suites:
        try:
            work(suite, commands[suite], fresh(LOGS / f"{suite}.log"), variables)
        except CommandFailed as error:
            failures.append(str(error))
    _read_runs([runs, BUILD / "tests" / "cpp_training" / "nanlocator_run"], kept, variables)
    return failures


def _read_runs(folders: Iterable[Path], kept: Path, variables: dict[str, str]) -> None:
    """Keeps the ledgers of runs that tests left on disk, by reading them with the command."""
    test_of_run = {}
    for each in read_kept(kept):
        if found := re.search(r'"run":"([^"]*)"', each.ledgers):
            test_of_run.setdefault(found[1], each.test)
    for path in sorted({file.parent for folder in folders for file in folder.rglob("ledger_*.jsonl")}):
        text = next(path.glob("ledger_*.jsonl")).read_text(errors="replace")
        found = re.search(r'"run":"([^"]*)"', text)
        test = test_of_run.get(found[1]) if found else None
        if "cpp_training" in path.parts:
            test = "examples/cpp_training/main.cpp::cpp_training"
        if test:
            subprocess.run(
                [BUILD / "bin" / "nanlocator", "report", "--json", path],
                env=variables | {"VERDICT_CORPUS_TEST": test},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def _environment() -> dict[str, str]:
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # as in tools/test
    variables["CCACHE_BASEDIR"] = str(ROOT)
    bin_folders = [str(BUILD / "bin"), str(Path(sys.executable).parent), variables.get("PATH", "")]
    return variables | {"PATH": ":".join(bin_folders), "PYTHONPATH": str(BUILD / "python")}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# ---- the sets that they leave ---------------------------------------------------------------------------


def read_kept(folder: Path) -> Iterator[Kept]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):  # incomplete, of a process that was killed
            continue
        header, _, ledgers = path.read_text(errors="replace").partition("\n")
        fields = json.loads(header)
        yield Kept(fields["test"], fields["ranks"], fields["facts"], ledgers)


def case_of(kept: Kept, places: dict[str, str]) -> Case:
    """`places`: folders of this machine and their replacements."""
    file, _, test = kept.test.partition("::")
    source = Path(file).with_suffix("").as_posix().rpartition("tests/")[2]
    ledgers = neutral(kept.ledgers, places)
    name = hashlib.sha256(f"{kept.ranks}\n{ledgers}".encode()).hexdigest()[:10]
    return Case(name, source or "unknown", re.sub(r" \(\w+\)$", "", test), kept.ranks, ledgers)


def places_of_this_machine(folder: Path) -> dict[str, str]:
    places = {str(folder / "runs"): "/tmp", str(BUILD / "python"): "python", str(ROOT): "."}
    for installed in site.getsitepackages():
        places |= {installed: "site-packages", str(Path(installed).resolve()): "site-packages"}
    places[str(Path(os.__file__).parent)] = "lib/python"
    return dict(sorted(places.items(), key=lambda place: -len(place[0])))


def neutral(ledgers: str, places: dict[str, str]) -> str:
    """The ledgers without values specific to this machine or run, and with checksums of the result."""
    for folder, stands_for in places.items():
        ledgers = ledgers.replace(folder, stands_for)
    ledgers = re.sub(rf'"host":"{re.escape(platform.node())}"', '"host":"host"', ledgers)
    ledgers = re.sub(r'("record":"ledger",.*?"run":)"[^"]*"', r'\1"run"', ledgers)
    ledgers = re.sub(r"/tmp/popen-gw\d+", "/tmp", ledgers)
    ledgers = re.sub(r"\btmp[a-z0-9_]{8}\b", "tmp", ledgers)
    ledgers = re.sub(r"\b0x[0-9a-f]{6,16}\b", "0x0", ledgers)
    numbers: dict[str, int] = {"0" * 16: 0}
    ledgers = re.sub(
        r'(?<="fingerprint":")[0-9a-f]{16}(?=")|(?<=fingerprint )[0-9a-f]{16}',
        lambda found: f"{numbers.setdefault(found[0], len(numbers)):016x}",
        ledgers,
    )
    return "".join(map(_with_checksum, re.split(r'^(?={"record":"ledger")', ledgers, flags=re.MULTILINE)))


def _with_checksum(ledger: str) -> str:
    body, mark, end = ledger.rpartition('{"record":"end",')
    if not mark:
        return ledger
    return body + mark + re.sub(r'(?<="crc32":")\w+', f"{zlib.crc32(body.encode()):08x}", end)


# ---- the choice -----------------------------------------------------------------------------------------


def pack(
    corpus: Corpus, program: Path, kept: Iterable[Kept], places: dict[str, str], renews: bool
) -> Collection:
    """Adds the sets that show something new. `renews`: first removes older cases of the tests that ran."""
    collection = Collection()
    by_source: dict[str, dict[str, tuple[Case, Facts]]] = collections.defaultdict(dict)
    for each in kept:
        collection.made += 1
        case = case_of(each, places)
        by_source[case.source].setdefault(case.name, (case, each.facts))
    known = {name for source in corpus.sources() for name in corpus.facts(source)}
    for source, found in sorted(by_source.items()):
        _pack_source(corpus, program, source, found, known, renews, collection)
    return collection


def _pack_source(
    corpus: Corpus,
    program: Path,
    source: str,
    found: dict[str, tuple[Case, Facts]],
    known: set[str],
    renews: bool,
    collection: Collection,
) -> None:
    cases, records = list(corpus.cases(source)), corpus.facts(source)
    if renews:
        tests = {drawn(case.test) for case, _ in found.values()}
        cases = [case for case in cases if drawn(case.test) not in tests]
        known -= records.keys()
        records = {case.name: records[case.name] for case in cases if case.name in records}
        known |= records.keys()
    shown: collections.Counter[tuple] = collections.Counter()
    for case in cases:
        if case.name in records:
            shown.update(features(case, records[case.name]["facts"]))
    collection.known += len(found.keys() & known)
    new = [pair for name, pair in found.items() if name not in known]
    judged = judge(program, [case for case, _ in new])
    for case, facts in sorted(new, key=lambda pair: (len(pair[0].ledgers), pair[0].name)):
        now = judged[case.name]
        if now.get("facts") != facts:
            how = now.get("error") or ", ".join(map(str, changes_between(facts, now["facts"])))
            collection.changed.append((f"{case.source}: {case.test}", how))
            continue
        shows = features(case, facts)
        if all(shown[each] >= MOST_ALIKE for each in shows):
            collection.alike += 1
            continue
        shown.update(shows)
        known.add(case.name)
        cases.append(case)
        records[case.name] = {**case.header, "facts": facts}
        collection.added.append(case)
    corpus.write_cases(source, cases)
    corpus.write_facts(source, records.values())


def drawn(test: str) -> str:
    """The test without the number of its share of the seeds."""
    return re.sub(r"/\d+$", "", test)


def features(case: Case, facts: Facts) -> set[tuple]:
    """The features of a case, each with its test: see the top of this file."""
    of_origins = {
        (
            *(str(origin.get(key)) for key in _WORDS),
            tuple(sorted(origin.keys())),
            tuple(sorted(set(origin["facts"]))),
        )
        for origin in facts["origins"]
    }
    of_verdict = (
        facts["status"],
        min(len(facts["origins"]), 3),
        tuple(sorted(set(facts.get("facts", [])))),
        str(facts["rerun"]),
        str(facts["job"].get("restart")),
    )
    of_ledgers = tuple(
        frozenset(re.findall(pattern, case.ledgers, re.MULTILINE))
        for pattern in (r'^{"record":"(\w+)"', r'"(\w+)":', r'"group":"(\w*)"', r'"level":"(\w+)"')
    )
    return {(drawn(case.test), *feature) for feature in (*of_origins, of_verdict, of_ledgers)}


_WORDS = (
    *("phase", "direction", "cause", "detail", "owner", "place_confidence", "cause_confidence"),
    *("alternatives", "refutation", "action"),
)
