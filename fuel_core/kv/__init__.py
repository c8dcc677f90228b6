"""KV memory: its geometry, the block pool, and the caches. The first two work without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuel_core.kv.geometry import KvBudget, KvGeometry, PoolCapacity
from fuel_core.kv.pool import KvBlockPool, SessionHandle

if TYPE_CHECKING:
    from fuel_core.kv.cache import KvCache

__all__ = ["KvBlockPool", "KvBudget", "KvCache", "KvGeometry", "PoolCapacity", "SessionHandle"]


def __getattr__(name: str) -> Any:
    if name == "KvCache":
        return import_module("fuel_core.kv.cache").KvCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
