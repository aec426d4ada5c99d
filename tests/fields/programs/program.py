"""What these programs share: their command line, and a digest of what they have computed."""

import argparse
import hashlib
from collections.abc import Iterable

import torch

_parser = argparse.ArgumentParser()
_parser.add_argument("--steps", type=int, default=300)
_parser.add_argument("--fault", default="none")
_parser.add_argument("--at", type=int, default=7, help="the step in which the fault wakes")
_options = _parser.parse_args()

STEPS: int = _options.steps
torch.manual_seed(0)
torch.set_num_threads(1)


def wakes(fault: str, step: int) -> bool:
    """Whether ``fault`` is the one that was asked for, in the step that it wakes in (from 1)."""
    return fault == _options.fault and step == _options.at


def print_digest(*modules: torch.nn.Module | Iterable[torch.Tensor]) -> None:
    """Prints one digest of all bits of the modules' states and of the tensors."""
    digest = hashlib.sha256()
    for module in modules:
        tensors = module.state_dict().values() if isinstance(module, torch.nn.Module) else module
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())
