"""GGUF models for Fuel, computed on their quantized weights. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fuel_core import hookimpl
from fuel_core.contracts import TIERS, Capabilities, ModelFamily
from fuel_plugin_quantized.table import ENTRIES, family_name

if TYPE_CHECKING:
    from fuel_core.contracts import DecodeModel


def _load(architecture: str, *args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_quantized.families import load

    return load(architecture, *args, **kwargs)


def _tiny(architecture: str, *args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_quantized.families import tiny

    return tiny(architecture, *args, **kwargs)


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
            name=family_name(architecture),
            gguf_architectures=(architecture,),
            capabilities=capabilities,
            api_version="1.0",
            load=partial(_load, architecture),
            tiny=partial(_tiny, architecture),
        )
        for architecture in ENTRIES
    ]
