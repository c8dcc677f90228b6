"""The GGUF architectures that this plugin maps, and what sets each apart. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Entry:
    """One GGUF architecture, and the family that computes it.

    Attributes:
        base: that family's name in the registry.
        architecture: what Hugging Face calls the architecture.
        windowed: what it calls it where a sliding window is in force.
        reordered: parts of a layer whose rows stand in interleaved RoPE pairs.
        biased: parts of a layer that always have a bias.
        norms_heads: whether queries and keys are normed head by head.
        tiny: GGUF keys, without the prefix, in which the small random model differs.
    """

    base: str
    architecture: str
    windowed: str
    reordered: tuple[str, ...] = ()
    biased: tuple[str, ...] = ()
    norms_heads: bool = False
    tiny: Mapping[str, Any] = attrs.field(factory=dict)


ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {
        "llama": Entry(
            base="llama",
            architecture="LlamaForCausalLM",
            # The key stands only in files that were converted from a Mistral with a window.
            windowed="MistralForCausalLM",
            reordered=("attn_q", "attn_k"),
        ),
        "qwen2": Entry(
            base="qwen2",
            architecture="Qwen2ForCausalLM",
            windowed="Qwen2ForCausalLM",
            biased=("attn_q", "attn_k", "attn_v"),
        ),
        "qwen3": Entry(
            base="qwen3",
            architecture="Qwen3ForCausalLM",
            windowed="Qwen3ForCausalLM",
            norms_heads=True,
            # Heads that are wider together than the model, as in most of Qwen3.
            tiny={"attention.key_length": 24, "attention.value_length": 24},
        ),
    }
)
"""By ``general.architecture``."""


def family_name(architecture: str) -> str:
    """The name under which the family of a GGUF architecture is registered."""
    return f"{architecture}-gguf"
