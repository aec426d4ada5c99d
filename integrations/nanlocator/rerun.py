"""The documented path of ``nanlocator.state.rerun`` and ``nanlocator.state.generators``."""

from nanlocator.state.generators import GeneratorStates
from nanlocator.state.rerun import Fp8Scales, ObjectState, ScalerState, Stateful, losses_of

__all__ = ["Fp8Scales", "GeneratorStates", "ObjectState", "ScalerState", "Stateful", "losses_of"]
