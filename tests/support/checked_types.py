"""What mypy says about programs, with the options and the cache of tools/lint (cold, it takes a minute)."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def errors_of(programs, folder):
    """{file: {line: error}} for `programs`, {file: text}, which are written into `folder`."""
    pytest.importorskip("mypy")
    for name, text in programs.items():
        (folder / name).write_text(text, encoding="utf-8")
    cache = folder / "cache"  # a copy: mypy does not share a cache with another process
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", cache)
    command = [sys.executable, "-m", "mypy", "--show-absolute-path", f"--cache-dir={cache}"]
    done = subprocess.run(
        [*command, *map(str, map(folder.joinpath, programs))], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {name: {} for name in programs}
    for file, line, said in re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        assert Path(file).parent == folder, done.stdout
        found[Path(file).name][int(line)] = said
    return found
