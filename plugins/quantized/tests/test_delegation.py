"""A GGUF model is the model of its base family on the same weights, its RoPE scaling included.

Scaled and unscaled angles are equal at position 0 and drift apart from there, so everything here is compared
at position 40 and on, in logits: a wrapper that reached past the scaling would give no error and, for long,
the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch
from support_models import RecordingModel, distance, feed, feed_together, new_cache, scheduler_of
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import DecodeModel, ModelDims, QuantizedTensor
from fuel_core.schedule import Batched, RoundRobin
from fuel_core.weights import MemoryCheckpoint
from fuel_plugin_quantized.families import tiny_checkpoint

POSITION, STEPS = 40, 6
PROMPT = [1 + i * 7 % 95 for i in range(POSITION)]
THETA, HEAD_DIM, HEADS, KV_HEADS = 10000.0, 16, 4, 2
FACTOR, LOW, HIGH, ORIGINAL = 8.0, 1.0, 4.0, 8192
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": FACTOR,
    "low_freq_factor": LOW,
    "high_freq_factor": HIGH,
    "original_max_position_embeddings": ORIGINAL,
}
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def divisors() -> Tensor:
    """What a converter writes for the Llama 3.1 scaling, float32 ``[D/2]``, one wavelength at a time."""
    values = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * THETA ** (2 * pair / HEAD_DIM)
        if wavelength < ORIGINAL / HIGH:
            values.append(1.0)
        elif wavelength > ORIGINAL / LOW:
            values.append(FACTOR)
        else:
            smooth = (ORIGINAL / wavelength - LOW) / (HIGH - LOW)
            values.append(1 / ((1 - smooth) / FACTOR + smooth))
    return torch.tensor(values)


def quantized(seed: int, *, scaled: bool) -> DecodeModel:
    """The surface under test, loaded from a GGUF checkpoint with or without ``rope_freqs``."""
    checkpoint = tiny_checkpoint(seed=seed)
    if scaled:
        tensors = {**checkpoint.tensors, "rope_freqs.weight": divisors}
        checkpoint = attrs.evolve(checkpoint, tensors=tensors)
    return registry.family("llama-gguf").load(checkpoint, device="cpu", dtype=torch.float32)


def dequantized(tensor: Tensor | QuantizedTensor) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor
    kind = gguf.GGMLQuantizationType[tensor.block_type.name]
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data.numpy(), kind)))


def half_split(matrix: Tensor, heads: int) -> Tensor:
    """Rows of Q or K from interleaved RoPE pairs to the two halves that Hugging Face has."""
    return matrix.view(heads, HEAD_DIM // 2, 2, -1).transpose(1, 2).reshape(matrix.shape)


def hugging_face(checkpoint: MemoryCheckpoint) -> dict[str, Callable[[], Tensor]]:
    """Float32 weights under Hugging Face's names, mapped here and not by the plugin."""
    made = {}
    for name in checkpoint:
        *layer, part, kind = name.split(".")
        tensor = dequantized(checkpoint.tensor(name))
        if part in ("attn_q", "attn_k"):
            tensor = half_split(tensor, HEADS if part == "attn_q" else KV_HEADS)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        made[f"{prefix}{MODULES[part]}.{kind}"] = tensor
    return {name: lambda tensor=tensor: tensor for name, tensor in made.items()}


def base(seed: int, rope_scaling: dict[str, Any] | None) -> DecodeModel:
    """The oracle: the llama family on the same weights, expanded, with the scaling as its config has it."""
    config = {
        "vocab_size": 96,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "max_position_embeddings": 256,
        "rope_scaling": rope_scaling,
    }
    checkpoint = MemoryCheckpoint(
        source="expanded",
        format="safetensors",
        architecture="LlamaForCausalLM",
        config=config,
        tensors=hugging_face(tiny_checkpoint(seed=seed)),
    )
    return registry.family("llama").load(checkpoint, device="cpu", dtype=torch.float32)


