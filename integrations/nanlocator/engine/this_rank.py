"""This rank, its device and its messages."""

import contextlib
import logging
import sys

import torch
import torch.distributed as dist

from nanlocator.engine.verdict import Verdict


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def device_description(device: torch.device) -> str:
    """``cpu``, or on CUDA the index, UUID and PCI address, which a hardware team asks for."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    domain, bus, number = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return f"cuda:{device.index} GPU-{uuid} {domain:04x}:{bus:02x}:{number:02x}.0"


def rank_prefix() -> str:
    """ "rank 3: " if there are several ranks."""
    return f"rank {dist.get_rank()}: " if is_distributed() else ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def log(message: str) -> None:
    """Prints one line on this rank's stderr, with its number."""
    print(f"nanlocator: {rank_prefix()}{message}", file=sys.stderr, flush=True)


_LEVELS = {
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


def log_verdict(verdict: Verdict) -> None:
    """On rank 0, to the logger "nanlocator" if the program has given it a handler: stderr has it anyway."""
    logger = logging.getLogger("nanlocator")
    if logger.handlers and (not is_distributed() or dist.get_rank() == 0):
        text = str(verdict)
        severity = text.removeprefix("nanlocator ").partition("[")[0].partition(" ")[0]
        with contextlib.suppress(Exception):  # a handler that fails ends no training
            logger.log(_LEVELS.get(severity, logging.ERROR), text)


def log_once(message: str) -> None:
    """Prints one line on rank 0's stderr."""
    if not is_distributed() or dist.get_rank() == 0:
        print(f"nanlocator: {message}", file=sys.stderr, flush=True)
