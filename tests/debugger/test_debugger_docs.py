"""The scripts of docs/transformers.md print the text shown there."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
MAXIMUM = re.compile(r"^.{8} (\d\.\d\de[+-]\d\d) ", re.M)
NUMBER = re.compile(r"\d\.\d\de[+-]\d\d")


def examples():
    """(script, printed text) of each script that a report follows."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    pairs = itertools.pairwise(blocks)
    return [
        (script, text)
        for (kind, script), (next_kind, text) in pairs
        if (kind, next_kind) == ("python", "text")
    ]


def test_the_page_has_a_report_of_forward_and_one_of_backward():
    assert ["MT5Config" in script for script, _ in examples()] == [True, False]
    assert ["during backward" in text for _, text in examples()] == [False, True]


@pytest.mark.parametrize("number", [0, 1])
def test_a_report_is_what_its_script_prints(number, tmp_path):
    script, text = examples()[number]
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.stderr.splitlines()[-1].startswith(
        "ValueError: DebugUnderflowOverflow: inf/nan detected, aborting"
    )
    # Another CPU adds in another order: the last digit of a maximum may differ, and many digits of a minimum.
    assert NUMBER.sub("#", run.stdout).strip() == NUMBER.sub("#", text).strip()
    printed, documented = ([float(m) for m in MAXIMUM.findall(t)] for t in (run.stdout, text))
    assert len(documented) > 5
    assert printed == pytest.approx(documented, rel=0.02)
    assert list(tmp_path.iterdir()) == []  # one process writes no files
