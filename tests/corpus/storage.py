"""The corpus on disk: sets of ledgers, and the facts of the verdict on each.

Each file of tests, for example tests/locate/races_test.cpp, has two:

  tests/corpus/cases/locate/races_test.jsonl.xz   the ledgers, compressed: a line {"case", "test", "ranks"},
                                                  then the ledgers of that case, as in a ledger file
  tests/corpus/facts/locate/races_test.jsonl      a line {"case", "test", "ranks", "facts"} for each

Both are in the order of the cases' names, which are digests of the ledgers, so that collecting the same cases
again leaves both files unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import lzma
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    source: str  # "locate/races_test": the file of tests, without its suffix
    test: str  # the first test with these ledgers
    ranks: int  # of the job; ledgers of some may be missing
    ledgers: str  # JSON lines

    @property
    def header(self) -> dict[str, Any]:
        return {"case": self.name, "test": self.test, "ranks": self.ranks}

    @property
    def text(self) -> str:
        """The input of nanlocator_corpus."""
        return line(self.header) + self.ledgers


def line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"


class Corpus:
    """A folder like tests/corpus. It is read again at each use."""

    def __init__(self, folder: Path = CORPUS) -> None:
        self.folder = folder

    def sources(self) -> list[str]:
        """Files of tests with cases, or with facts only; the largest first, so that the cores finish
        together."""
        sizes = {self._source(path, ".jsonl.xz"): path.stat().st_size for path in self._files("cases", "xz")}
        rest = {self._source(path, ".jsonl") for path in self._files("facts", "jsonl")} - sizes.keys()
        return [*sorted(sizes, key=lambda source: (-sizes[source], source)), *sorted(rest)]

    def text(self, source: str) -> str:
        """All cases, one after another."""
        path = self._cases(source)
        return lzma.decompress(path.read_bytes()).decode() if path.exists() else ""

    def cases(self, source: str) -> Iterator[Case]:
        header, lines = None, []
        for text in self.text(source).splitlines(keepends=True):
            if text.startswith('{"case":'):
                if header:
                    yield self._case(header, source, lines)
                header, lines = json.loads(text), []
            else:
                lines.append(text)
        if header:
            yield self._case(header, source, lines)

    def facts(self, source: str) -> dict[str, dict[str, Any]]:
        """By case: {"case", "test", "ranks", "facts"}."""
        path = self._facts(source)
        if not path.exists():
            return {}
        records = (json.loads(text) for text in path.read_text().splitlines())
        return {record["case"]: record for record in records}

    def write_cases(self, source: str, cases: Iterable[Case]) -> None:
        ordered = sorted(cases, key=lambda case: case.name)
        text = "".join(case.text for case in ordered)
        if text != self.text(source):
            _write(self._cases(source), lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

    def write_facts(self, source: str, records: Iterable[dict[str, Any]]) -> None:
        ordered = sorted(records, key=lambda record: record["case"])
        _write(self._facts(source), "".join(map(line, ordered)).encode())

    def _files(self, kind: str, ending: str) -> list[Path]:
        return sorted((self.folder / kind).rglob(f"*.{ending}"))

    def _source(self, path: Path, ending: str) -> str:
        return path.relative_to(self.folder).as_posix().split("/", 1)[1].removesuffix(ending)

    def _cases(self, source: str) -> Path:
        return self.folder / "cases" / f"{source}.jsonl.xz"

    def _facts(self, source: str) -> Path:
        return self.folder / "facts" / f"{source}.jsonl"

    @staticmethod
    def _case(header: dict[str, Any], source: str, lines: list[str]) -> Case:
        return Case(header["case"], source, header["test"], header["ranks"], "".join(lines))


def _write(path: Path, content: bytes) -> None:
    """Replaces the file atomically; without content, removes it."""
    if not content or content == lzma.compress(b""):
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    try:
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)
        raise
