"""Facts about a rank's software and hardware (versions, device, clock), and differences between ranks that
must not exist."""

import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanlocator import _C
from nanlocator.netcheck.gpu import hardware, hardware_faults

__all__ = [
    "CLOCK_TOLERANCE",
    "Facts",
    "collect",
    "computes_with",
    "differences",
    "hardware",
    "hardware_faults",
]

Facts = dict[str, str | int | float]

CLOCK_TOLERANCE = 10.0  # seconds; ranks do not collect at the same instant
_VARIABLE = "environment "

# Differences between these have broken runs: different arithmetic, protocols or binaries.
_MUST_BE_EQUAL = (
    "nanlocator",
    "python",
    "torch",
    "cuda",
    "cudnn",
    "nccl",
    "driver",
    "kernel",
    "device_name",
    "device_memory",
)
_SHOWN_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")
_SHOWN = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
# Variables that may differ between hosts (NCCL's user guide, Environment Variables): interfaces, files, logs.
_OWN_PREFIXES = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO", "NCCL_GRAPH", "NCCL_HOSTID")


def collect(device: torch.device | str) -> Facts:
    """Facts of this process and `device` ("cpu", "cuda:3"); unknown ones are missing. Environment variables
    of NCCL, Gloo and CUDA are under "environment NAME"; `clock` is in seconds since 1970, `device_memory` in
    bytes."""
    device = torch.device(device)
    facts: dict[str, str | int | float | None] = {
        "clock": time.time(),
        "host": socket.gethostname(),
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "nanlocator": _C.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl_version(),
        "driver": _driver_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "device": str(device),
        **(_gpu_facts(device) if device.type == "cuda" else {}),
    }
    for name in sorted(os.environ):
        if name.startswith(_SHOWN_PREFIXES) or name in _SHOWN:
            facts[_VARIABLE + name] = os.environ[name]
    return {name: value for name, value in facts.items() if value is not None}


def computes_with(device: torch.device | str) -> str:
    """Ranks with equal values must compute the same bits: device, libraries, number of threads."""
    own = collect(device)
    names = ("device_name", "cuda", "cudnn", "driver") if "device_name" in own else ("cpu",)
    parts = [str(own.get(name, "unknown")) for name in names]
    return ", ".join([*parts, f"torch {own['torch']}", f"{torch.get_num_threads()} threads"])


def differences(facts_of_ranks: Sequence[Facts]) -> list[dict[str, Any]]:
    """Facts that must be equal and differ: [{"what": "torch", "values": {"2.11.0": [0, 1], "2.10.0": [2]}}],
    `facts_of_ranks` in the order of ranks. A rank that lacks a fact that others have is under "not known", or
    "not set" for an environment variable. Clocks are compared with the median and listed if one is more than
    CLOCK_TOLERANCE off, with the "seconds" of the largest deviation."""
    found = []
    for what in (*_MUST_BE_EQUAL, *_variables_to_compare(facts_of_ranks)):
        absent = "not set" if what.startswith(_VARIABLE) else "not known"
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            values.setdefault(str(facts.get(what, absent)), []).append(rank)
        if len(values) > 1:
            found.append({"what": what, "values": values})
    return found + _clock_differences(facts_of_ranks)


def _variables_to_compare(facts_of_ranks: Sequence[Facts]) -> list[str]:
    names = {name for facts in facts_of_ranks for name in facts if name.startswith(_VARIABLE + "NCCL_")}
    own = tuple(_VARIABLE + prefix for prefix in _OWN_PREFIXES)
    return sorted(name for name in names if not name.startswith(own))


def _clock_differences(facts_of_ranks: Sequence[Facts]) -> list[dict[str, Any]]:
    clocks = {rank: float(facts["clock"]) for rank, facts in enumerate(facts_of_ranks) if "clock" in facts}
    if not clocks:
        return []
    median = sorted(clocks.values())[len(clocks) // 2]
    values: dict[str, list[int]] = {}
    for rank, clock in clocks.items():
        is_off = abs(clock - median) > CLOCK_TOLERANCE
        values.setdefault(f"{clock - median:+.0f} s" if is_off else "the median", []).append(rank)
    if len(values) < 2:
        return []
    return [{"what": "clock", "values": values, "seconds": max(abs(c - median) for c in clocks.values())}]


def _gpu_facts(device: torch.device) -> Facts:
    properties = torch.cuda.get_device_properties(device)
    return {
        "device_name": properties.name,
        "device_memory": properties.total_memory,
        "device_count": torch.cuda.device_count(),
    }


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a Torch without NCCL
        return None


def _driver_version() -> str | None:
    """Does not run nvidia-smi, which may hang with its driver. The file's first line: "NVRM version: NVIDIA
    UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 ..."."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in line.split() if word[:1].isdigit() and "." in word), None)


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
