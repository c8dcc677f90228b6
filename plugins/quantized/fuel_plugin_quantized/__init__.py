"""GGUF models for Fuel, computed on their quantized weights. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuel_core import hookimpl
from fuel_core.contracts import TIERS, Capabilities, ModelFamily

if TYPE_CHECKING:
    from fuel_core.contracts import DecodeModel


def _load_llama(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_quantized.llama import load

    return load(*args, **kwargs)


def _tiny_llama(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_quantized.llama import tiny

    return tiny(*args, **kwargs)


@hookimpl
def fuel_register_models() -> list[ModelFamily]:
    """The GGUF form of each family that this plugin can map."""
    capabilities = Capabilities(
        tiers=TIERS,
        dtypes=("float32", "bfloat16", "float16"),
        devices=("cpu", "cuda"),
        weight_formats=("gguf",),
    )
    return [
        ModelFamily(
            name="llama-gguf",
            gguf_architectures=("llama",),
            capabilities=capabilities,
            api_version="1.0",
            load=_load_llama,
            tiny=_tiny_llama,
        )
    ]
