"""Runs a stock, unedited training script of Megatron-LM core_v0.16.1 on CPU with gloo.

As Python itself, it takes a script or a module, and puts the script's folder on the path:

    torchrun --standalone --nproc-per-node 4 examples/megatron_gpt/pretrain_platform.py \\
        MEGATRON_LM/pretrain_gpt.py --distributed-backend gloo --use-cpu-initialization ...
    torchrun --standalone --nproc-per-node 4 examples/megatron_gpt/pretrain_platform.py \\
        -m nanlocator.megatron [options] MEGATRON_LM/pretrain_gpt.py --distributed-backend gloo ...

MEGATRON_LM is a checkout of the tag core_v0.16.1, whose training package also needs `six`. cpu_platform.py
does what Megatron-Core needs; this file only answers megatron.training's questions about the device. The
script is not changed. Its arguments must name no fused CUDA kernel:

    --distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --attention-softmax-in-fp32
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types

import cpu_platform
import torch


def install() -> None:
    """cpu_platform.install() and further replacements for megatron.training. Once per process, before
    anything of `megatron` is imported."""
    cpu_platform.install()
    _answer_device_queries()
    _use_compiled_helpers()


def _answer_device_queries() -> None:
    cuda = torch.cuda
    # initialize.py asserts that there is a GPU, gives each rank one, and seeds the random-state tracker only
    # where it counts at least one.
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None
    # arguments.py asks for the architecture: from Blackwell (10) on it checks fewer environment variables.
    cuda.get_device_properties = lambda *device: types.SimpleNamespace(major=10, minor=0, name="CPU")
    cuda.get_device_capability = lambda *device: (10, 0)
    # Now that a GPU seems to exist, torch.optim asks whether a CUDA graph is being captured.
    cuda.is_current_stream_capturing = lambda: False
    # training.py logs the memory after the first iterations and empties caches on request.
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *device: 0)
    cuda.empty_cache = lambda: None
    # training.py builds DistributedDataParallel on a stream of its own.
    cuda.Stream = cpu_platform.HostStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    # The data loaders of megatron.training ask for page-locked batches.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _use_compiled_helpers() -> None:
    # initialize.py runs make in megatron/core/datasets. megatron.core is the installed package here, which
    # brings the compiled helpers and no Makefile.
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


def main() -> None:
    if len(sys.argv) < (3 if sys.argv[1:2] == ["-m"] else 2):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    install()
    # Sets sys.argv and sys.path as Python does for the same words on its command line.
    if sys.argv[1] == "-m":
        module, sys.argv = sys.argv[2], sys.argv[2:]
        sys.path[0] = os.getcwd()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
