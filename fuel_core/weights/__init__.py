"""Checkpoints on disk, and where a family takes its weights from. The formats' records work without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuel_core.weights.formats import GGUF, SAFETENSORS

if TYPE_CHECKING:
    from fuel_core.weights.loader import WeightLoader
    from fuel_core.weights.memory import MemoryCheckpoint
    from fuel_core.weights.source import RandomWeights, Weights, take_plain

__all__ = [
    "GGUF",
    "SAFETENSORS",
    "MemoryCheckpoint",
    "RandomWeights",
    "WeightLoader",
    "Weights",
    "take_plain",
]

_HOMES = {
    "MemoryCheckpoint": "memory",
    "RandomWeights": "source",
    "WeightLoader": "loader",
    "Weights": "source",
    "take_plain": "source",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fuel_core.weights.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
