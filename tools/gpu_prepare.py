"""Fills a folder with what tools/gpu needs on a machine without network: python gpu_prepare.py FOLDER PYTHON.

The build, for that machine's PYTHON (3.12; here among pyenv's or on PATH) and Hopper; TransformerEngine and
torchao; Megatron-Core; and, should the build not run there, what it is made with.
"""

import lzma
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support_matrix"))

import environments  # noqa: E402

ARCHITECTURE = 90
TRANSFORMER_ENGINE = "2.9.0"
FP8 = [f"transformer-engine=={TRANSFORMER_ENGINE}", f"transformer-engine-cu13=={TRANSFORMER_ENGINE}"]
FP8 += ["pydantic", "pydantic-core", "annotated-types", "typing-inspection", "torchao==0.18.0"]
PLATFORMS = ["manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014"]
TARGETS = ["cuda_tests", "planted_kernels", "opaque_kernels", "counting_allocator"]


def main(folder: Path, python: str) -> None:
    if environments.find_python(python) is None:
        sys.exit(f"tools/gpu --prepare: no Python {python} on PATH or among pyenv's, with its headers")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    copy_installed(folder)
    print("build ...", flush=True)
    pack_build(folder / "build", python)
    print("TransformerEngine ...", flush=True)
    shutil.rmtree(folder / "fp8", ignore_errors=True)  # unpacked there, of an earlier one
    with tempfile.TemporaryDirectory() as work:
        pack_fp8(folder / "fp8.tar.xz", python, Path(work))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    print(f"{folder}: {size:.0f} MiB; take it along with the checkout, as .gpu")


def copy_installed(folder: Path) -> None:
    """Headers, CMake packages and static libraries of this system; nlohmann_json and Megatron-Core from this
    Python."""
    include, site = folder / "dev" / "usr" / "include", folder / "site"
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


def copy(source: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def run(*command: str | Path, **options: object) -> None:
    subprocess.run(command, check=True, **options)


def pack_build(folder: Path, python: str) -> None:
    """What tools/gpu's build makes there, made here by tools/wheel and from what that has built."""
    with tempfile.TemporaryDirectory() as wheels:
        options = ["--python", python, "--architectures", str(ARCHITECTURE), "--output", wheels]
        run(ROOT / "tools" / "wheel", *options)
        (wheel,) = Path(wheels).glob("*.whl")
        shutil.rmtree(folder, ignore_errors=True)
        zipfile.ZipFile(wheel).extractall(folder / "python")
    for data in (folder / "python").glob("*.data"):
        shutil.rmtree(data)  # the commands, copied below
    built = ROOT / "build" / "pip"
    run("cmake", "-DNANLOCATOR_TESTS=ON", "-DNANLOCATOR_BENCHMARKS=ON", built, stdout=subprocess.DEVNULL)
    targets = [*(f"nanlocator_{name}" for name in TARGETS), "cuda_scan_benchmark"]
    run("cmake", "--build", built, "-j2", "--target", *targets)
    for kind, files in (("bin", "bin/*"), ("tests", "tests/*.so")):
        for file in built.glob(files):
            copy(file, folder / kind / file.name)
    stripped = [*folder.glob("bin/*"), *folder.glob("python/nanlocator/*.so")]
    run("strip", "--strip-unneeded", *stripped)
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True)
    (folder / "commit").write_text(commit)


def pack_fp8(archive: Path, python: str, work: Path) -> None:
    """TransformerEngine and torchao as they lie in site-packages; 15 MiB."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work]
    fits = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    fits += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    run(*pip, *fits, *FP8)
    source = f"transformer-engine-torch=={TRANSFORMER_ENGINE}"
    only_look = os.environ | {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "pytorch"}
    run(*pip, "--no-binary=:all:", "--no-build-isolation", source, env=only_look)
    site = work / "site"
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            kept = [name for name in opened.namelist() if "/jax/" not in name and "/wheel_lib/" not in name]
            opened.extractall(site, kept)
    (core,) = work.glob("transformer_engine_cu13-*.whl")
    library = "transformer_engine/wheel_lib/libtransformer_engine.so"
    code = only_of_one_architecture(zipfile.ZipFile(core).read(library))
    (site / library).parent.mkdir(parents=True)
    (site / library).write_bytes(code)
    pack_extension(site, python, work)
    with lzma.open(archive, "wb", preset=2) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(site, ".")


def only_of_one_architecture(library: bytes) -> bytes:
    """Zeroes the device code of other GPUs: 350 of 450 MiB, which then compress to nothing. Layout of fat
    binaries: a header (magic, version, its size, the entries' size) and entries (kind: 2 is machine code;
    their header's size at 4, their own at 8, architecture at 28)."""
    code = bytearray(library)
    at = code.find(b"\x50\xed\x55\xba")
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", code, at + 4)
        if (version, header) == (1, 16) and 0 < size <= len(code) - at:
            entry, end = at + header, at + header + size
            while entry < end:
                kind, _, own_header, own_size = struct.unpack_from("<HHIQ", code, entry)
                if own_header == 0 or own_size == 0 or kind not in (1, 2):
                    break
                (architecture,) = struct.unpack_from("<I", code, entry + 28)
                if (kind, architecture) != (2, ARCHITECTURE):
                    code[entry + own_header : entry + own_header + own_size] = bytes(own_size)
                entry += own_header + own_size
            at = end - 1
        at = code.find(b"\x50\xed\x55\xba", at + 1)
    return bytes(code)


def pack_extension(site: Path, python: str, work: Path) -> None:
    """transformer_engine_torch is published as sources: compiled against this torch and that Python."""
    (sources,) = work.glob("transformer_engine_torch-*.tar.gz")
    with tarfile.open(sources) as tar:
        tar.extractall(work, filter="data")
    sources = work / f"transformer_engine_torch-{TRANSFORMER_ENGINE}"
    info = site / f"{sources.name}.dist-info"
    copy(sources / "PKG-INFO", info / "METADATA")
    other = environments.find_python(python)
    query = (
        "import sysconfig; print(sysconfig.get_paths()['include'], sysconfig.get_config_var('EXT_SUFFIX'))"
    )
    include, suffix = subprocess.check_output([other, "-c", query], text=True).split()
    packages = Path(sysconfig.get_paths()["purelib"])
    torch = packages / "torch"
    system = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    system += [packages / "nvidia" / name / "include" for name in ("cu13", "cudnn", "nccl")]
    own = ["common_headers", "common_headers/common", "common_headers/common/include", "csrc"]
    options = [f"-I{sources / name}" for name in own] + [f"-I{include}"]
    options += [word for folder in system for word in ("-isystem", str(folder))]
    options += ["-std=c++17", "-O1", "-w", "-fPIC", "-fvisibility=hidden"]
    options += ["-DTORCH_EXTENSION_NAME=transformer_engine_torch", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    files, objects = sorted((sources / "csrc").rglob("*.cpp")), []
    for number in range(3):  # a third of the files at one time: one minute each
        unity = work / f"unity_{number}.cpp"
        unity.write_text("".join(f'#include "{file}"\n' for file in files[number::3]))
        run("g++", *options, "-c", unity, "-o", unity.with_suffix(".o"))
        objects.append(unity.with_suffix(".o"))
    libraries = ["c10", "torch_cpu", "torch_cuda", "torch", "c10_cuda", "torch_python"]
    linked = ["-Wl,--no-as-needed", f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries)]
    run("g++", "-shared", "-o", site / f"transformer_engine_torch{suffix}", *objects, *linked)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
