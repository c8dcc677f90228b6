"""GGUF names, keys and row orders, as the base families spell them.

Source: the constants of llama.cpp's ``gguf-py`` and the row permutation of its ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuel_core.contracts import Checkpoint, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError

Matrix = Tensor | QuantizedTensor

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def map_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known stays as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    if match := re.fullmatch(r"(\w+)\.(weight|bias)", name):
        part, kind = match.groups()
        return f"{_GLOBAL_NAMES.get(part, part)}.{kind}"
    return name


def map_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json that the keys of a GGUF header amount to.

    Raises:
        CheckpointError: a needed key is absent, or the model is of a kind that no base family describes.
    """
    keys = _Keys(checkpoint)
    heads = keys.required("attention.head_count")
    hidden = keys.required("embedding_length")
    head_dim = keys.optional(
        "attention.key_length", keys.optional("rope.dimension_count", hidden // max(heads, 1))
    )
    keys.equal("attention.value_length", head_dim)
    keys.equal("rope.dimension_count", head_dim)
    keys.equal("expert_count", 0)
    return {
        "vocab_size": int(checkpoint.tensor("token_embd.weight").shape[0]),
        "hidden_size": hidden,
        "intermediate_size": keys.required("feed_forward_length"),
        "num_hidden_layers": keys.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.required("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in checkpoint,
        "mlp_bias": "blk.0.ffn_up.bias" in checkpoint,
        "tie_word_embeddings": "output.weight" not in checkpoint,
        "sliding_window": keys.optional("attention.sliding_window", None),
        "rope_parameters": _rope(checkpoint, keys),
    }


class _Keys:
    """The keys of a header under its architecture's prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def optional(self, key: str, default: Any) -> Any:
        return self._checkpoint.config.get(f"{self._checkpoint.architecture}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.optional(key, None)
        if value is None:
            raise self._error(key, "is absent", "a value")
        return value

    def equal(self, key: str, supported: Any) -> None:
        value = self.optional(key, supported)
        if value != supported:
            raise self._error(key, f"= {value}", f"{supported}")

    def _error(self, key: str, given: str, needed: str) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.source}: {self._checkpoint.architecture}.{key} {given}",
            needed=needed,
            remedy="this model needs another family plugin, or its file is damaged",
            key=key,
        )


def _rope(checkpoint: Checkpoint, keys: _Keys) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": keys.optional("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = keys.optional("rope.scaling.type", "none")
    if "rope_freqs.weight" in checkpoint:
        divisors = checkpoint.tensor("rope_freqs.weight")
        return rope | {"rope_type": "divisors", "divisors": divisors}
    if kind == "none":
        return rope
    return rope | {
        "rope_type": kind,
        "factor": keys.required("rope.scaling.factor"),
        "original_max_position_embeddings": keys.optional("rope.scaling.original_context_length", None),
        "beta_fast": keys.optional("rope.scaling.yarn_beta_fast", None),
        "beta_slow": keys.optional("rope.scaling.yarn_beta_slow", None),
    }


def neighbours_to_halves(matrix: Matrix, head_dim: int) -> Matrix:
    """Reorder the rows of Q or K from interleaved to half-split RoPE pairs: ``2 j + p`` → ``p D/2 + j``."""
    rows = matrix.shape[0]
    index = torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)  # [rows]
    return matrix.select_rows(index) if isinstance(matrix, QuantizedTensor) else matrix[index]


def map_tensors(
    checkpoint: Checkpoint, reorder: Mapping[str, Callable[[Matrix], Matrix]]
) -> dict[str, Callable[[], Matrix]]:
    """Every tensor under its Hugging Face name; ``reorder`` has how the rows of a part (``attn_q``) change."""

    def make(name: str) -> Matrix:
        tensor = checkpoint.tensor(name)
        part = name.split(".")[-2] if "." in name else name
        return reorder[part](tensor) if part in reorder else tensor

    names = [name for name in checkpoint if name != "rope_freqs.weight"]
    return {map_name(name): partial(make, name) for name in names}
