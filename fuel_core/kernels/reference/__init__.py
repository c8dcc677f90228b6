"""The kernels in plain PyTorch: they say what is right, on any device and in any float dtype."""

from fuel_core.kernels.reference.attention import attention, write_kv
from fuel_core.kernels.reference.linear import embedding, linear
from fuel_core.kernels.reference.pointwise import rms_norm, silu_mul

__all__ = ["attention", "embedding", "linear", "rms_norm", "silu_mul", "write_kv"]
