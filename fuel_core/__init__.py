"""Fuel: a decode engine for language models whose families are plugins. Imports no torch until it must.

>>> import fuel_core as fuel
>>> loaded = fuel.load("smollm2")
>>> fuel.generate(loaded, ["The capital of France is"], max_new_tokens=8)[0].text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuel_core.contracts import SamplingParams, hookimpl, hookspec
from fuel_core.contracts.errors import (
    BadBlockIndexError,
    BadSpliceRangeError,
    CapacityError,
    CheckpointError,
    DownloadError,
    FuelError,
    InvalidRequestError,
    ModelContractError,
    NonUniformStateError,
    OffsetNotBlockAlignedError,
    OutOfBlocksError,
    PluginError,
    PrefixMismatchError,
    PrefixNotFullyFilledError,
    PrefixTargetNotEmptyError,
    SamplingError,
    SessionNotResidentError,
    UnknownPrefixError,
    UnknownSessionError,
    UnsupportedTierError,
)

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
    "BadBlockIndexError",
    "BadSpliceRangeError",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "Delta",
    "DownloadError",
    "Engine",
    "FuelError",
    "InvalidRequestError",
    "Loaded",
    "ModelContractError",
    "NonUniformStateError",
    "OffsetNotBlockAlignedError",
    "OutOfBlocksError",
    "PluginError",
    "PrefixMismatchError",
    "PrefixNotFullyFilledError",
    "PrefixTargetNotEmptyError",
    "SamplingError",
    "SamplingParams",
    "SessionNotResidentError",
    "Timing",
    "UnknownPrefixError",
    "UnknownSessionError",
    "UnsupportedTierError",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
