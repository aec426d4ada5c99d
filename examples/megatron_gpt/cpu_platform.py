"""Lets Megatron-Core train on CPU with gloo. Written for 0.16.1, tried with 0.12 to 0.20.

Megatron-Core names CUDA in its sources: `device="cuda"`, `torch.cuda.current_device()`, type strings such
as "torch.cuda.FloatTensor". `install()` redirects exactly those names to the CPU; schedules, gradient
buckets, optimizers, tensor-parallel layers and collectives stay Megatron's own. Call it once per process,
before anything of `megatron.core` is imported. It changes the process permanently, so it is for tests and
demonstrations that use no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import sys

import torch

OLDEST, NEWEST = (0, 12), (0, 20)
# The factory functions that Megatron-Core calls with device="cuda" (scalars, flags, masks, gradient buffers).
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")

_is_installed = False


def _version() -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])


def install() -> None:
    """Redirects CUDA to the CPU. A second call does nothing.

    Raises RuntimeError if these replacements were not checked against the version of megatron-core, or if it
    was already imported (its `jit_fuser` is bound during import).
    """
    global _is_installed
    if _is_installed:
        return
    if not OLDEST <= _version() <= NEWEST:
        version = importlib.metadata.version("megatron-core")
        raise RuntimeError(
            f"cpu_platform supports megatron-core 0.12 to 0.20, but {version} is installed: install one "
            f"of these or check each replacement in {__file__}"
        )
    if "megatron.core" in sys.modules:
        raise RuntimeError("call cpu_platform.install() before anything of megatron.core is imported")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one process group is gloo on CPU: a GPU must not slip in
    # 0.15 asks which GPUs it will compile for while it is imported.
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0")
    _redirect_device_queries()
    _redirect_allocations()
    _redirect_type_names()
    _redirect_random_state()
    with _without_compilation():
        import megatron.core  # noqa: F401
    _redirect_megatron_random_state()
    _allow_torch_norm_with_sequence_parallel()
    _allow_distributed_optimizer_without_fp8()
    _prepare_experts()
    _prepare_megatron_fsdp()
    _prepare_multi_token_prediction()
    _is_installed = True


def _redirect_device_queries() -> None:
    # `torch.empty(..., device=torch.cuda.current_device())` is Megatron's way to allocate: mappings.py,
    # layers.py, param_and_grad_buffer.py, p2p_communication.py.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # Several optimizer instances, Megatron-FSDP and the dispatchers of tokens use streams of their own.
    stream = HostStream()
    torch.cuda.Stream = HostStream
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: stream
    # p2p_communication.py waits for the device after each batch of sends and receives; gloo's wait() is
    # complete when it returns.
    torch.cuda.synchronize = lambda *args, **kwargs: None


def _redirect_allocations() -> None:
    def on_cpu(factory):
        @functools.wraps(factory)
        def allocate(*args, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            # rope_utils.py pins tensors that it moves to the device, which needs a GPU.
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return allocate

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    # language_module.py moves the tied embedding with .cuda(), grad_scaler.py its scale.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _redirect_type_names() -> None:
    # optimizer.py, distrib_optimizer.py and clip_grads.py sort parameters by the strings
    # "torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor" and "torch.cuda.FloatTensor", and raise on others.
    original = torch.Tensor.type

    def type_(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_


def _redirect_random_state() -> None:
    # Dropout on CPU tensors draws from the CPU's generator, which replaces the device's.
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _redirect_megatron_random_state() -> None:
    # CudaRNGStatesTracker.fork saves and sets states through these two. The originals queue a call for the
    # day CUDA is initialised: the fork would do nothing, and no test of saved RNG states would mean anything.
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # fork() warns when the CPU's generator moved while the device's was forked: here they are the same one.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _allow_torch_norm_with_sequence_parallel() -> None:
    # WrappedTorchNorm refuses sequence parallelism, though torch's norms compute the same there; what the
    # fused norms of Apex and TransformerEngine add is the mark by which finalize_model_grads sums the
    # gradients of the weights over the tensor-parallel ranks.
    from megatron.core.transformer import torch_norm

    original = torch_norm.WrappedTorchNorm.__new__

    def new(cls, config, *args, **kwargs):
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new


def _allow_distributed_optimizer_without_fp8() -> None:
    # 0.12 quantizes its fp8 parameters with TransformerEngine after each step, and raises without it even
    # if there are none.
    from megatron.core.optimizer import distrib_optimizer

    original = getattr(distrib_optimizer, "quantize_param_shard", None)

    def quantize_param_shard(model_params, *args, **kwargs):
        if len(model_params) > 0:
            original(model_params, *args, **kwargs)

    if original is not None:
        distrib_optimizer.quantize_param_shard = quantize_param_shard


class HostStream:
    """Replaces torch.cuda.Stream: on the CPU everything issued is done, so nothing waits."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, stream: HostStream) -> None:
        pass

    def wait_event(self, event: HostEvent) -> None:
        pass

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()

    def synchronize(self) -> None:
        pass