def decoded(model: DecodeModel, prompt: list[int] = PROMPT) -> Tensor:
    """Logits ``[STEPS, vocab]`` of decode steps after the prompt, on tokens that no model chooses."""
    cache = new_cache(model, len(prompt) + STEPS)
    feed(model, cache, *prompt)
    return torch.stack([feed(model, cache, 7 + step) for step in range(STEPS)])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_quantized_llama_keeps_the_scaling_that_its_file_carries(seed: int) -> None:
    scaled, unscaled = base(seed, LLAMA_3_1), base(seed, None)
    apart = (decoded(scaled) - decoded(unscaled)).abs().amax(-1)  # [STEPS]
    assert float(apart.min()) > 1e-3, "the comparison below could not tell a lost scaling"
    assert distance(decoded(quantized(seed, scaled=True)), decoded(scaled)) < 1e-5
    assert distance(decoded(quantized(seed, scaled=True)), decoded(unscaled)) > 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_a_quantized_llama_without_divisors_is_not_scaled(seed: int) -> None:
    plain = decoded(quantized(seed, scaled=False))
    assert distance(plain, decoded(base(seed, None))) < 1e-5
    assert distance(plain, decoded(quantized(seed, scaled=True))) > 1e-3


def test_the_first_position_could_not_have_told_them_apart() -> None:
    scaled, unscaled = quantized(0, scaled=True), quantized(0, scaled=False)
    assert torch.equal(*(feed(model, new_cache(model, 1), 5) for model in (scaled, unscaled)))


def test_the_batched_arm_keeps_the_scaling_too() -> None:
    model, oracle = quantized(0, scaled=True), base(0, LLAMA_3_1)
    caches = [new_cache(model, POSITION + STEPS) for _ in range(2)]
    for cache, prompt in zip(caches, (PROMPT, PROMPT[::-1]), strict=True):
        feed(model, cache, *prompt)
    rows = torch.stack(
        [feed_together(model, caches, [7 + step] * 2) for step in range(STEPS)]
    )  # [STEPS, 2, V]
    for row, prompt in enumerate((PROMPT, PROMPT[::-1])):
        assert distance(rows[:, row], decoded(oracle, prompt)) < 1e-4


@pytest.mark.parametrize("policy", [RoundRobin(), Batched(2)])
def test_sessions_of_a_scheduler_decode_with_the_scaling(policy: RoundRobin | Batched) -> None:
    recording, oracle = RecordingModel(quantized(1, scaled=True)), base(1, LLAMA_3_1)
    scheduler = scheduler_of(recording, policy)
    prompts = (PROMPT, PROMPT[::-1])
    ids = [scheduler.add_session(prompt, max_new_tokens=5) for prompt in prompts]
    scheduler.run_to_completion()
    assert bool(recording.batched_calls()) == isinstance(policy, Batched)
    for id, prompt in zip(ids, prompts, strict=True):
        tokens, logits = recording.served(scheduler, id)
        cache = new_cache(oracle, POSITION + 5)
        expected = [feed(oracle, cache, *prompt), *(feed(oracle, cache, token) for token in tokens[:-1])]
        assert distance(logits, torch.stack(expected)) < 1e-4


def test_a_quantized_llama_has_the_geometry_and_the_arms_of_its_base() -> None:
    model, oracle = quantized(0, scaled=True), base(0, LLAMA_3_1)
    assert ModelDims.from_model(model) == ModelDims.from_model(oracle) == ModelDims(2, KV_HEADS, HEAD_DIM)
    assert model.supports_batched_decode() == oracle.supports_batched_decode()
    assert (
        (model.vocab_size(), model.max_context()) == (oracle.vocab_size(), oracle.max_context()) == (96, 256)
    )


def test_a_quantized_llama_holds_blocks_and_no_expanded_matrix() -> None:
    model: Any = quantized(0, scaled=True)
    layer = model.layers[0]
    maps = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    held = [weight for each in maps for weight in each.product.weights]
    assert len(held) == 7
    assert all(isinstance(weight, QuantizedTensor) for weight in held)
    assert isinstance(model.parts.embedding, QuantizedTensor)
    assert isinstance(model.parts.head, QuantizedTensor)
