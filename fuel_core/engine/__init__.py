"""Load a model and generate with it: the only place that knows all parts."""

from fuel_core.engine.asynchronous import generate_async, stream_async
from fuel_core.engine.generation import generate, stream
from fuel_core.engine.loading import Loaded, load
from fuel_core.engine.results import Completion, Delta, Timing
from fuel_core.engine.serving import Engine
from fuel_core.engine.sizing import build_engine

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Loaded",
    "Timing",
    "build_engine",
    "generate",
    "generate_async",
    "load",
    "stream",
    "stream_async",
]
