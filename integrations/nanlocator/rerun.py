"""The documented path of ``nanlocator.state.rerun``."""

from nanlocator.state.rerun import Fp8Scales, GeneratorStates, ObjectState, ScalerState, Stateful, losses_of

__all__ = ["Fp8Scales", "GeneratorStates", "ObjectState", "ScalerState", "Stateful", "losses_of"]
