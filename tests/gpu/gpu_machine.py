"""The device of these tests, and queries about it."""

import subprocess
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def host_waits(device, step):
    """Calls of Torch in ``step`` that wait for the GPU, according to set_sync_debug_mode; None on the CPU."""
    if device != "cuda":
        step()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen)


class Replays:
    """`nanlocator replay` of bundles, each in the background until `check` waits for it."""

    def __init__(self):
        self._running = []

    def start(self, folder):
        """Starts the only bundle below ``folder``."""
        bundles = sorted(path.parent for path in Path(folder).rglob("bundle.json"))
        assert bundles
        for bundle in bundles:
            command = ["nanlocator", "replay", str(bundle)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self._running.append((bundle, process))

    def check(self):
        """Returns the exit status of each: 1 if the call is bad again, 0 if it is finite."""
        done = [(bundle, process.communicate(timeout=60)[0], process) for bundle, process in self._running]
        failed = {str(bundle): text for bundle, text, process in done if process.returncode not in (0, 1)}
        assert not failed
        return [process.returncode for _, _, process in done]
