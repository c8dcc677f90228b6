"""Qwen2 and dense Qwen3 for Fuel. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuel_core import hookimpl
from fuel_core.contracts import TIERS, Capabilities, ModelFamily

if TYPE_CHECKING:
    from fuel_core.contracts import DecodeModel


def _load_qwen2(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_qwen3.model import load_qwen2

    return load_qwen2(*args, **kwargs)


def _load_qwen3(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_qwen3.model import load_qwen3

    return load_qwen3(*args, **kwargs)


def _tiny_qwen2(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_qwen3.model import tiny_qwen2

    return tiny_qwen2(*args, **kwargs)


def _tiny_qwen3(*args: Any, **kwargs: Any) -> DecodeModel:
    from fuel_plugin_qwen3.model import tiny_qwen3

    return tiny_qwen3(*args, **kwargs)


@hookimpl
def fuel_register_models() -> list[ModelFamily]:
    """The two families of this plugin."""
    capabilities = Capabilities(
        tiers=TIERS,
        dtypes=("float32", "bfloat16", "float16"),
        devices=("cpu", "cuda"),
        weight_formats=("safetensors",),
    )
    return [
        ModelFamily(
            name="qwen2",
            architectures=("Qwen2ForCausalLM",),
            capabilities=capabilities,
            api_version="1.0",
            load=_load_qwen2,
            tiny=_tiny_qwen2,
        ),
        ModelFamily(
            name="qwen3",
            architectures=("Qwen3ForCausalLM",),
            capabilities=capabilities,
            api_version="1.0",
            load=_load_qwen3,
            tiny=_tiny_qwen3,
        ),
    ]
