"""Llama and Mistral: what of the config differs, which weights a layer has, and one layer function."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core.contracts import Checkpoint
from fuel_core.kernels import ops
from fuel_core.layers import Attention, ConfigReader, Decoder, DecoderParts, DecoderSizes, GatedMlp, Step
from fuel_core.weights import RandomWeights, WeightLoader, Weights, take_plain


@attrs.frozen(eq=False)
class LlamaLayer:
    """The weights of one layer; the norms are gains ``[hidden]``."""

    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: GatedMlp

    @classmethod
    def load(cls, weights: Weights, i: int, sizes: DecoderSizes, *, bias: bool, mlp_bias: bool) -> LlamaLayer:
        """Take layer ``i`` by the names of a Hugging Face checkpoint."""
        name = f"model.layers.{i}"
        gain = (sizes.hidden_size,)
        return cls(
            input_norm=take_plain(weights, f"{name}.input_layernorm.weight", gain),
            attention=Attention.load(weights, f"{name}.self_attn", sizes, qkv_bias=bias, out_bias=bias),
            post_norm=take_plain(weights, f"{name}.post_attention_layernorm.weight", gain),
            mlp=GatedMlp.load(weights, f"{name}.mlp", sizes, bias=mlp_bias),
        )


class LlamaDecoder(Decoder):
    """Pre-norm attention with rotary embedding, then a gated MLP."""

    def __init__(self, parts: DecoderParts, layers: list[LlamaLayer]) -> None:
        super().__init__(parts)
        self.layers = layers

    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        """See :meth:`Decoder.layer`."""
        w = self.layers[i]
        x = w.attention(i, ops.rms_norm(x, w.input_norm, self.eps), step, residual=x)  # [T, hidden]
        return w.mlp(ops.rms_norm(x, w.post_norm, self.eps), residual=x)


def build(
    weights: Weights, config: ConfigReader, dtype: torch.dtype, *, window: int | None = None
) -> LlamaDecoder:
    """Take all weights and assemble the model."""
    config.require("hidden_act", "silu", "silu")
    sizes = DecoderSizes.read(config)
    bias, mlp_bias = config.get("attention_bias", bool, False), config.get("mlp_bias", bool, False)
    parts = DecoderParts.load(weights, config.config, sizes, dtype, window=window)
    layers = [
        LlamaLayer.load(weights, i, sizes, bias=bias, mlp_bias=mlp_bias)
        for i in range(sizes.num_hidden_layers)
    ]
    return LlamaDecoder(parts, layers)


def load(checkpoint: Checkpoint, *, device: str | torch.device, dtype: torch.dtype) -> LlamaDecoder:
    """Load a checkpoint whose names and config are those of Hugging Face.

    Raises:
        CheckpointError: a weight is missing, left over or of another shape, or the config is not supported.
    """
    config = ConfigReader(checkpoint.config, checkpoint.source)
    weights = WeightLoader(checkpoint, device=device, dtype=dtype, ignore=_ignored(config))
    model = build(weights, config, dtype, window=_window(checkpoint.architecture, config))
    weights.finish()
    return model


def _ignored(config: ConfigReader) -> list[str]:
    """Tensors that some checkpoints carry and no Llama needs."""
    ignored = [r".*\.rotary_emb\.inv_freq"]
    if config.get("tie_word_embeddings", bool, False):
        ignored.append(r"lm_head\.weight")
    return ignored


def _window(architecture: str, config: ConfigReader) -> int | None:
    """Mistral's sliding window: 4,096 where the key is absent, none where it is null."""
    if architecture != "MistralForCausalLM" or config.config.get("sliding_window", 4096) is None:
        return None
    return config.size("sliding_window", 4096)


_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def tiny(seed: int = 0, **overrides: Any) -> LlamaDecoder:
    """A small random float32 model; ``overrides`` are config.json keys."""
    return build(RandomWeights(seed), ConfigReader({**_TINY, **overrides}, "tiny llama"), torch.float32)
