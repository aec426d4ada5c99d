"""Detects changes of verdicts while code is moved around.

tests/corpus has the ledgers on which tests, simulators, recorded files and examples make verdicts, and the
facts of each verdict: place, cause, confidences, action, kinds of evidence, and no sentence. After a change
that should leave verdicts alone, all facts are as stored; after any other change, this command shows the
differences.

examples:
  tools/corpus                              compares all; a table of the differences
  tools/corpus --json                       the same for programs
  tools/corpus show 3f2a9c01e2              one case: its ledgers in short, and its facts
  tools/corpus show 3f2a9c01e2 --ledgers    its ledgers, as in a run's file, for nanlocator report
  tools/corpus --accept                     the differences are right: writes them into tests/corpus/facts
  tools/corpus --accept 3f2a9c01e2          the same for these cases only
  tools/corpus --collect                    runs both suites, stores cases that show something new
  tools/corpus --collect cpp                only the C++ suite
  tools/corpus --collect pytest -- tests/pytorch -k races
  tools/corpus --collect cpp --renew        replaces the cases of the tests that ran: after a change of the
                                            ledgers' content

Exit status: 0 all facts are as stored, 1 some are not, 2 wrong use.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import collecting
from comparing import Comparison, Difference, compare
from storage import CORPUS, ROOT, Case, Corpus

PROGRAM = ROOT / "build" / "release" / "bin" / "nanlocator_corpus"


def main() -> int:
    words, for_pytest = split(sys.argv[1:])
    if words[:1] == ["show"]:
        return show(words[1:])
    arguments = parse(words, for_pytest)
    corpus = Corpus(arguments.folder)
    if arguments.collect is not None:
        return collect(corpus, arguments.collect or list(collecting.SUITES), for_pytest, arguments)
    return compare_all(corpus, arguments)


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Words after -- are pytest's arguments."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def parse(words: list[str], for_pytest: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--accept",
        nargs="*",
        metavar="CASE",
        help="store today's facts of these cases, or of all",
    )
    parser.add_argument(
        "--collect", nargs="*", choices=collecting.SUITES, metavar="SUITE", help="cpp, pytest; default: both"
    )
    parser.add_argument(
        "--kept", type=Path, metavar="DIR", help="with --collect: sets that an earlier run could not store"
    )
    parser.add_argument("--renew", action="store_true", help="with --collect: drop older cases of its tests")
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument(
        "--program",
        type=lambda text: Path(text).resolve(),
        help="nanlocator_corpus of another build (default: build/release, built first)",
    )
    parser.add_argument("--folder", type=Path, default=CORPUS, help="default: tests/corpus")
    arguments = parser.parse_args(words)
    if arguments.collect is not None and arguments.accept is not None:
        parser.error("--collect adds cases; --accept changes the facts of those that are there")
    if for_pytest and "pytest" not in (arguments.collect or []):
        parser.error("arguments after -- are pytest's: --collect pytest -- ...")
    if (arguments.renew or arguments.kept) and arguments.collect is None:
        parser.error("--renew and --kept belong to --collect")
    return arguments


def built(program: Path | None) -> Path:
    """The named program, or this checkout's, built if needed. A build without tests has none and is
    completed."""
    if program:
        return program
    configured = ROOT / "build" / "release" / "configured"
    is_whole = configured.exists() and configured.read_text().strip() == "whole"
    subprocess.run([ROOT / "tools" / "setup", *(["nanlocator_corpus"] if is_whole else [])], check=True)
    return PROGRAM


# ---- comparing ------------------------------------------------------------------------------------------


def compare_all(corpus: Corpus, arguments: argparse.Namespace) -> int:
    program, started = built(arguments.program), time.monotonic()
    comparison = compare(corpus, program, show_progress)
    seconds = time.monotonic() - started
    if arguments.accept is not None:
        return accept(corpus, comparison, arguments.accept)
    if arguments.json:
        differences = [without_facts(each) for each in comparison.differences]
        print(json.dumps({"cases": comparison.cases, "seconds": round(seconds, 1), "different": differences}))
    else:
        print_table(comparison.differences)
        verdict = f"{len(comparison.differences)} differ" if comparison.differences else "all as stored"
        print(f"{comparison.cases} verdicts compared in {seconds:.1f} s: {verdict}")
    return 1 if comparison.differences else 0


def show_progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        end = "\r\033[K" if done == of else ""
        print(f"\r\033[K  {done} of {of} files of cases ...{end}", end="", file=sys.stderr, flush=True)


def without_facts(difference: Difference) -> dict:
    fields = dataclasses.asdict(difference)
    del fields["now"]
    return fields


def print_table(differences: list[Difference]) -> None:
    for each in differences:
        print(f"{each.case}  {each.source}: {each.test}, {each.ranks} rank{'s' if each.ranks > 1 else ''}")
        rows = [("", "was", "is"), *((change.where, change.was, change.now) for change in each.changes)]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for row in rows:
            print(f"    {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}")
        print()
    kinds = collections.Counter()
    for each in differences:
        kinds.update({change.kind for change in each.changes})
    if repeated := [(kind, count) for kind, count in kinds.most_common() if count > 1]:
        print("the same in several cases:")
        for (where, was, now), count in repeated:
            print(f"    {count:5}  {where}: {was} -> {now}")
        print()


def accept(corpus: Corpus, comparison: Comparison, names: list[str]) -> int:
    different = {each.case: each for each in comparison.differences}
    if unknown := [name for name in names if name not in different]:
        print(f"tools/corpus: does not differ, or is no case: {', '.join(unknown)}", file=sys.stderr)
        return 2
    accepted = [different[name] for name in names] if names else comparison.differences
    for source in {each.source for each in accepted}:
        records = corpus.facts(source)
        for each in accepted:
            if each.source == source:
                records[each.case] = {"case": each.case, "test": each.test, "ranks": each.ranks}
                records[each.case]["facts"] = each.now
        corpus.write_facts(source, (record for record in records.values() if record["facts"] is not None))
    print_table(accepted)
    print(f"{len(accepted)} accepted; git diff tests/corpus/facts shows them")
    return 0


# ---- collecting -----------------------------------------------------------------------------------------


def collect(corpus: Corpus, suites: list[str], for_pytest: list[str], arguments: argparse.Namespace) -> int:
    os.chdir(ROOT)
    if problem := collecting.build():
        print(problem, file=sys.stderr)
        return 1
    folder, made, failures = arguments.kept, None, []
    if folder is None:
        folder = made = Path(tempfile.mkdtemp(prefix="nanlocator-corpus-"))
        print(f"collecting into {folder}, which --kept reads if storing fails", file=sys.stderr)
        failures = collecting.run_suites(suites, for_pytest, folder)
    collection = collecting.pack(
        corpus,
        arguments.program or collecting.BUILD / "bin" / "nanlocator_corpus",
        collecting.read_kept(folder / "kept"),
        collecting.places_of_this_machine(folder),
        arguments.renew,
    )
    if made:
        shutil.rmtree(made)
    if arguments.json:
        fields = dataclasses.asdict(collection) | {"added": [case.header for case in collection.added]}
        print(json.dumps(fields | {"failures": failures}))
    else:
        print_collection(collection, failures)
    return 1 if failures or collection.changed else 0


def print_collection(collection: collecting.Collection, failures: list[str]) -> None:
    counts = collections.Counter(case.source for case in collection.added)
    for source, count in sorted(counts.items()):
        print(f"    {count:5}  {source}")
    print(
        f"{collection.made} sets of ledgers: {len(collection.added)} added, {collection.known} known, "
        f"{collection.alike} like two others of their test, {len(collection.changed)} left out"
    )
    for test, how in collection.changed:
        print(f"    left out, as the verdict on the stored text is another: {test}\n        {how}")
    for failure in failures:
        print(f"    {failure}")


# ---- one case -------------------------------------------------------------------------------------------


def show(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/corpus show", description="One case of the corpus.")
    parser.add_argument("case", help="3f2a9c01e2")
    parser.add_argument("--ledgers", action="store_true", help="the ledgers themselves, as JSON lines")
    parser.add_argument("--folder", type=Path, default=CORPUS, help="default: tests/corpus")
    arguments = parser.parse_args(words)
    corpus = Corpus(arguments.folder)
    source, record = find(corpus, arguments.case)
    if source is None:
        print(f"tools/corpus: there is no case {arguments.case}", file=sys.stderr)
        return 2
    case = next(case for case in corpus.cases(source) if case.name == arguments.case)
    if arguments.ledgers:
        sys.stdout.write(case.ledgers)
        return 0
    print(f"{case.name}  {case.source}: {case.test}, {case.ranks} ranks\n")
    print_ledgers(case)
    print("\nfacts:")
    print_facts(record["facts"], "  ")
    return 0


def find(corpus: Corpus, name: str) -> tuple[str | None, dict]:
    for source in corpus.sources():
        if record := corpus.facts(source).get(name):
            return source, record
    return None, {}


def print_ledgers(case: Case) -> None:
    """One line per ledger: its rank, its records of each kind, and whether it was cut off."""
    for text in re.split(r'^(?={"record":"ledger")', case.ledgers, flags=re.MULTILINE)[1:]:
        records = [json.loads(each) for each in text.splitlines()]
        header, kinds = records[0], collections.Counter(record["record"] for record in records[1:])
        place = " ".join(
            f"{axis}{header['coordinates'][axis]['rank']}"
            for axis in ("tp", "pp", "dp", "cp", "ep")
            if header["coordinates"][axis]["size"] > 1
        )
        is_whole = kinds.pop("end", 0)
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        cut_off = "" if is_whole else ", cut off"
        print(f"rank {header['coordinates']['rank']} {place} ({header['level']}): {said}{cut_off}")
        for record in records:
            if record["record"] == "sighting":
                what = record["parameter"] or record["module"] or record["operator"]
                microbatch = "" if record["microbatch"] is None else f", microbatch {record['microbatch']}"
                print(f"    {record['phase']}{microbatch}: {record['role']} of {what}")


def print_facts(facts: dict, indent: str) -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{indent}{key}:")
            print_facts(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, each in enumerate(value):
                print(f"{indent}{key}[{i}]:")
                print_facts(each, indent + "  ")
        else:
            print(f"{indent}{key}: {', '.join(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    sys.exit(main())
