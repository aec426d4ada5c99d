"""Packs the files for tools/gpu that a machine without network lacks: python gpu_pack.py FOLDER."""

import shutil
import sys
import sysconfig
from pathlib import Path


def pack(folder: Path) -> None:
    """Headers, CMake packages and static libraries of this system; nlohmann_json and Megatron-Core from this
    Python."""
    include, site = folder / "dev" / "usr" / "include", folder / "site"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    library = Path("/usr/lib") / sysconfig.get_config_var("MULTIARCH")
    found = {
        include: ["gtest", "gmock", "benchmark"],
        folder / "dev" / library.relative_to("/"): ["libgtest*.a", "libgmock*.a", "libbenchmark*"],
        folder / "dev" / library.relative_to("/") / "cmake": ["GTest", "benchmark"],
    }
    for target, patterns in found.items():
        source = Path("/") / target.relative_to(folder / "dev")
        target.mkdir(parents=True, exist_ok=True)
        for pattern in patterns:
            things = list(source.glob(pattern))
            if not things:
                print(f"tools/gpu: {source / pattern} is not here and is left out", file=sys.stderr)
            for thing in things:
                copy(thing, target / thing.name)
    packages = Path(sysconfig.get_paths()["purelib"])
    for name in ("nlohmann_json", "megatron", *(p.name for p in packages.glob("megatron_core-*"))):
        if (packages / name).exists():
            copy(packages / name, site / name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    print(f"{folder}: {size:.0f} MiB; take it along with the checkout, as .gpu")


def copy(source: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


if __name__ == "__main__":
    pack(Path(sys.argv[1]).absolute())
