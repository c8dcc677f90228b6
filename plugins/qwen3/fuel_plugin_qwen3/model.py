"""Qwen2 (biases on Q, K and V) and dense Qwen3 (norms on the heads of Q and K)."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core.contracts import Checkpoint
from fuel_core.kernels import ops
from fuel_core.layers import Attention, ConfigReader, Decoder, DecoderParts, DecoderSizes, GatedMlp, Step
from fuel_core.weights import RandomWeights, WeightLoader, Weights, take_plain


@attrs.frozen(kw_only=True)
class Variant:
    """What sets the two families apart."""

    head_dim: int | None
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool


def qwen2_variant(config: ConfigReader) -> Variant:
    """Qwen2: Q, K and V always have biases, the output never."""
    return Variant(head_dim=None, qkv_bias=True, out_bias=False, qk_norm=False)


def qwen3_variant(config: ConfigReader) -> Variant:
    """Qwen3: a norm per head, and biases only where the config says so."""
    bias = config.get("attention_bias", bool, False)
    return Variant(head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True)


@attrs.frozen(eq=False)
class QwenLayer:
    """The weights of one layer; the norms are gains ``[hidden]``."""

    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: GatedMlp

    @classmethod
    def load(cls, weights: Weights, i: int, sizes: DecoderSizes, variant: Variant) -> QwenLayer:
        """Take layer ``i`` by the names of a Hugging Face checkpoint."""
        name = f"model.layers.{i}"
        attention = Attention.load(
            weights,
            f"{name}.self_attn",
            sizes,
            qkv_bias=variant.qkv_bias,
            out_bias=variant.out_bias,
            qk_norm=variant.qk_norm,
        )
        return cls(
            input_norm=take_plain(weights, f"{name}.input_layernorm.weight", (sizes.hidden_size,)),
            attention=attention,
            post_norm=take_plain(weights, f"{name}.post_attention_layernorm.weight", (sizes.hidden_size,)),
            mlp=GatedMlp.load(weights, f"{name}.mlp", sizes),
        )


class QwenDecoder(Decoder):
    """Pre-norm attention with rotary embedding, then a gated MLP."""

    def __init__(self, parts: DecoderParts, layers: list[QwenLayer]) -> None:
        super().__init__(parts)
        self.layers = layers

    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        """See :meth:`Decoder.layer`."""
        w = self.layers[i]
        x = w.attention(i, ops.rms_norm(x, w.input_norm, self.eps), step, residual=x)  # [T, hidden]
        return w.mlp(ops.rms_norm(x, w.post_norm, self.eps), residual=x)


def build(weights: Weights, config: ConfigReader, variant: Variant, dtype: torch.dtype) -> QwenDecoder:
    """Take all weights and assemble the model."""
    config.require("hidden_act", "silu", "silu")
    # The window key stands in every Qwen config; only use_sliding_window puts it in force.
    sliding = (
        config.get("use_sliding_window", bool, False)
        and config.config.get("sliding_window", 4096) is not None
    )
    window = config.size("sliding_window", 4096) if sliding else None
    sizes = DecoderSizes.read(config, head_dim=variant.head_dim)
    parts = DecoderParts.load(weights, config.config, sizes, dtype, window=window)
    return QwenDecoder(
        parts, [QwenLayer.load(weights, i, sizes, variant) for i in range(sizes.num_hidden_layers)]
    )


def _load(
    checkpoint: Checkpoint, variant: Any, device: str | torch.device, dtype: torch.dtype
) -> QwenDecoder:
    config = ConfigReader(checkpoint.config, checkpoint.source)
    ignore = [r"lm_head\.weight"] if config.get("tie_word_embeddings", bool, False) else []
    weights = WeightLoader(checkpoint, device=device, dtype=dtype, ignore=ignore)
    model = build(weights, config, variant(config), dtype)
    weights.finish()
    return model


def load_qwen2(checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype) -> QwenDecoder:
    """Load a Qwen2 or Qwen2.5 checkpoint with Hugging Face's names.

    Raises:
        CheckpointError: a weight is missing, left over or of another shape, or the config is not supported.
    """
    return _load(checkpoint, qwen2_variant, device, dtype)


def load_qwen3(checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype) -> QwenDecoder:
    """Load a dense Qwen3 checkpoint with Hugging Face's names.

    Raises:
        CheckpointError: a weight is missing, left over or of another shape, or the config is not supported.
    """
    return _load(checkpoint, qwen3_variant, device, dtype)


_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 1000000.0,
}


def tiny_qwen2(seed: int = 0, **overrides: Any) -> QwenDecoder:
    """A small random float32 Qwen2; ``overrides`` are config.json keys."""
    config = ConfigReader({**_TINY, **overrides}, "tiny qwen2")
    return build(RandomWeights(seed), config, qwen2_variant(config), torch.float32)


def tiny_qwen3(seed: int = 0, **overrides: Any) -> QwenDecoder:
    """A small random float32 Qwen3; ``overrides`` are config.json keys."""
    config = ConfigReader({**_TINY, **overrides}, "tiny qwen3")
    return build(RandomWeights(seed), config, qwen3_variant(config), torch.float32)
