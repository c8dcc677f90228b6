"""KV memory: its geometry, the block pool, and the caches. The first two work without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuel_core.kv.eviction import Evicted, EvictReport, Fidelity, SessionHandle, StateKind
from fuel_core.kv.geometry import KvBudget, KvGeometry, KvMemoryBudget, PoolCapacity
from fuel_core.kv.pool import KvBlockPool, PrefixId

if TYPE_CHECKING:
    from fuel_core.kv.cache import KvCache
    from fuel_core.kv.device_pool import DeviceEvicted, DeviceKvPool, PageTable
    from fuel_core.kv.storage import BlockKind

__all__ = [
    "BlockKind",
    "DeviceEvicted",
    "DeviceKvPool",
    "EvictReport",
    "Evicted",
    "Fidelity",
    "KvBlockPool",
    "KvBudget",
    "KvCache",
    "KvGeometry",
    "KvMemoryBudget",
    "PageTable",
    "PoolCapacity",
    "PrefixId",
    "SessionHandle",
    "StateKind",
]

_HOMES = {
    "BlockKind": "storage",
    "DeviceEvicted": "device_pool",
    "DeviceKvPool": "device_pool",
    "KvCache": "cache",
    "PageTable": "device_pool",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fuel_core.kv.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
