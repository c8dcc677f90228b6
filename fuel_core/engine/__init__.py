"""Load a model and generate with it: the only place that knows all parts."""

from fuel_core.engine.generation import generate, stream
from fuel_core.engine.loading import Loaded, load
from fuel_core.engine.results import Completion, Delta, Timing

__all__ = ["Completion", "Delta", "Loaded", "Timing", "generate", "load", "stream"]
