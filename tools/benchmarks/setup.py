"""Measures how long a newcomer waits: from a fresh clone of this checkout's last commit, with nothing cached,
to the demonstration's verdict; for a rebuild after one file of `locate` was touched; with --test, tools/test.

Compiler caches and pip's cache are off. Packages of the system's package manager remain installed."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Examples:\n  tools/bench setup\n  tools/bench setup --test --in /fast/disk",
    )
    parser.add_argument("--test", action="store_true", help="also tools/test, in a separate clone")
    parser.add_argument("--in", dest="folder", metavar="FOLDER", help="where the clones are made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        clone = fresh_clone(Path(folder, "demo", "nanlocator"))
        show("fresh clone to the demonstration's verdict", *timed([clone / "tools" / "demo"], clone))
        (clone / "src" / "locate" / "detail.cpp").touch()
        rebuild = ["cmake", "--build", clone / "build" / "release", "--target", "nanlocator_command"]
        show("rebuild after one file of locate", *timed(rebuild, clone))
        if arguments.test:
            clone = fresh_clone(Path(folder, "test", "nanlocator"))
            show("fresh clone to the end of tools/test", *timed([clone / "tools" / "test"], clone))
    return 0


def fresh_clone(path: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", ROOT, path], check=True)
    return path


def timed(command: list[str | Path], clone: Path) -> tuple[float, str]:
    """Seconds and output of the command. Ends the program if it fails."""
    print(f"timing {' '.join(map(str, command))} ...", file=sys.stderr)
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"CCACHE_DISABLE": "1", "PIP_NO_CACHE_DIR": "1"}
    if environment["PATH"].startswith(str(ROOT / ".venv")):
        environment["PATH"] = environment["PATH"].partition(":")[2]
    started = time.monotonic()
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        sys.exit(f"{command[0]} failed with exit status {done.returncode}")
    return seconds, done.stdout + done.stderr


def show(what: str, seconds: float, output: str) -> None:
    print(f"{what:48} {seconds:7.0f} s")
    for part, took in re.findall(r"setting up: (.*), done in (\d+) s", output):
        print(f"    {part:44} {int(took):7} s")


if __name__ == "__main__":
    sys.exit(main())
