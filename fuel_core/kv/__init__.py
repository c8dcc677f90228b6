"""KV memory: its geometry, the block pool, and the caches. The first two work without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuel_core.kv.eviction import Evicted, EvictReport, Fidelity, SessionHandle, StateKind
from fuel_core.kv.geometry import KvBudget, KvGeometry, KvMemoryBudget, PoolCapacity
from fuel_core.kv.pool import KvBlockPool, PrefixId

if TYPE_CHECKING:
    from fuel_core.kv.cache import KvCache

__all__ = [
    "EvictReport",
    "Evicted",
    "Fidelity",
    "KvBlockPool",
    "KvBudget",
    "KvCache",
    "KvGeometry",
    "KvMemoryBudget",
    "PoolCapacity",
    "PrefixId",
    "SessionHandle",
    "StateKind",
]


def __getattr__(name: str) -> Any:
    if name == "KvCache":
        return import_module("fuel_core.kv.cache").KvCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
