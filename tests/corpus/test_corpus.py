"""tools/corpus: which changes it sees, what it reports, and what it adds to the corpus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import collecting
import pytest
from storage import CORPUS, Case, Corpus

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(__file__).with_name("corpus.py")
PROGRAM = shutil.which("nanlocator_corpus") or ROOT / "build" / "release" / "bin" / "nanlocator_corpus"
SOURCE = "locate/races_test"


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """One file of the corpus, in a folder of its own."""
    copy = Corpus(tmp_path)
    stored = Corpus(CORPUS)
    copy.write_cases(SOURCE, stored.cases(SOURCE))
    copy.write_facts(SOURCE, stored.facts(SOURCE).values())
    return copy


def run(corpus: Corpus, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, COMMAND, "--program", PROGRAM, "--folder", corpus.folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def plant(corpus: Corpus, **facts: str) -> dict:
    """Changes these facts of the first origin of the first case that has one; returns the record as it
    was."""
    records = corpus.facts(SOURCE)
    record = next(record for record in records.values() if record["facts"]["origins"])
    before = json.loads(json.dumps(record))
    record["facts"]["origins"][0].update(facts)
    corpus.write_facts(SOURCE, records.values())
    return before


def test_what_is_as_stored_is_silent(corpus):
    done = run(corpus)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"\d+ verdicts compared in \d+\.\d s: all as stored\n", done.stdout)
    assert int(done.stdout.split()[0]) == len(corpus.facts(SOURCE)) > 5


def test_a_stored_fact_that_was_changed_is_shown_with_what_was_and_what_is(corpus):
    before = plant(corpus, cause="bad_input", owner="data")
    done = run(corpus)
    assert done.returncode == 1
    origin = before["facts"]["origins"][0]
    assert f"{before['case']}  {SOURCE}: {before['test']}" in done.stdout
    assert re.search(rf"origins\[0\]\.cause +bad_input +{origin['cause']}\n", done.stdout)
    assert re.search(rf"origins\[0\]\.owner +data +{origin['owner']}\n", done.stdout)
    assert done.stdout.endswith(": 1 differ\n")


def test_the_difference_as_json_names_case_place_and_both_values(corpus):
    before = plant(corpus, module="elsewhere")
    done = run(corpus, "--json")
    assert done.returncode == 1
    (difference,) = json.loads(done.stdout)["different"]
    assert difference["case"] == before["case"]
    module = before["facts"]["origins"][0]["module"]
    assert difference["changes"] == [{"where": "origins[0].module", "was": "elsewhere", "now": module}]


def test_a_lost_ledger_changes_its_case_alone(corpus):
    first, *rest = corpus.cases(SOURCE)
    lines = first.ledgers.splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"record":"ledger"' in line)
    mutated = Case(first.name, first.source, first.test, first.ranks, "".join(lines[:last]))
    corpus.write_cases(SOURCE, [mutated, *rest])
    done = run(corpus, "--json")
    assert done.returncode == 1
    (difference,) = json.loads(done.stdout)["different"]
    assert difference["case"] == first.name
    assert {"where": "status", "was": "located", "now": "partial"} in difference["changes"]


def test_ledgers_that_cannot_be_judged_are_a_difference(corpus):
    first, *rest = corpus.cases(SOURCE)
    corpus.write_cases(SOURCE, [Case(first.name, first.source, first.test, 1, first.ledgers), *rest])
    done = run(corpus)
    assert done.returncode == 1
    assert "error: " in done.stdout and first.name in done.stdout


def test_a_case_without_facts_and_facts_without_a_case_are_differences(corpus):
    first, second, *rest = corpus.cases(SOURCE)
    corpus.write_cases(SOURCE, [second, *rest])
    corpus.write_facts(
        SOURCE, [record for name, record in corpus.facts(SOURCE).items() if name != second.name]
    )
    done = run(corpus, "--json")
    changes = {each["case"]: each["changes"][0] for each in json.loads(done.stdout)["different"]}
    assert changes == {
        first.name: {"where": "ledgers", "was": "stored", "now": "none"},
        second.name: {"where": "facts", "was": "none stored", "now": "some"},
    }


def test_what_is_accepted_is_as_stored_from_then_on(corpus):
    stored = corpus.facts(SOURCE)
    before = plant(corpus, cause="bad_input")
    assert run(corpus, "--accept", "0123456789").returncode == 2  # no such case
    assert run(corpus).returncode == 1
    assert run(corpus, "--accept", before["case"]).returncode == 0
    assert run(corpus).returncode == 0
    assert corpus.facts(SOURCE) == stored


def test_a_case_is_shown_with_its_ledgers_and_facts(corpus):
    record = next(record for record in corpus.facts(SOURCE).values() if record["facts"]["origins"])
    done = subprocess.run(
        [sys.executable, COMMAND, "show", record["case"], "--folder", corpus.folder],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{SOURCE}: {record['test']}, {record['ranks']} ranks" in done.stdout
    assert "rank 0" in done.stdout
    assert f"cause: {record['facts']['origins'][0]['cause']}" in done.stdout


# ---- additions to the corpus ----


def kept(corpus: Corpus, **changed: str) -> collecting.Kept:
    """The output of a test that made the first case's ledgers, with other text in these keys."""
    case = next(corpus.cases(SOURCE))
    ledgers = case.ledgers
    for key, value in changed.items():
        ledgers, count = re.subn(rf'"{key}":"[^"]*"', f'"{key}":"{value}"', ledgers)
        assert count
    facts = corpus.facts(SOURCE)[case.name]["facts"]
    return collecting.Kept("/anywhere/tests/locate/races_test.cpp::Races.X", case.ranks, facts, ledgers)


