"""Samplers, each session's own random stream, and stop strings. Knows the contracts and nothing else."""

from fuel_core.sampling.sampler import Outcome, sample
from fuel_core.sampling.state import SamplerState
from fuel_core.sampling.stop import StopStrings

__all__ = ["Outcome", "SamplerState", "StopStrings", "sample"]
