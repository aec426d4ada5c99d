"""Compares the check of a checkpoint with merely reading its file, and with torch.load and isfinite, in
turns.

    tools/bench checkpoint [--rounds 9] [--format safetensors|torch.save] [--dtype bfloat16] [--cold] [--in
    FOLDER]

The checkpoint has a GPT's weights (hidden size 1024). "read" is one thread that reads the file in blocks of
4 MiB; "check" is nanlocator.check_checkpoint as the command runs it (it maps the file), "check, read" as a
program calls it (it reads the file). The file is in the page cache, the hardest case for the check; with
--cold it is dropped from there before each turn.
"""

import argparse
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from turns import print_result, take_turns

from nanlocator import _C, check_checkpoint
from scan import gpt_shapes

_BLOCK = 4 << 20


def read(file: Path) -> None:
    buffer = memoryview(mmap.mmap(-1, _BLOCK))
    with file.open("rb", buffering=0) as source:
        while source.readinto(buffer):
            pass


def load_and_ask(file: Path) -> None:
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, mmap=True)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def checked(file: Path, *, maps_files: bool) -> None:
    report = check_checkpoint(file, maps_files=maps_files)
    assert report.exit_code == 0, report


def forget(file: Path) -> None:
    """Drops the file from the page cache."""
    with file.open("rb") as source:
        os.fsync(source.fileno())
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="tools/bench checkpoint",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--format", choices=["safetensors", "torch.save"], default="safetensors")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--cold", action="store_true", help="not in the page cache")
    parser.add_argument("--in", dest="folder", metavar="FOLDER", help="where the checkpoint is written")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    shapes = gpt_shapes(arguments.layers, 1024, 50257)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        tensors = {
            f"layers.{number}.w": torch.randn(shape).mul_(0.02).to(dtype)
            for number, shape in enumerate(shapes)
        }
        if arguments.format == "safetensors":
            file = Path(folder, "model.safetensors")
            save_file(tensors, file)
        else:
            file = Path(folder, "model.pt")
            torch.save(tensors, file)
        del tensors
        variants: dict[str, Callable[[], None]] = {
            "read": lambda: read(file),
            "check": lambda: checked(file, maps_files=True),
            "check, read": lambda: checked(file, maps_files=False),
            "load, isfinite": lambda: load_and_ask(file),
        }

        def run(variant: str) -> float:
            if arguments.cold:
                forget(file)
            start = time.perf_counter()
            variants[variant]()
            return time.perf_counter() - start

        times = take_turns(variants, run, arguments.rounds)
        size = file.stat().st_size
    heading = (
        f"{arguments.format}, {arguments.dtype}, {len(shapes)} tensors, {size / 1e9:.2f} GB, "
        f"{'cold' if arguments.cold else 'in the page cache'}; torch {torch.__version__}, "
        f"{_C.active_instruction_set()}, {platform.processor() or platform.machine()}; median of "
        f"{arguments.rounds} rounds, over the read"
    )
    print_result(heading, [times], "read", as_json=arguments.json, bytes=size, format=arguments.format)


if __name__ == "__main__":
    main()
