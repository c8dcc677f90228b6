"""The Llama family for Fuel: Llama 1 to 3.2, Mistral, SmolLM2, TinyLlama. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuel_core import hookimpl
from fuel_core.contracts import TIERS, Capabilities, ModelFamily

if TYPE_CHECKING:
    from fuel_core.contracts import DecodeModel


def _load(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_llama.model import load

    return load(*args, **kwargs)


def _tiny(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_llama.model import tiny

    return tiny(*args, **kwargs)


@hookimpl
def fuel_register_models() -> list[ModelFamily]:
    """The one family of this plugin."""
    capabilities = Capabilities(
        tiers=TIERS,
        dtypes=("float32", "bfloat16", "float16"),
        devices=("cpu", "cuda"),
        weight_formats=("safetensors",),
    )
    return [
        ModelFamily(
            name="llama",
            architectures=("LlamaForCausalLM", "MistralForCausalLM"),
            capabilities=capabilities,
            api_version="1.0",
            load=_load,
            tiny=_tiny,
        )
    ]
