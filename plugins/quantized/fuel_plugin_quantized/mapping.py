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
from fuel_core.layers import ConfigReader

Matrix = Tensor | QuantizedTensor

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
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
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", max(1, hidden // heads))
    keys.equal("attention.value_length", head_dim)
    keys.equal("rope.dimension_count", head_dim)
    keys.equal("expert_count", 0)
    window = keys.window()
    return {
        "vocab_size": _vocab_size(checkpoint),
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in checkpoint,
        "mlp_bias": "blk.0.ffn_up.bias" in checkpoint,
        "tie_word_embeddings": "output.weight" not in checkpoint,
        "sliding_window": window,
        # A Qwen config names a window that is not in force; a GGUF header names none.
        "use_sliding_window": window is not None,
        "rope_parameters": _rope(checkpoint, keys),
    }


def _vocab_size(checkpoint: Checkpoint) -> int:
    """Rows of the embedding, since not every file has the key."""
    if "token_embd.weight" not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.source}: no tensor token_embd.weight",
            needed="the embedding of the model",
            remedy="the file is damaged, or holds no language model: fetch it again",
            name="token_embd.weight",
        )
    return int(checkpoint.tensor("token_embd.weight").shape[0])


class _Keys:
    """The keys of a header under its architecture's prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._prefix = checkpoint.architecture
        self._reader = ConfigReader(checkpoint.config, checkpoint.source)

    def optional(self, key: str) -> Any:
        return self._reader.config.get(f"{self._prefix}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        return self._reader.size(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._reader.get(f"{self._prefix}.{key}", float, default)

    def text(self, key: str, default: str) -> str:
        return self._reader.get(f"{self._prefix}.{key}", str, default)

    def window(self) -> int | None:
        """The sliding window; llama.cpp writes none as 0."""
        value = self.optional("attention.sliding_window")
        none = value is None or (isinstance(value, int) and value == 0)
        return None if none else self.size("attention.sliding_window")

    def equal(self, key: str, supported: float) -> None:
        value = self.optional(key)
        # An array has no one truth.
        if value is not None and not (isinstance(value, int | float) and value == supported):
            raise self.unsupported(key, value, f"{supported}")

    def unsupported(self, key: str, value: Any, needed: str) -> CheckpointError:
        return self._reader.unsupported(f"{self._prefix}.{key}", value, needed)


def _rope(checkpoint: Checkpoint, keys: _Keys) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.equal(f"rope.scaling.{key}", 1.0)
    keys.equal("rope.scale_linear", 1.0)
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_type": "default"}
    # llama.cpp takes a factor without a type for linear scaling.
    untyped = "none" if keys.optional("rope.scaling.factor") is None else "linear"
    kind = keys.text("rope.scaling.type", untyped)
    if "rope_freqs.weight" in checkpoint:
        if kind != "none":
            raise keys.unsupported("rope.scaling.type", kind, "none beside rope_freqs.weight")
        return rope | {"rope_type": "divisors", "divisors": _divisors(checkpoint)}
    if kind == "none":
        return rope
    return rope | {
        "rope_type": kind,
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.optional("rope.scaling.original_context_length"),
        "beta_fast": keys.optional("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.optional("rope.scaling.yarn_beta_slow"),
    }


def _divisors(checkpoint: Checkpoint) -> Tensor:
    divisors = checkpoint.tensor("rope_freqs.weight")
    if isinstance(divisors, QuantizedTensor):
        raise CheckpointError(
            f"{checkpoint.source}: rope_freqs.weight in {divisors.block_type.name}",
            needed="float32, float16 or bfloat16",
            remedy="the file is damaged, or was written by a faulty converter: fetch it again",
        )
    return divisors


def neighbours_to_halves(matrix: Matrix, head_dim: int) -> Matrix:
    """Reorder the rows of Q or K from interleaved to half-split RoPE pairs: ``2 j + p`` → ``p D/2 + j``."""
    rows = matrix.shape[0]
    if rows % head_dim:
        return matrix  # of a shape that no model takes; who asks for it will say so by its name
    index = torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)  # [rows]
    return matrix.select_rows(index) if isinstance(matrix, QuantizedTensor) else matrix[index]


def map_tensors(
    checkpoint: Checkpoint, reorder: Mapping[str, Callable[[Matrix], Matrix]]
) -> dict[str, Callable[[], Matrix]]:
    """Every tensor under its Hugging Face name; ``reorder`` says how a part's (``attn_q``'s) rows change."""

    def make(name: str) -> Matrix:
        tensor = checkpoint.tensor(name)
        part = name.split(".")[-2] if "." in name else name
        return reorder[part](tensor) if part in reorder else tensor

    names = [name for name in checkpoint if name != "rope_freqs.weight"]
    return {map_name(name): partial(make, name) for name in names}