class HostEvent:
    """Replaces torch.cuda.Event."""

    def wait(self, stream: HostStream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _prepare_megatron_fsdp() -> None:
    # It issues its collectives on streams of its own, lays out its meshes over CUDA devices, and compares the
    # device that it is given with the current one, whose number it expects. Before 0.15 it differs inside.
    if _version() < (0, 15):
        return
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer

    # Without TransformerEngine a mock, or nothing.
    if not isinstance(getattr(mcore_fsdp_adapter, "TELinear", None), type):
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})
    logging.getLogger(megatron_fsdp.__name__).addFilter(
        lambda record: "instead of the current device" not in record.getMessage()
    )
    megatron_fsdp.torch = _With(torch, cuda=_With(torch.cuda, current_device=lambda: 0))

    from_group = mcore_fsdp_adapter.DeviceMesh.from_group

    def from_group_on_cpu(group, device_type, *args, **kwargs):
        return from_group(group, "cpu", *args, **kwargs)

    mcore_fsdp_adapter.DeviceMesh = _With(mcore_fsdp_adapter.DeviceMesh, from_group=from_group_on_cpu)
    param_and_grad_buffer._coalescing_manager = _complete_when_left


@contextlib.contextmanager
def _complete_when_left(*args, **kwargs):
    """torch.distributed._coalescing_manager, whose gathers do not run beside the program.

    Torch 2.11's gloo sometimes corrupts the heap in allgather_coalesced beside Megatron-FSDP's forward or
    backward ("malloc(): unaligned tcache chunk detected", or a segmentation fault, once in ten runs).
    """
    with torch.distributed.distributed_c10d._coalescing_manager(*args, **kwargs) as works:
        yield works
    works.wait()


class _With:
    """A module or class, with some of its names replaced."""

    def __init__(self, original: object, **replaced: object) -> None:
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


def _prepare_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # moe_utils.py imports it from TransformerEngine or not at all, and tests it for None afterwards: without
    # TransformerEngine the router's first product ends in a NameError.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # The all-to-all dispatcher copies the numbers of tokens to the host on a stream of its own, as NumPy
    # arrays where they become split sizes; a tensor that is on the host already it leaves as it is, and
    # all_to_all_single refuses tensors as split sizes.
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    if hasattr(dispatcher, "cuda_dtoh_stream"):  # up to 0.13 each dispatcher makes one of its own
        dispatcher.cuda_dtoh_stream = HostStream()

    def as_on_the_host(tensor, as_numpy: bool = False, record_stream: bool = False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_on_the_host


def _prepare_multi_token_prediction() -> None:
    from megatron.core.transformer import multi_token_prediction

    # 0.20 asks whether a layer is an instance of TransformerEngine's classes: without it they are mocks, of
    # which isinstance() raises TypeError.
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        multi_token_prediction.is_inference_column_parallel_linear = lambda layer: False


@contextlib.contextmanager
def _without_compilation():
    # megatron/core/jit.py sets jit_fuser = torch.compile. As decorators these imports of Inductor cost
    # 1.2 s of a 2 s import, per process; none of the decorated functions runs here (all fusions are off).
    # Megatron's own disable_jit_fuser() comes too late: importing it imports all users of the decorator.
    original = torch.compile

    def as_it_is(function=None, **options):
        return function if function is not None else as_it_is

    torch.compile = as_it_is
    try:
        yield
    finally:
        torch.compile = original
