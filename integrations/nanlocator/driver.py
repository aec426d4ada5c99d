"""The documented path of ``nanlocator.engine.driver``."""

from nanlocator.engine.driver import (
    Adapter,
    Driver,
    LossScale,
    Named,
    OptimizerTensors,
    Pass,
    SkippedUpdate,
    Views,
)

__all__ = ["Adapter", "Driver", "LossScale", "Named", "OptimizerTensors", "Pass", "SkippedUpdate", "Views"]
