"""The kernels in plain PyTorch: they say what is right, on any device and in any float dtype."""

from fuel_core.kernels.reference.attention import attention, paged_attention, rotate, write_kv, write_paged_kv
from fuel_core.kernels.reference.linear import embedding, linear, product
from fuel_core.kernels.reference.pointwise import rms_norm, silu_mul
from fuel_core.kernels.reference.running import arena, set_threads
from fuel_core.kernels.reference.selection import draw, largest

__all__ = [
    "arena",
    "attention",
    "draw",
    "embedding",
    "largest",
    "linear",
    "paged_attention",
    "product",
    "rms_norm",
    "rotate",
    "set_threads",
    "silu_mul",
    "write_kv",
    "write_paged_kv",
]