def pack(corpus: Corpus, *sets: collecting.Kept, renews: bool = False) -> collecting.Collection:
    return collecting.pack(corpus, Path(PROGRAM), sets, {"/home/me": "."}, renews)


def test_what_differs_in_the_run_alone_is_a_known_case(corpus):
    collection = pack(corpus, kept(corpus, run="20261127T020000Z-0a1b2c"))
    assert (collection.made, collection.known, len(collection.added)) == (1, 1, 0)


def test_of_sets_that_show_the_same_two_are_kept(corpus, tmp_path):
    empty = Corpus(tmp_path / "empty")
    collection = pack(empty, *(kept(corpus, host=f"host{i}") for i in range(5)))
    assert (len(collection.added), collection.alike) == (2, 3)
    assert pack(empty, kept(corpus, host="host7")).alike == 1
    assert run(empty).returncode == 0


def test_renewing_replaces_what_the_test_had(corpus, tmp_path):
    renewed = Corpus(tmp_path / "renewed")
    pack(renewed, *(kept(corpus, host=f"host{i}") for i in range(2)))
    pack(renewed, kept(corpus, host="other"), renews=True)
    (case,) = renewed.cases(SOURCE)
    assert '"host":"other"' in case.ledgers


def test_a_set_whose_verdict_is_another_when_it_is_read_back_is_left_out_and_named(corpus, tmp_path):
    other = kept(corpus)
    other.facts["status"] = "benign"
    collection = pack(Corpus(tmp_path / "empty"), other)
    assert not collection.added
    ((test, how),) = collection.changed
    assert test == f"{SOURCE}: Races.X" and "benign" in how


def test_what_names_this_machine_is_not_stored_and_checksums_are_of_what_is(corpus):
    ledgers = next(corpus.cases(SOURCE)).ledgers
    elsewhere = ledgers.replace('"train.py"', '"/home/me/train.py"')
    assert elsewhere != ledgers
    assert collecting.neutral(elsewhere, {"/home/me/": ""}) == ledgers


def test_fingerprints_are_numbered_so_that_equal_ones_stay_equal():
    text = '"fingerprint":"00f3a1b2c3d4e5f6" "fingerprint":"1111111111111111" fingerprint 00f3a1b2c3d4e5f6'
    found = re.findall("[0-9a-f]{16}", collecting.neutral(text, {}))
    assert found == [f"{number:016x}" for number in (1, 2, 1)]
