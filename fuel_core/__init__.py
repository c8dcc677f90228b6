"""Fuel: a decode engine for language models whose families are plugins. Imports no torch until it must.

>>> import fuel_core as fuel
>>> loaded = fuel.load("smollm2")
>>> fuel.generate(loaded, ["The capital of France is"], max_new_tokens=8)[0].text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuel_core.contracts import FuelError, SamplingParams, hookimpl, hookspec

if TYPE_CHECKING:
    from fuel_core.engine import (
        Completion,
        Delta,
        Engine,
        Loaded,
        Timing,
        build_engine,
        generate,
        generate_async,
        load,
        stream,
        stream_async,
    )

__version__ = "0.1.0"

_ENGINE = {"Completion", "Delta", "Engine", "Loaded", "Timing", "build_engine", "load"}
_ENGINE |= {"generate", "generate_async", "stream", "stream_async"}

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "FuelError",
    "Loaded",
    "SamplingParams",
    "Timing",
    "build_engine",
    "generate",
    "generate_async",
    "hookimpl",
    "hookspec",
    "load",
    "stream",
    "stream_async",
]


def __getattr__(name: str) -> Any:
    if name in _ENGINE:
        return getattr(import_module("fuel_core.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
