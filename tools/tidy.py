"""clang-tidy for C++ files of this checkout, or for all: `tools/lint --tidy`. Configures build/tidy for it,
without precompiled headers and unity files, and fetches a fixed version of clang-tidy into .setup."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "clang-tidy==23.1.4"  # its opinions change between versions; Debian's cannot read all of C++20
HOME = ROOT / ".setup" / PACKAGE.replace("==", "-")
PYTHON = ROOT / ".venv" / "bin" / "python"
BUILD = ROOT / "build" / "tidy"
OPTIONS = [
    "CMAKE_BUILD_TYPE=Release",
    *(f"NANLOCATOR_{part}=OFF" for part in ("CUDA", "TESTS", "BENCHMARKS")),
]


def prepare():
    subprocess.run([ROOT / "tools" / "setup", "--python-only"], check=True)
    if not HOME.exists():
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", f"{HOME}.new", PACKAGE], check=True)
        Path(f"{HOME}.new").rename(HOME)
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DPython3_EXECUTABLE={PYTHON}"]
    configure += [f"-D{option}" for option in OPTIONS]
    environment = {**os.environ, "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}  # its ninja
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=environment)


def findings_in(file):
    command = [HOME / "clang_tidy" / "data" / "bin" / "clang-tidy", "-p", BUILD, "--quiet", file]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode else ""


def main(arguments):
    prepare()
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    compiled = [Path(command["file"]) for command in commands]
    files = sorted(
        {file for file in compiled if file.is_relative_to(ROOT) and not file.is_relative_to(BUILD)}
    )
    if arguments:
        named = {Path(argument).resolve() for argument in arguments}
        if unknown := named - set(files):
            sys.exit(f"tools/lint: not compiled here: {', '.join(map(str, sorted(unknown)))}")
        files = sorted(named)
    count = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (file, found) in enumerate(zip(files, pool.map(findings_in, files), strict=True), 1):
            if found:
                count += 1
                print(found, flush=True)
            if sys.stderr.isatty():
                print(f"\r{number} of {len(files)}: {file.relative_to(ROOT)}\x1b[K", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"lint: clang-tidy has findings in {count} of {len(files)} files", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
