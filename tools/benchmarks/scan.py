"""Compares the CPU scan of a GPT's gradients with other ways to scan them, interleaved in one run.

    tools/bench scan [--rounds 9] [--dtypes float32 bfloat16 float16] [--threads 1 2] [--json]

Peers, over the same list of tensors: a plain read of the memory; torch._foreach_norm (the cost of a norm,
which training needs anyway); tensor.isnan().any() for each. A ratio is the median of this round's scan over
this round's peer: below 1.00 the scan is faster.
"""

import argparse
import ctypes
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanlocator import _C

PEERS = ("memory read", "_foreach_norm", "isnan().any()")


def gpt_shapes(layers: int, hidden: int, vocabulary: int) -> list[tuple[int, ...]]:
    """GPT-2's parameters: 16 tensors a layer, embeddings and the last layer norm."""
    layer = [
        (hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,),
        (hidden,), (hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,),
        (hidden // 16, hidden), (hidden // 16,), (hidden, hidden // 16), (hidden,),
    ]  # fmt: skip
    return [(vocabulary, hidden), (1024, hidden), *(layer * layers), (hidden,), (hidden,)]


def read_all(library: ctypes.CDLL, tensors: list[torch.Tensor], threads: int) -> None:
    def work(part: int) -> None:
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            begin, end = size * part // threads, size * (part + 1) // threads
            library.read_memory(ctypes.c_void_p(tensor.data_ptr() + begin), ctypes.c_size_t(end - begin))

    helpers = [threading.Thread(target=work, args=(part,)) for part in range(1, threads)]
    for helper in helpers:
        helper.start()
    work(0)
    for helper in helpers:
        helper.join()


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(dtype: torch.dtype, threads: int, rounds: int, library: ctypes.CDLL, layers: int) -> dict:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tensors = [torch.randn(shape).mul_(0.01).to(dtype) for shape in gpt_shapes(layers, 1024, 50257)]
    runs = {
        "scan": lambda: _C.scan(tensors, threads),
        "memory read": lambda: read_all(library, tensors, threads),
        "_foreach_norm": lambda: torch._foreach_norm(tensors),
        "isnan().any()": lambda: [tensor.isnan().any() for tensor in tensors],
    }
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    ratios = {
        peer: statistics.median(a / b for a, b in zip(times["scan"], times[peer], strict=True))
        for peer in PEERS
    }
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        "tensors": len(tensors),
        "bytes": size,
        "gigabytes_per_second": size / statistics.median(times["scan"]) / 1e9,
        "scan_over": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/bench scan"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=24, help="of a GPT with hidden size 1024")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    library = ctypes.CDLL(str(Path(__file__).parents[2] / "build/release/lib/libmemory_read.so"))
    library.read_memory.restype = ctypes.c_uint64

    results = []
    for dtype in arguments.dtypes:
        for threads in arguments.threads:
            result = measure(getattr(torch, dtype), threads, arguments.rounds, library, arguments.layers)
            results.append(result)
            if arguments.json:
                continue
            if len(results) == 1:
                print(
                    f"CPU {platform.processor() or platform.machine()}, {_C.active_instruction_set()}, "
                    f"torch {torch.__version__}, {result['tensors']} tensors, "
                    f"median of {arguments.rounds} interleaved rounds; scan time over peer's"
                )
                print(f"{'dtype':10} {'threads':>7} {'GB/s':>6}" + "".join(f"{p:>16}" for p in PEERS))
            print(
                f"{result['dtype']:10} {threads:7} {result['gigabytes_per_second']:6.1f}"
                + "".join(f"{result['scan_over'][p]:16.2f}" for p in PEERS),
                flush=True,
            )
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
